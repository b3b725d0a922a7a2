#include "exchange.h"

#include <chrono>
#include <climits>
#include <stdexcept>
#include <thread>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "threads.h"

namespace shoal {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kSpins = 1000;  // tens of microseconds; after that, the awaited rank may well need this core
constexpr long kNapNs = 100'000'000;

// A rank's line in the shared memory.
struct alignas(SHOAL_EXCHANGE_LINE) Line {
    std::atomic<uint32_t> turn;      // exchanges that the rank has reached
    std::atomic<uint32_t> sleepers;  // ranks that sleep until it reaches the next
};
static_assert(sizeof(Line) == SHOAL_EXCHANGE_LINE && std::atomic<uint32_t>::is_always_lock_free);

// Sleeps until the word is woken, but not for long (kNapNs), and not at all if the word is no longer `seen`.
void nap(std::atomic<uint32_t>& word, uint32_t seen) {
#if defined(__linux__)
    const timespec limit{0, kNapNs};
    syscall(SYS_futex, &word, FUTEX_WAIT, seen, &limit, nullptr, 0);
#else
    std::this_thread::sleep_for(std::chrono::microseconds(50));
#endif
}

void wake(std::atomic<uint32_t>& word) {
#if defined(__linux__)
    syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#endif
}

// Over memory that all ranks have mapped: a line per rank, then two parts per rank, used alternately. When a rank
// overwrites its part of the exchange before last, it has seen all ranks reach the last one: none still reads that
// part.
class SharedExchange : public Exchange {
public:
    explicit SharedExchange(const ShoalExchange& e)
        : Exchange(e),
          lines_(static_cast<Line*>(e.memory)),
          parts_(reinterpret_cast<float*>(lines_ + e.size)),
          timeout_(e.timeout_s),
          turn_(lines_[rank].turn.load()) {}

    float* mine() override { return parts_ + place(turn() + 1, rank); }

    void publish(int64_t) override {
        if (has_failed()) return;
        const uint32_t next = turn() + 1;
        Line& own = lines_[rank];
        // Sequentially consistent, as in await(): either the sleeper sees the turn, or it is counted as a sleeper here.
        own.turn.store(next);
        if (own.sleepers.load() > 0) wake(own.turn);
        for (int r = 0; r < size; ++r)
            if (r != rank && !await(lines_[r], next)) failed_ = true;
        turn_.store(next, std::memory_order_relaxed);
    }

    const float* part(int r) const override { return parts_ + place(turn(), r); }

private:
    uint32_t turn() const { return turn_.load(std::memory_order_relaxed); }
    int64_t place(uint32_t turn, int r) const { return (int64_t{turn % 2} * size + r) * capacity; }

    // The counters wrap around, so only their difference means something.
    static bool is_there(uint32_t turn, uint32_t awaited) { return static_cast<int32_t>(turn - awaited) >= 0; }

    bool await(Line& other, uint32_t awaited) const {
        for (int spin = 0; spin < kSpins; ++spin) {
            if (is_there(other.turn.load(std::memory_order_acquire), awaited)) return true;
            relax();
        }
        const auto deadline = Clock::now() + timeout_;
        other.sleepers.fetch_add(1);
        bool found;
        for (uint32_t seen; !(found = is_there(seen = other.turn.load(), awaited)) && Clock::now() < deadline;)
            nap(other.turn, seen);
        other.sleepers.fetch_sub(1);
        return found;
    }

    Line* const lines_;
    float* const parts_;
    const std::chrono::duration<double> timeout_;
    std::atomic<uint32_t> turn_;  // this rank's turn, for all of its threads to read
};

// The parts are carried by the caller's function, for ranks on several hosts.
class CarriedExchange : public Exchange {
public:
    explicit CarriedExchange(const ShoalExchange& e)
        : Exchange(e), gather_(e.gather), mine_(static_cast<size_t>(capacity)), all_(static_cast<size_t>(capacity * size)) {}

    float* mine() override { return mine_.data(); }
    void publish(int64_t count) override {
        if (has_failed()) return;
        count_.store(count, std::memory_order_relaxed);
        if (gather_(mine_.data(), count, all_.data()) != 0) failed_ = true;
    }
    const float* part(int r) const override { return all_.data() + r * count_.load(std::memory_order_relaxed); }

private:
    int (*const gather_)(const float*, int64_t, float*);
    std::vector<float> mine_, all_;
    std::atomic<int64_t> count_{0};
};

}  // namespace

std::unique_ptr<Exchange> make_exchange(const ShoalExchange& e) {
    if (e.size < 2 || e.rank < 0 || e.rank >= e.size || e.capacity < 1 || (e.memory == nullptr) == (e.gather == nullptr))
        throw std::invalid_argument("exchange: must be of two ranks or more, by memory or by a function");
    if (e.memory != nullptr) return std::make_unique<SharedExchange>(e);
    return std::make_unique<CarriedExchange>(e);
}

}  // namespace shoal
