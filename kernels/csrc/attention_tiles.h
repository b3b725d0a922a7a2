// Attention of query rows to a tile of keys, using tile registers.
#pragma once

#if defined(__AMX_BF16__)

#include "attention_prompts.h"
#include "attention_rows.h"
#include "tiles.h"

namespace shoal {
namespace SHOAL_ISA {

// Registers 0 to 3 hold sums. Registers 4 and 6 hold a left and a right side with 32 summed values, registers 5 and 7
// with 16, because a head size is a multiple of 16, and a page has 16 tokens.
constexpr int kHalfWords = kTileWords / 2;
constexpr int kMostSums = 4;
// How many half pages ahead, in reading order, a half page is prefetched.
constexpr int kHalvesAhead = 4;
static_assert(kStreamedPages + kHalvesAhead <= kTilePages);

// The reading order of a tile that streams: the keys of all its pages, their values, then the keys of later pages.
SHOAL_INLINE const Word* half_page(const KeyTile& tile, int number) {
    const int page = number < tile.num_pages ? number : number - tile.num_pages;
    const bool is_values = number >= tile.num_pages && page < tile.num_pages;
    return tile.pages[page] + (is_values ? tile.page : 0);
}

SHOAL_INLINE void fetch_lines(const Word* words, int lines) {
    for (int i = 0; i < lines; ++i) __builtin_prefetch(words + i * kPanel, 0, 2);
}

template <int N>
SHOAL_INLINE void zero_sums() {
    _tile_zero(0);
    if constexpr (N > 1) _tile_zero(1);
    if constexpr (N > 2) _tile_zero(2);
    if constexpr (N > 3) _tile_zero(3);
}

template <int N>
SHOAL_INLINE void load_sums(const float* from, int64_t row_bytes) {
    _tile_loadd(0, from, row_bytes);
    if constexpr (N > 1) _tile_loadd(1, from + kPanel, row_bytes);
    if constexpr (N > 2) _tile_loadd(2, from + 2 * kPanel, row_bytes);
    if constexpr (N > 3) _tile_loadd(3, from + 3 * kPanel, row_bytes);
}

template <int N>
SHOAL_INLINE void store_sums(float* to, int64_t row_bytes) {
    _tile_stored(0, to, row_bytes);
    if constexpr (N > 1) _tile_stored(1, to + kPanel, row_bytes);
    if constexpr (N > 2) _tile_stored(2, to + 2 * kPanel, row_bytes);
    if constexpr (N > 3) _tile_stored(3, to + 3 * kPanel, row_bytes);
}

// If sum < N: sum += the left side times the right side that begins at right(sum). The right side is mostly read only
// once, so its load has a hint to stay out of the L1 cache. A macro, because register numbers must be literals.
#define SHOAL_ADD_PRODUCT(sum, left_tile, right_tile)            \
    if constexpr (N > sum) {                                     \
        _tile_stream_loadd(right_tile, right(sum), right_bytes); \
        _tile_dpbf16ps(sum, left_tile, right_tile);              \
    }

template <int N, class Right>
SHOAL_INLINE void add_products(const Word* left, int64_t left_bytes, const Right& right, int64_t right_bytes) {
    _tile_loadd(4, left, left_bytes);
    SHOAL_ADD_PRODUCT(0, 4, 6)
    SHOAL_ADD_PRODUCT(1, 4, 6)
    SHOAL_ADD_PRODUCT(2, 4, 6)
    SHOAL_ADD_PRODUCT(3, 4, 6)
}

template <int N, class Right>
SHOAL_INLINE void add_half_products(const Word* left, int64_t left_bytes, const Right& right, int64_t right_bytes) {
    _tile_loadd(5, left, left_bytes);
    SHOAL_ADD_PRODUCT(0, 5, 7)
    SHOAL_ADD_PRODUCT(1, 5, 7)
    SHOAL_ADD_PRODUCT(2, 5, 7)
    SHOAL_ADD_PRODUCT(3, 5, 7)
}
#undef SHOAL_ADD_PRODUCT

template <int N>
void score_pages_by_tiles(const Word* queries, int steps, const KeyTile& tile, int p, KeyScores& scores) {
    zero_sums<N>();
    const int64_t row_bytes = int64_t{steps} * kWordBytes, panel_bytes = int64_t{kPanel} * kWordBytes;
    int s = 0;
    const auto keys = [&](int j) { return tile.pages[p + j] + s * kPanel; };
    for (; s + kTileWords <= steps; s += kTileWords) {
        if (tile.streams)
            for (int j = 0; j < N; ++j) fetch_lines(half_page(tile, p + j + kHalvesAhead) + s * kPanel, kTileWords);
        add_products<N>(queries + s, row_bytes, keys, panel_bytes);
    }
    if (s < steps) {
        if (tile.streams)
            for (int j = 0; j < N; ++j) fetch_lines(half_page(tile, p + j + kHalvesAhead) + s * kPanel, kHalfWords);
        add_half_products<N>(queries + s, row_bytes, keys, panel_bytes);
    }
    store_sums<N>(&scores[0][p * kPanel], sizeof scores[0]);
}

template <int N>
void sum_values_by_tiles(const KeyWeights<Bf16>& weights, const KeyTile& tile, const PageRange& pages, float* sums,
                         int head_size, int column) {
    const int64_t row_bytes = int64_t{head_size} * kWordBytes;
    load_sums<N>(sums + column, row_bytes);
    for (int p = pages.first; p < pages.end; ++p) {
        if (tile.streams) {
            const Word* const later = half_page(tile, tile.num_pages + p + kHalvesAhead) + column;
            for (int row = 0; row < kHalfWords; ++row) fetch_lines(later + row * head_size, N);
        }
        const Word* const values = tile.pages[p] + tile.page + column;
        add_half_products<N>(&weights[0][p * kHalfWords], sizeof weights[0], [&](int j) { return values + j * kPanel; },
                             row_bytes);
    }
    store_sums<N>(sums + column, row_bytes);
}

void attend_rows_by_tiles(const AttentionCall& call, const Word* queries, const KeyTile& tile, int row, int count,
                          AttentionState& state) {
    const PageRange pages(tile, state, row, count);
    if (pages.first >= pages.end) return;
    const TileShapes::Shape sums_shape{count, kPanel}, left{count, kTileWords}, half_left{count, kHalfWords};
    const TileShapes shapes({sums_shape, sums_shape, sums_shape, sums_shape, left, half_left, {kTileWords, kPanel},
                             {kHalfWords, kPanel}});
    const int size = call.head_size, steps = size / Bf16::kPack;
    alignas(64) KeyScores scores;
    alignas(64) KeyWeights<Bf16> weights;
    float shrink[kMostAtOnce];
    static constexpr decltype(&score_pages_by_tiles<1>) score[] = {score_pages_by_tiles<1>, score_pages_by_tiles<2>,
                                                                   score_pages_by_tiles<3>, score_pages_by_tiles<4>};
    static constexpr decltype(&sum_values_by_tiles<1>) sum[] = {sum_values_by_tiles<1>, sum_values_by_tiles<2>,
                                                                sum_values_by_tiles<3>, sum_values_by_tiles<4>};
    for (int p = pages.first; p < pages.end; p += kMostSums)
        score[std::min(kMostSums, pages.end - p) - 1](queries, steps, tile, p, scores);
    weigh_rows<Bf16>(scores, weights, pages.first * kPanel, pages.end * kPanel, tile, call.scale * kLog2E, row, count, state,
                     shrink);
    float* const sums = state.sums + row * size;
    for (int i = 0; i < count; ++i)
        for (int c = 0; c < size; c += kLanes) store(sums + i * size + c, load(sums + i * size + c) * shrink[i]);
    make_stores();
    for (int c = 0; c < size; c += kMostSums * kPanel)
        sum[std::min(kMostSums, (size - c) / kPanel) - 1](weights, tile, pages, sums, size, c);
}

template <>
constexpr int kRowsAtOnce<Bf16> = kTileHeight;

template <>
inline void attend_tile<Bf16>(const AttentionCall& call, const Word* queries, const KeyTile& tile, int row, int end,
                              AttentionState& state) {
    if (tile.of_prompt && call.head_size % kBlockColumns == 0) return attend_prompt(call, queries, tile, row, end, state);
    const int steps = call.head_size / Bf16::kPack;
    for (int count; row < end; row += count, queries += count * steps) {
        count = std::min(end - row, kTileHeight);
        attend_rows_by_tiles(call, queries, tile, row, count, state);
    }
}

}  // namespace SHOAL_ISA
}  // namespace shoal

#endif
