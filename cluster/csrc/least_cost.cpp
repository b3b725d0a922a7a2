// The cheapest replica of all, for a request that is placed alone.
#include "cost.h"

int64_t shoal_least_cost(const int64_t* columns, int64_t num_replicas, const int64_t* matched, int64_t num_tokens,
                         int64_t block_size, int64_t num_blocks_needed, int64_t num_known_blocks, double spared,
                         double prefill_price, double sequence_price, int64_t* num_eligible) {
    const auto row = [&](shoal::Row name) { return columns + name * num_replicas; };
    const int64_t *capacity = row(shoal::CAPACITY), *load = row(shoal::LOAD), *sequences = row(shoal::SEQUENCES),
                  *slower = row(shoal::SLOWER);
    int64_t best = -1, count = 0;
    double least = 0.0;
    bool is_alone = false;
    for (int64_t i = 0; i < num_replicas; ++i) {
        const int64_t uncached = shoal::uncached(num_tokens, matched[i], block_size);
        const int64_t missing =
            uncached - shoal::uncached(num_tokens, std::max(matched[i], num_known_blocks), block_size);
        const double cost = shoal::price(uncached, missing, spared, load[i], sequences[i], slower[i], prefill_price,
                                         sequence_price);
        if (best < 0 || cost < least) {
            best = i, least = cost, is_alone = true;
        } else if (cost == least) {
            is_alone = false;
        }
        count += capacity[i] >= num_blocks_needed;
    }
    *num_eligible = count;
    if (!is_alone || capacity[best] < num_blocks_needed) return -1;
    return row(shoal::ROOM)[best] >= std::max<int64_t>(num_blocks_needed - matched[best], 0) ? best : -1;
}
