// What a request costs on each replica, as policies/routing.py prices it: the same operations in the same order, so that
// results agree to the last bit.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "shoal_placement.h"

namespace shoal {

constexpr double PER_CENT = 0.01;

/* Rows of the columns, as in policies/columns.py. */
enum Row {
    NUM_RESERVED,
    RESERVED_BLOCKS,
    RESERVED_TOKENS,
    CAPACITY,
    LOAD,
    SEQUENCES,
    ROOM,
    OPEN_BLOCKS,
    OPEN_SLOTS,
    URGENT,
    SLOWER,
    NUM_ROWS
};

/* An integer below 2^51 in magnitude as a double. Compilers vectorize this for every instruction set, a plain
   conversion of 64 bits only for AVX-512. */
inline double as_double(int64_t value) {
    constexpr double BASE = 6755399441055744.0;  // 1.5 * 2^52: the lowest bits of its mantissa count in ones
    int64_t bits;
    double shifted;
    std::memcpy(&bits, &BASE, sizeof bits);
    bits += value;
    std::memcpy(&shifted, &bits, sizeof shifted);
    return shifted - BASE;
}

/* Prompt tokens to compute where so many blocks are cached. */
inline int64_t uncached(int64_t num_tokens, int64_t matched, int64_t block_size) {
    const int64_t left = num_tokens - matched * block_size;
    return left > 1 ? left : 1;
}

/* `missing`: of the uncached tokens those that another replica has; others pay the part `spared` of them. */
inline double price(int64_t uncached, int64_t missing, double spared, int64_t load, int64_t sequences, int64_t slower,
                    double prefill_price, double sequence_price) {
    const double running = sequence_price * as_double(sequences);
    double cost = (as_double(uncached) - as_double(missing) * spared) * prefill_price;
    cost += as_double(load);
    cost += running;
    cost += as_double(slower) * PER_CENT * (as_double(uncached + load) + running);
    return cost;
}

}  // namespace shoal
