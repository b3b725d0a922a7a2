// What sampling needs of a row of logits: a draw from its filtered distribution, and its largest log-probabilities.
//
// A row is never sorted. Scores (logits minus their maximum, so at most 0) are counted in buckets by the leading bits of
// their magnitude, which are in the order of the scores; only the bucket in which a limit falls is sorted.
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "maximum.h"

namespace shoal {
namespace SHOAL_ISA {

constexpr int kBucketShift = 18;  // leaves the exponent and five bits of the fraction: buckets 3 % wide
constexpr int kBuckets = 1 << (31 - kBucketShift);
constexpr int64_t kWeightBlock = 1024;      // of which a draw keeps one sum
constexpr float kLeastExponent = -86.0f;    // weights below are 0: exp2 has a floor

using Ranked = std::pair<uint32_t, int64_t>;  // magnitude of a score, and its place: sorted, likeliest first

struct RowScratch {
    std::vector<float> scores, weights;
    std::vector<int32_t> counts;
    std::vector<double> masses;
    std::vector<Ranked> ranked;
};

inline RowScratch& row_scratch(int64_t size) {
    thread_local RowScratch scratch;
    const auto padded = static_cast<size_t>(divide_up(size, kLanes) * kLanes);
    if (scratch.scores.size() < padded) {
        scratch.weights.resize(padded);
        scratch.scores.resize(padded);  // last: its size tells that there is room
    }
    return scratch;
}

inline uint32_t magnitude(float score) {
    uint32_t bits;
    std::memcpy(&bits, &score, sizeof bits);
    return bits & 0x7fffffffu;
}

inline int bucket_of(float score) { return static_cast<int>(magnitude(score) >> kBucketShift); }

// Scores (x - largest) / temperature, -inf below `least`, and their exponentials.
inline void weigh(const float* row, int64_t size, float largest, float temperature, float least, RowScratch& scratch) {
    const auto put = [&](int64_t i, F32 x) {
        F32 scores = (x - largest) / temperature;
        scores = scores >= splat(least) ? scores : splat(kMinusInfinity);
        const F32 weights = exp2<true>(scores * kLog2E);
        store(scratch.scores.data() + i, scores);
        store(scratch.weights.data() + i, scores >= splat(kLeastExponent) ? weights : splat(0.0f));
    };
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) put(i, load(row + i));
    if (i == size) return;
    float rest[kLanes];
    std::fill(rest, rest + kLanes, kMinusInfinity);
    std::copy(row + i, row + size, rest);
    put(i, load(rest));
}

// The sum of a block of weights.
inline double block_sum(const float* weights, int64_t size) {
    F32 sums[4] = {};
    int64_t i = 0;
    for (; i + 4 * kLanes <= size; i += 4 * kLanes)
        for (int v = 0; v < 4; ++v) sums[v] += load(weights + i + v * kLanes);
    double sum = horizontal_sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; i < size; ++i) sum += weights[i];
    return sum;
}

// The first place at which the running sum of the weights exceeds `uniform` times their sum.
inline int64_t find_draw(const float* weights, int64_t size, double uniform) {
    thread_local std::vector<double> sums;
    sums.clear();
    double total = 0.0;
    for (int64_t i = 0; i < size; i += kWeightBlock) {
        sums.push_back(block_sum(weights + i, std::min(kWeightBlock, size - i)));
        total += sums.back();
    }
    const double target = uniform * total;
    double reached = 0.0;
    int64_t last = 0;  // the last place with a weight: rounding may leave the target just out of reach
    for (size_t block = 0; block < sums.size(); ++block) {
        const int64_t begin = static_cast<int64_t>(block) * kWeightBlock, end = std::min(size, begin + kWeightBlock);
        if (reached + sums[block] <= target && block + 1 < sums.size()) {
            reached += sums[block];
            continue;
        }
        for (int64_t i = begin; i < end; ++i) {
            if (weights[i] <= 0.0f) continue;
            last = i;
            reached += weights[i];
            if (reached > target) return i;
        }
    }
    return last;
}

// Counts the scores in buckets, and sums their weights there if `masses`. Of -inf there may be very many (what a grammar
// forbids, or min-p): all in one bucket, where each addition would wait for the one before. Vectors of them are passed.
inline void fill_buckets(int64_t size, bool masses, RowScratch& scratch) {
    scratch.counts.assign(kBuckets, 0);
    scratch.masses.assign(masses ? kBuckets : 0, 0.0);
    const float* const scores = scratch.scores.data();
    const float* const weights = scratch.weights.data();
    int32_t* const counts = scratch.counts.data();
    double* const sums = masses ? scratch.masses.data() : nullptr;
    const auto count = [&](int64_t i) {
        const int bucket = bucket_of(scores[i]);
        ++counts[bucket];
        if (sums != nullptr) sums[bucket] += weights[i];
    };
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
        if (horizontal_max(load(scores + i)) == kMinusInfinity)
            counts[bucket_of(kMinusInfinity)] += kLanes;
        else
            for (int lane = 0; lane < kLanes; ++lane) count(i + lane);
    }
    for (; i < size; ++i) count(i);
}

// The bucket that holds the k-th largest score, k >= 1, and how many scores are in larger ones.
inline std::pair<int, int64_t> bucket_of_kth(int64_t k, const RowScratch& scratch) {
    int bucket = 0;
    int64_t before = 0;
    while (before + scratch.counts[bucket] < k) before += scratch.counts[bucket++];
    return {bucket, before};
}

// Collects the scores of buckets [first, last], in the order of their places.
inline void collect(int first, int last, int64_t size, RowScratch& scratch) {
    scratch.ranked.clear();
    const float* const scores = scratch.scores.data();
    // Magnitudes of bucket b are in [b << shift, (b + 1) << shift).
    const uint32_t low = static_cast<uint32_t>(first) << kBucketShift;
    const uint32_t span = static_cast<uint32_t>(last - first + 1) << kBucketShift;
    for (int64_t i = 0; i < size; ++i)
        if (magnitude(scores[i]) - low < span) scratch.ranked.emplace_back(magnitude(scores[i]), i);
}

// Sets the weights to 0 of all that rank behind `last`.
inline void drop_behind(const Ranked& last, int64_t size, RowScratch& scratch) {
    const I32 limit = (I32)(U32{} + last.first);
    for (int64_t i = 0; i < size; i += kLanes) {
        const I32 magnitudes = (I32)load(scratch.scores.data() + i) & 0x7fffffff;
        store(scratch.weights.data() + i, magnitudes <= limit ? load(scratch.weights.data() + i) : splat(0.0f));
    }
    // Of equals those with lower places stay.
    for (const auto& [found, place] : scratch.ranked)
        if (found == last.first && place > last.second) scratch.weights[place] = 0.0f;
}

// Keeps the k largest scores and all that equal the k-th. Returns the sum of their weights.
inline double keep_top_k(int64_t k, int64_t size, RowScratch& scratch) {
    const auto [bucket, before] = bucket_of_kth(k, scratch);
    double mass = 0.0;
    if (bucket >= bucket_of(kMinusInfinity)) {  // fewer are left
        for (double part : scratch.masses) mass += part;
        return mass;
    }
    collect(bucket, bucket, size, scratch);
    const auto kth = scratch.ranked.begin() + (k - before - 1);
    std::nth_element(scratch.ranked.begin(), kth, scratch.ranked.end());
    drop_behind({kth->first, size}, size, scratch);
    for (int b = 0; b < bucket; ++b) mass += scratch.masses[b];
    scratch.masses[bucket] = 0.0;
    for (const auto& [found, place] : scratch.ranked) scratch.masses[bucket] += scratch.weights[place];
    std::fill(scratch.masses.begin() + bucket + 1, scratch.masses.end(), 0.0);
    return mass + scratch.masses[bucket];
}

// Keeps the likeliest of the kept weights: each before which less than `mass` is kept.
inline void keep_mass(double mass, int64_t size, RowScratch& scratch) {
    double before = 0.0;
    int bucket = 0, last = 0;  // the last bucket with a weight
    for (; bucket < kBuckets; ++bucket) {
        if (scratch.masses[bucket] <= 0.0) continue;
        last = bucket;
        if (before + scratch.masses[bucket] >= mass) break;
        before += scratch.masses[bucket];
    }
    if (bucket == kBuckets) return;  // rounding: all of them are needed
    collect(last, last, size, scratch);
    // Equals, of which there may be very many, are in order already.
    if (!std::is_sorted(scratch.ranked.begin(), scratch.ranked.end()))
        std::sort(scratch.ranked.begin(), scratch.ranked.end());
    const Ranked* kept = nullptr;
    for (const Ranked& next : scratch.ranked) {
        if (kept != nullptr && before >= mass) break;
        kept = &next;
        before += scratch.weights[static_cast<size_t>(next.second)];
    }
    drop_behind(Ranked(*kept), size, scratch);
}

int64_t draw(const float* row, int64_t size, const ShoalDraw& how) {
    RowScratch& scratch = row_scratch(size);
    weigh(row, size, row_maximum(row, size).value, how.temperature, how.least_score, scratch);
    const bool cuts_k = how.top_k > 0 && how.top_k < size, cuts_p = how.top_p < 1.0;
    if (cuts_k || cuts_p) {
        fill_buckets(size, true, scratch);
        double mass = 0.0;
        if (cuts_k)
            mass = keep_top_k(how.top_k, size, scratch);
        else
            for (double part : scratch.masses) mass += part;
        if (cuts_p) keep_mass(how.top_p * mass, size, scratch);
    }
    return find_draw(scratch.weights.data(), size, how.uniform);
}

float log_probabilities(const float* row, int64_t size, int64_t place, int64_t count, int64_t* places, float* values) {
    RowScratch& scratch = row_scratch(size);
    const float largest = row_maximum(row, size).value;
    weigh(row, size, largest, 1.0f, kMinusInfinity, scratch);
    double sum = 0.0;
    for (int64_t i = 0; i < size; i += kWeightBlock)
        sum += block_sum(scratch.weights.data() + i, std::min(kWeightBlock, size - i));
    const auto log_sum = static_cast<float>(std::log(sum));
    if (count > 0) {
        fill_buckets(size, false, scratch);
        collect(0, bucket_of_kth(count, scratch).first, size, scratch);
        std::partial_sort(scratch.ranked.begin(), scratch.ranked.begin() + count, scratch.ranked.end());
        for (int64_t i = 0; i < count; ++i) {
            places[i] = scratch.ranked[static_cast<size_t>(i)].second;
            values[i] = scratch.scores[static_cast<size_t>(places[i])] - log_sum;
        }
    }
    return scratch.scores[static_cast<size_t>(place)] - log_sum;
}

}  // namespace SHOAL_ISA
}  // namespace shoal
