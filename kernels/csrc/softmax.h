// The online softmax over tiles of keys (FlashAttention: Dao et al. 2022).
#pragma once

#include <algorithm>
#include <type_traits>

#include "simd.h"

namespace shoal {
namespace SHOAL_ISA {

#if defined(__AMX_BF16__)
// Tile registers are so fast that work done once per tile of keys, or once per unit, would show: both are larger.
constexpr int kTileKeys = 512;
constexpr int kUnitRows = 5 * kAttentionRows;
#else
constexpr int kTileKeys = 256;
constexpr int kUnitRows = kAttentionRows;
#endif
constexpr int kSharedKeys = 256;    // of a tile that several rows of decodes use
constexpr int kStreamedKeys = 128;  // of a tile whose pages are read once, while those of the next are prefetched
constexpr int kTilePages = kTileKeys / kPanel;
constexpr int kStreamedPages = kStreamedKeys / kPanel;
static_assert(2 * kStreamedPages <= kTilePages);

// Rows of one dtype that are processed together with a tile of keys.
template <class T>
constexpr int kRowsAtOnce = kTileRows;
constexpr int kMostAtOnce = 16;
using KeyScores = float[kMostAtOnce][kTileKeys];
template <class T>
using KeyWeights = typename T::Left[kMostAtOnce][kTileKeys];  // the tile's keys fill the beginning of each row

// For each row, its softmax so far and the range of keys that it sees.
struct AttentionState {
    alignas(64) float sums[kUnitRows * kMaxHeadSize];
    float maximum[kUnitRows + kLanes];  // padded: also read and written in whole vectors
    float denominator[kUnitRows + kLanes];
    int low[kUnitRows], high[kUnitRows];
};

// The pages of one tile of keys; if it streams, those of the next tile follow.
struct KeyTile {
    const Word* pages[kTilePages];
    int first_key;
    int count;
    int num_pages;   // pages that hold the unit's keys
    bool streams;    // each page is read only once, because all rows of the unit are processed together
    bool of_prompt;  // the unit has several tokens, and more rows than are processed together
    int64_t page;  // words of a page's keys; its values follow
};

// The pages of a tile of which rows [row, row + count) see anything. A later row must not see less of the tile's end,
// or more of its beginning, than an earlier one.
struct PageRange {
    int first, end;

    PageRange(const KeyTile& tile, const AttentionState& state, int row, int count) {
        const int newest = std::min(state.high[row + count - 1] - tile.first_key, tile.count);
        first = std::max(state.low[row] - tile.first_key, 0) / kPanel;
        end = static_cast<int>(divide_up(std::max(newest, 0), kPanel));
    }
};

// Columns [begin, end) of a row's scores, in whole vectors. In [all_begin, all_end) all keys are visible; of the
// others, those in [low, high) are.
struct Visible {
    int begin, all_begin, all_end, end, low, high;

    Visible(int first, int last, int low_key, int high_key) : begin(first), end(last), low(low_key), high(high_key) {
        all_begin = low > begin ? std::min(static_cast<int>(divide_up(low, kPanel)) * kPanel, end) : begin;
        all_end = high < end ? std::max(std::max(high, 0) / kPanel * kPanel, all_begin) : end;
    }
    // Calls visit(column, whether the whole vector is visible), in order.
    template <class Visit>
    SHOAL_INLINE void each(const Visit& visit) const {
        for (int c = begin; c < all_begin; c += kLanes) visit(c, std::false_type{});
#pragma GCC unroll 4
        for (int c = all_begin; c < all_end; c += kLanes) visit(c, std::true_type{});
        for (int c = all_end; c < end; c += kLanes) visit(c, std::false_type{});
    }
};

// The largest of a row's visible scores, lane by lane; scores that are not visible become -inf.
SHOAL_INLINE F32 row_tops(float* scores, const Visible& visible) {
    F32 top = splat(kMinusInfinity);
    visible.each([&](int c, auto is_whole) {
        F32 s = load(scores + c);
        if constexpr (!is_whole) {
            const I32 column = lane_index() + c;
            s = ((column >= visible.low) & (column < visible.high)) ? s : splat(kMinusInfinity);
            store(scores + c, s);
        }
        top = max(top, s);
    });
    return top;
}

// Turns a row's scores into weights 2^(score * scale - maximum), and returns their sums, lane by lane.
template <class T>
SHOAL_INLINE F32 weigh_row(const float* scores, typename T::Left* weights, const Visible& visible, float scale,
                           float maximum) {
    F32 sum{};
    visible.each([&](int c, auto is_whole) {
        const F32 s = load(scores + c);
        F32 w = exp2<T::kFine>(s * scale - maximum);
        if constexpr (!is_whole) w = (s == splat(kMinusInfinity)) ? F32{} : w;
        sum += w;
        store_lefts<T>(weights, c, w);
    });
    return sum;
}

// Turns the scores of rows [row, row + count) over columns [begin, end) into weights. `shrink` receives the factors by
// which their earlier sums have to be multiplied.
template <class T>
SHOAL_INLINE void weigh_rows(KeyScores& scores, KeyWeights<T>& weights, int begin, int end, const KeyTile& tile,
                             float scale, int row, int count, AttentionState& state, float* shrink) {
    float top[kMostAtOnce];
    const auto visible = [&](int i) {
        return Visible(begin, end, state.low[row + i] - tile.first_key, state.high[row + i] - tile.first_key);
    };
    // All maxima first: each has a long latency, during which the others are computed.
    for (int i = 0; i < count; ++i) top[i] = horizontal_max(row_tops(scores[i], visible(i)));
    for (int i = 0; i < count; ++i) {
        const float before = state.maximum[row + i], maximum = std::max(before, top[i] * scale);
        state.maximum[row + i] = maximum;
        // If no key has been visible so far, all scores are -inf, so the weights are 0 whatever the maximum.
        const float finite = maximum == kMinusInfinity ? 0.0f : maximum;
        const float sum = horizontal_sum(weigh_row<T>(scores[i], weights[i], visible(i), scale, finite));
        shrink[i] = before == kMinusInfinity ? 0.0f : exp2<true>(splat(before - maximum))[0];
        state.denominator[row + i] = state.denominator[row + i] * shrink[i] + sum;
    }
}

}  // namespace SHOAL_ISA
}  // namespace shoal
