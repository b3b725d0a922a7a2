// The largest value of a row, for greedy sampling.
#pragma once

#include <algorithm>
#include <limits>

#include "simd.h"

namespace shoal {
namespace SHOAL_ISA {

constexpr int kMaximumVectors = 4;  // enough to hide the latency of a comparison
constexpr int64_t kMaximumChunk = 64 * kMaximumVectors * kLanes;

// The largest value of a chunk; NaN if it has one.
SHOAL_INLINE float chunk_maximum(const float* x, int64_t size) {
    F32 top[kMaximumVectors];
    I32 is_nan{};
    for (F32& t : top) t = splat(kMinusInfinity);
    int64_t i = 0;
    for (; i + kMaximumVectors * kLanes <= size; i += kMaximumVectors * kLanes)
        for (int v = 0; v < kMaximumVectors; ++v) {
            const F32 loaded = load(x + i + v * kLanes);
            top[v] = max(top[v], loaded);
            is_nan |= loaded != loaded;
        }
    bool found_nan = horizontal_max(__builtin_convertvector(-is_nan, F32)) > 0.0f;
    float largest = horizontal_max(max(max(top[0], top[1]), max(top[2], top[3])));
    for (; i < size; ++i) {
        largest = std::max(largest, x[i]);
        found_nan |= x[i] != x[i];
    }
    return found_nan ? std::numeric_limits<float>::quiet_NaN() : largest;
}

Maximum row_maximum(const float* row, int64_t size) {
    float largest = chunk_maximum(row, std::min(kMaximumChunk, size));
    int64_t chunk = 0;
    for (int64_t next = kMaximumChunk; next < size && largest == largest; next += kMaximumChunk) {
        const float other = chunk_maximum(row + next, std::min(kMaximumChunk, size - next));
        if (other <= largest) continue;  // so it is larger, or NaN, below
        largest = other;
        chunk = next;
    }
    int64_t place = chunk;
    while (largest == largest ? row[place] != largest : row[place] == row[place]) ++place;
    return {largest, place};
}

}  // namespace SHOAL_ISA
}  // namespace shoal
