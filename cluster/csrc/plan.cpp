// Plans held requests as policies/plan.py does, one after another: each is given to its best replica, and the next one
// sees what is left.
#include <cmath>
#include <limits>
#include <new>
#include <vector>

#include "cost.h"

namespace {

// Compiled once for each of these sets; the best that the processor has is chosen when the library is loaded.
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__) && __GNUC__ >= 12
#define FOR_EACH_SET __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define FOR_EACH_SET
#endif

constexpr double NEVER = std::numeric_limits<double>::infinity();
constexpr int64_t NO_MEMORY = -1, OTHER_REPLICAS = -2;

/* What `one` costs on each of n replicas, infinite where it cannot go; see `cost` in policies/routing.py. The same
   `with_room`, infinite where there is none now. `load`: tokens that they compute before it. */
FOR_EACH_SET void price_all(const ShoalHeld& one, const int64_t* columns, const int64_t* __restrict load,
                            double prefill_price, double sequence_price, double* __restrict costs,
                            double* __restrict with_room) {
    const int64_t n = one.num_replicas, tokens = one.num_tokens, block_size = one.block_size;
    const int64_t needed = one.num_blocks_needed, known = one.num_known_blocks;
    const double spared = one.spared;
    const int64_t* __restrict matched = one.matched;
    const int64_t* __restrict capacity = columns + shoal::CAPACITY * n;
    const int64_t* __restrict sequences = columns + shoal::SEQUENCES * n;
    const int64_t* __restrict room = columns + shoal::ROOM * n;
    const int64_t* __restrict slower = columns + shoal::SLOWER * n;
    for (int64_t i = 0; i < n; ++i) {
        const int64_t left = shoal::uncached(tokens, matched[i], block_size), missing = needed - matched[i];
        const int64_t elsewhere =
            left - shoal::uncached(tokens, known > matched[i] ? known : matched[i], block_size);
        const double cost = shoal::price(left, elsewhere, spared, load[i], sequences[i], slower[i],
                                         prefill_price, sequence_price);
        costs[i] = capacity[i] >= needed ? cost : NEVER;
        with_room[i] = room[i] >= (missing > 1 ? missing : 1) ? costs[i] : NEVER;
    }
    if (one.excluded != nullptr)
        for (int64_t i = 0; i < n; ++i)
            if (one.excluded[i]) costs[i] = with_room[i] = NEVER;
}

/* The place of the least of n costs, the first of equals; -1 if all are infinite. */
FOR_EACH_SET int64_t place_of_least(const double* costs, int64_t n) {
    using Lanes = double __attribute__((vector_size(64)));
    constexpr int64_t NUM_LANES = 8;
    Lanes least = {NEVER, NEVER, NEVER, NEVER, NEVER, NEVER, NEVER, NEVER}, next;
    int64_t i = 0;
    for (; i + NUM_LANES <= n; i += NUM_LANES) {
        std::memcpy(&next, costs + i, sizeof next);
        least = next < least ? next : least;
    }
    double least_of_all = NEVER;
    for (int64_t lane = 0; lane < NUM_LANES; ++lane) least_of_all = std::min(least_of_all, least[lane]);
    for (; i < n; ++i) least_of_all = std::min(least_of_all, costs[i]);
    return least_of_all < NEVER ? std::find(costs, costs + n, least_of_all) - costs : -1;
}

template <typename T>
T field(const char* row, int64_t offset) {
    T value;
    std::memcpy(&value, row + offset, sizeof value);
    return value;
}

/* What the replica at `place` has told of itself. */
const char* told_at(const ShoalCluster& cluster, int64_t place) {
    return cluster.told + place * cluster.layout->row_bytes;
}

/* Whether it may start something if that is urgent: `StepsAhead.most` of policies/steps_ahead.py. */
bool is_startable(const ShoalCluster& cluster, const int64_t* columns, int64_t place) {
    const auto at = [&](shoal::Row name) { return columns[name * cluster.num_replicas + place]; };
    if (at(shoal::CAPACITY) < 0) return false;
    const char* told = told_at(cluster, place);
    const auto step = field<int64_t>(told, cluster.layout->step_tokens);
    const double more = field<bool>(told, cluster.layout->by_due) ? static_cast<double>(step - 1) : 0.0;
    return static_cast<double>(at(shoal::URGENT)) <= cluster.max_steps_ahead * static_cast<double>(step) + more;
}

struct Scratch {
    std::vector<double> costs, with_room;
    std::vector<int64_t> loads;
};

class Plan {
public:
    Plan(const ShoalCluster& cluster, int64_t* columns, Scratch& scratch)
        : cluster_(cluster), columns_(columns), scratch_(scratch) {
        const auto n = static_cast<size_t>(cluster.num_replicas);
        scratch.costs.resize(n), scratch.with_room.resize(n), scratch.loads.resize(n);
    }

    /* The place of the best replica, of those with room if there are any; -1: none takes the request. */
    int64_t best(const ShoalHeld& one, bool* has_room) const {
        const int64_t* load = row(shoal::LOAD);
        if (one.passed != nullptr) {
            for (int64_t i = 0; i < size(); ++i) scratch_.loads[i] = load[i] - one.passed[i];
            load = scratch_.loads.data();
        }
        double *costs = scratch_.costs.data(), *with_room = scratch_.with_room.data();
        price_all(one, columns_, load, cluster_.prefill_price, price_of_sequence(one.decode_steps), costs, with_room);
        const int64_t place = place_of_least(with_room, size());
        *has_room = place >= 0;
        return *has_room ? idle_and_sooner(one, load, place) : place_of_least(costs, size());
    }

    /* `place`, or if that takes longer than the request is patient, the cheapest replica that has nothing to compute
       and begins to answer sooner: `idle_and_sooner` of policies/routing.py. */
    int64_t idle_and_sooner(const ShoalHeld& one, const int64_t* load, int64_t place) const {
        if (cluster_.patience <= 0) return place;
        const auto until_first = [&](int64_t i) {
            const int64_t own = shoal::uncached(one.num_tokens, one.matched[i], one.block_size);
            const double slower = 1.0 + static_cast<double>(at(shoal::SLOWER, i)) * shoal::PER_CENT;
            return static_cast<double>(load[i] + own) * slower;
        };
        const double there = until_first(place);
        if (there <= std::floor((one.objective_s - cluster_.now) * cluster_.patience)) return place;
        const double* with_room = scratch_.with_room.data();
        int64_t best = -1;
        for (int64_t i = 0; i < size(); ++i)
            if (at(shoal::LOAD, i) == 0 && with_room[i] < NEVER && until_first(i) < there)
                if (best < 0 || with_room[i] < with_room[best]) best = i;
        return best < 0 ? place : best;
    }

    /* `can_start` of policies/plan.py. */
    bool can_start(const ShoalHeld& one, int64_t place) const {
        if (at(shoal::ROOM, place) < std::max<int64_t>(one.num_blocks_needed - one.matched[place], 1)) return false;
        if (at(shoal::CAPACITY, place) < 0) return false;
        const ShoalTold& layout = *cluster_.layout;
        const char* told = told_at(cluster_, place);
        if (!field<bool>(told, layout.known)) return false;
        int64_t ahead = 0;
        if (one.passed != nullptr) {
            ahead = at(shoal::LOAD, place) - one.passed[place];
        } else {
            int64_t within = 0;
            while (within + 1 < layout.num_dues && layout.due_within_s[within] < one.due_s - cluster_.now) ++within;
            ahead = field<int64_t>(told, layout.dues + within * static_cast<int64_t>(sizeof(int64_t))) +
                    at(shoal::RESERVED_TOKENS, place);
        }
        const double step = static_cast<double>(field<int64_t>(told, layout.step_tokens));
        const double num_ahead = static_cast<double>(ahead);
        const int64_t uncached = std::max<int64_t>(one.num_tokens - one.matched[place] * one.block_size, 1);
        const double num_tokens = static_cast<double>(uncached);
        if (num_ahead <= cluster_.max_steps_ahead * step) return true;
        const double room = (cluster_.max_steps_ahead + 1) * step - num_ahead;
        const double most = num_tokens > step && room > 0 ? room + step : room;
        return field<bool>(told, layout.by_due) && num_tokens <= most;
    }

    /* `foresee` of policies/foresight.py, and the room that the wish takes is set aside. */
    void foresee(const ShoalWish& wish, int64_t block_size) {
        const int64_t num_blocks = wish.num_blocks + wish.num_cached_blocks;
        const int64_t num_tokens = wish.num_tokens + wish.num_cached_blocks * block_size;
        const auto blocks_at = [&](int64_t i) { return i == wish.place ? wish.num_blocks : num_blocks; };
        const auto tokens_at = [&](int64_t i) { return i == wish.place ? wish.num_tokens : num_tokens; };
        const double sequence_price = price_of_sequence(wish.decode_steps);
        double *costs = scratch_.costs.data(), *with_room = scratch_.with_room.data();
        for (int64_t i = 0; i < size(); ++i) {
            const double cost = shoal::price(tokens_at(i), 0, 0.0, at(shoal::LOAD, i), at(shoal::SEQUENCES, i),
                                             at(shoal::SLOWER, i), cluster_.prefill_price, sequence_price);
            costs[i] = at(shoal::CAPACITY, i) >= num_blocks ? cost : NEVER;
            with_room[i] = at(shoal::ROOM, i) >= blocks_at(i) ? costs[i] : NEVER;
        }
        const int64_t roomy = place_of_least(with_room, size());
        const double* prices = roomy >= 0 ? with_room : costs;
        const int64_t least = roomy >= 0 ? roomy : place_of_least(costs, size());
        const int64_t place = least >= 0 && prices[least] < prices[wish.place] ? least : wish.place;
        promise(place, blocks_at(place), tokens_at(place));
    }

    /* `promise` of policies/columns.py, to one request. */
    void promise(int64_t place, int64_t num_blocks, int64_t num_tokens) {
        for (const auto name : {shoal::NUM_RESERVED, shoal::SEQUENCES}) to(name, place) += 1;
        for (const auto name : {shoal::RESERVED_TOKENS, shoal::LOAD, shoal::URGENT}) to(name, place) += num_tokens;
        to(shoal::RESERVED_BLOCKS, place) += num_blocks;
        to(shoal::OPEN_BLOCKS, place) -= num_blocks;
        to(shoal::OPEN_SLOTS, place) -= 1;
        to(shoal::ROOM, place) = at(shoal::OPEN_SLOTS, place) > 0 ? at(shoal::OPEN_BLOCKS, place) : -1;
    }

private:
    const int64_t* row(shoal::Row name) const { return columns_ + name * size(); }
    int64_t at(shoal::Row name, int64_t place) const { return row(name)[place]; }
    int64_t& to(shoal::Row name, int64_t place) { return columns_[name * size() + place]; }
    int64_t size() const { return cluster_.num_replicas; }
    double price_of_sequence(int64_t decode_steps) const {
        return cluster_.decode_price * static_cast<double>(decode_steps) / static_cast<double>(cluster_.priced_steps);
    }

    const ShoalCluster& cluster_;
    int64_t* columns_;
    Scratch& scratch_;
};

}  // namespace

void shoal_outlook(const ShoalCluster* cluster, const int64_t* columns, double token_s, ShoalOutlook* outlook) {
    const int64_t n = cluster->num_replicas;
    const ShoalTold& layout = *cluster->layout;
    int64_t count = 0, num_idle = 0, least = -1, room = -1;
    double wait_s = NEVER;
    for (int64_t place = 0; place < n; ++place) {
        const int64_t capacity = columns[shoal::CAPACITY * n + place];
        room = std::max(room, columns[shoal::ROOM * n + place]);
        if (capacity < 0) continue;
        least = least < 0 ? capacity : std::min(least, capacity);
        num_idle += columns[shoal::LOAD * n + place] == 0;
        if (!is_startable(*cluster, columns, place)) continue;
        ++count;
        const char* told = told_at(*cluster, place);
        const double step_s = field<int64_t>(told, layout.num_running) > 0 ? field<double>(told, layout.step_s) : 0.0;
        wait_s = std::min(wait_s, static_cast<double>(columns[shoal::URGENT * n + place]) * token_s + step_s);
    }
    *outlook = {count, num_idle, std::max<int64_t>(least, 0), room, wait_s < NEVER ? wait_s : 0.0};
}

int64_t shoal_plan(const ShoalCluster* cluster, int64_t* columns, const ShoalHeld* requests, int64_t count,
                   int plans_all, int64_t* decided, int* may_start) try {
    static Scratch scratch;  // for one thread at a time: calls keep the interpreter's lock
    Plan plan(*cluster, columns, scratch);
    const auto is_open = [&](int64_t place) { return is_startable(*cluster, columns, place); };
    const auto count_open = [&] {
        int64_t count = 0;
        for (int64_t place = 0; place < cluster->num_replicas; ++place) count += is_open(place);
        return count;
    };
    int64_t num_startable = count_open();
    *may_start = 0;
    for (int64_t number = 0; number < count; ++number) {
        const ShoalHeld& one = requests[number];
        if (!(plans_all || num_startable > 0)) return number;
        if (one.num_replicas != cluster->num_replicas) return OTHER_REPLICAS;
        for (int64_t i = 0; i < one.num_before; ++i) plan.foresee(one.before[i], one.block_size);
        if (one.num_before > 0) num_startable = count_open();
        bool has_room = false;
        const int64_t place = plan.best(one, &has_room);
        if (has_room && plan.can_start(one, place)) {
            *may_start = 1;
            return number;
        }
        decided[2 * number] = place;
        decided[2 * number + 1] = place < 0 ? 0 : one.matched[place];
        if (place < 0) continue;
        num_startable -= is_open(place);
        plan.promise(place, std::max<int64_t>(one.num_blocks_needed - one.matched[place], 0),
                     std::max<int64_t>(one.num_tokens - one.matched[place] * one.block_size, 1));
        num_startable += is_open(place);
    }
    return count;
} catch (const std::bad_alloc&) {
    return NO_MEMORY;
}
