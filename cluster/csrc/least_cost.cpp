// The cost of policies/routing.py: the same operations in the same order, so that results agree to the last bit.
#include <algorithm>

#include "shoal_placement.h"

namespace {

enum Row { CAPACITY = 3, LOAD, SEQUENCES, ROOM, SLOWER = 10 };  // as in policies/columns.py
constexpr double PER_CENT = 0.01;

}  // namespace

int64_t shoal_least_cost(const int64_t* columns, int64_t num_replicas, const int64_t* matched, int64_t num_tokens,
                         int64_t block_size, int64_t num_blocks_needed, double prefill_price, double sequence_price,
                         int64_t* num_eligible) {
    const auto row = [&](Row name) { return columns + name * num_replicas; };
    const int64_t *capacity = row(CAPACITY), *load = row(LOAD), *sequences = row(SEQUENCES), *slower = row(SLOWER);
    int64_t best = -1, count = 0;
    double least = 0.0;
    bool is_alone = false;
    for (int64_t i = 0; i < num_replicas; ++i) {
        const int64_t uncached = std::max<int64_t>(num_tokens - matched[i] * block_size, 1);
        const double running = sequence_price * static_cast<double>(sequences[i]);
        double cost = static_cast<double>(uncached) * prefill_price;
        cost += static_cast<double>(load[i]);
        cost += running;
        cost += static_cast<double>(slower[i]) * PER_CENT * (static_cast<double>(uncached + load[i]) + running);
        if (best < 0 || cost < least) {
            best = i, least = cost, is_alone = true;
        } else if (cost == least) {
            is_alone = false;
        }
        count += capacity[i] >= num_blocks_needed;
    }
    *num_eligible = count;
    if (!is_alone || capacity[best] < num_blocks_needed) return -1;
    return row(ROOM)[best] >= std::max<int64_t>(num_blocks_needed - matched[best], 0) ? best : -1;
}
