// Attention of a prompt's query rows to a tile of keys, using tile registers: 2 x 2 of them hold sums of up to 32 rows.
#pragma once

#if defined(__AMX_BF16__)

#include <algorithm>
#include <utility>

#include "softmax.h"
#include "tiles.h"

namespace shoal {
namespace SHOAL_ISA {

constexpr int kPromptRows = 2 * kTileHeight;  // rows that are multiplied with a key at once
// Rows are an odd number of cache lines apart: otherwise those of a register would conflict in few sets of the caches.
using PromptScores = float[kPromptRows][kTileKeys + kPanel];
constexpr int kPairWords = kTileHeight * kPanel;  // of one column panel of two pages' values: one register

// Gathers the values of pages [first, end), both even, for a prompt's rows. A page has 16 tokens, half of what a
// register sums over, so pages are joined in pairs, panel by panel. Pages without keys of the unit become zero, because
// a weight of zero would not cancel a NaN.
inline void gather_values(const KeyTile& tile, int first, int end, int head_size, Word* values) {
    constexpr int rows = kPanel / Bf16::kPack;
    for (int p = first; p < end; ++p) {
        Word* const out = values + int64_t{p / 2} * head_size * kTileHeight + p % 2 * rows * kPanel;
        const bool has_keys = p * kPanel < tile.count;
        const Word* const page = tile.pages[p] + tile.page;
        for (int row = 0; row < rows; ++row)
            for (int c = 0; c < head_size; c += kPanel)
                store(out + c * kTileHeight + row * kPanel, has_keys ? load(page + row * head_size + c) : U32{});
    }
}

// A step of across_lanes(): merges `count` vectors in pairs, in place. Combines the two halves of each row's `count`
// lanes.
template <class Combine, int... Lane>
SHOAL_INLINE void halve_pairs(F32 (&rows)[kLanes], int count, const Combine& combine, std::integer_sequence<int, Lane...>) {
    const int half = count / 2;  // half the lanes of a row; there are as many lanes per row as rows
    const I32 low{(Lane / half * count + Lane % half)...}, high = low + half;
    for (int i = 0; i < count; i += 2)
        rows[i / 2] = combine(__builtin_shuffle(rows[i], rows[i + 1], low), __builtin_shuffle(rows[i], rows[i + 1], high));
}

// Reduces the lanes of each of sixteen rows with combine(): one vector with a lane for each row, in their order.
template <class Combine>
SHOAL_INLINE F32 across_lanes(F32 (&rows)[kLanes], const Combine& combine) {
#pragma GCC unroll 4
    for (int count = kLanes; count > 1; count /= 2)
        halve_pairs(rows, count, combine, std::make_integer_sequence<int, kLanes>{});
    return rows[0];
}

SHOAL_INLINE Bf16::Left* weights_of(float* scores) { return reinterpret_cast<Bf16::Left*>(scores); }

// Like weigh_rows(), for up to sixteen rows whose scores begin at row `at`; the maxima of all rows are one vector, and
// so are their sums. The weights, half as long, overwrite the scores, so that the L1 cache can hold them.
SHOAL_INLINE void weigh_prompt(PromptScores& scores, int at, int begin, int end, const KeyTile& tile,
                               float scale, int row, int count, AttentionState& state, float* shrink) {
    const auto visible = [&](int i) {
        return Visible(begin, end, state.low[row + i] - tile.first_key, state.high[row + i] - tile.first_key);
    };
    F32 found[kLanes];
    for (int i = 0; i < kLanes; ++i) found[i] = i < count ? row_tops(scores[at + i], visible(i)) : splat(kMinusInfinity);
    const F32 before = load(&state.maximum[row]), none = splat(kMinusInfinity);
    const F32 top = across_lanes(found, [](F32 a, F32 b) { return max(a, b); });
    const F32 maximum = max(before, top * scale);
    alignas(64) float finite[kLanes];
    store(finite, maximum == none ? F32{} : maximum);
    for (int i = 0; i < kLanes; ++i)
        found[i] = i < count ? weigh_row<Bf16>(scores[at + i], weights_of(scores[at + i]), visible(i), scale, finite[i]) : F32{};
    const F32 sums = across_lanes(found, [](F32 a, F32 b) { return a + b; });
    const F32 shrinks = before == none ? F32{} : exp2<true>(before - maximum);
    store(shrink, shrinks);
    store(&state.maximum[row], maximum);
    store(&state.denominator[row], load(&state.denominator[row]) * shrinks + sums);
}

// The left-hand side of up to 32 rows: the first sixteen, and the rest.
struct LeftRows {
    const Word* upper;
    const Word* lower;
    int64_t row_bytes;
};

template <bool HasLower>
SHOAL_INLINE void add_two_by_two(const LeftRows& left, int word, const Word* first, const Word* second) {
    constexpr int64_t right_bytes = int64_t{kPanel} * kWordBytes;
    _tile_loadd(4, left.upper + word, left.row_bytes);
    _tile_stream_loadd(6, first, right_bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_stream_loadd(7, second, right_bytes);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (HasLower) {
        _tile_loadd(5, left.lower + word, left.row_bytes);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
}

template <bool HasLower>
SHOAL_INLINE void score_prompt(const LeftRows& queries, int steps, const KeyTile& tile, int p, PromptScores& scores) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int s = 0; s < steps; s += kTileWords)
        add_two_by_two<HasLower>(queries, s, tile.pages[p] + s * kPanel, tile.pages[p + 1] + s * kPanel);
    constexpr int64_t row_bytes = sizeof scores[0];
    _tile_stored(0, &scores[0][p * kPanel], row_bytes);
    _tile_stored(1, &scores[0][(p + 1) * kPanel], row_bytes);
    if constexpr (HasLower) {
        _tile_stored(2, &scores[kTileHeight][p * kPanel], row_bytes);
        _tile_stored(3, &scores[kTileHeight][(p + 1) * kPanel], row_bytes);
    }
}

template <bool HasLower>
SHOAL_INLINE void sum_prompt_values(const LeftRows& weights, const Word* values, int first, int end, float* sums, int head_size,
                                    int column) {
    const int64_t row_bytes = int64_t{head_size} * kWordBytes;
    float* const upper = sums + column;
    float* const lower = upper + kTileHeight * head_size;
    _tile_loadd(0, upper, row_bytes);
    _tile_loadd(1, upper + kPanel, row_bytes);
    if constexpr (HasLower) {
        _tile_loadd(2, lower, row_bytes);
        _tile_loadd(3, lower + kPanel, row_bytes);
    }
    for (int p = first; p < end; p += 2) {
        const Word* const right = values + (int64_t{p / 2} * head_size + column) * kTileHeight;
        add_two_by_two<HasLower>(weights, p * kPanel / Bf16::kPack, right, right + kPairWords);
    }
    _tile_stored(0, upper, row_bytes);
    _tile_stored(1, upper + kPanel, row_bytes);
    if constexpr (HasLower) {
        _tile_stored(2, lower, row_bytes);
        _tile_stored(3, lower + kPanel, row_bytes);
    }
}

template <bool HasLower>
void attend_prompt_rows(const AttentionCall& call, const Word* queries, const KeyTile& tile, const Word* values, int row,
                        int count, AttentionState& state) {
    const PageRange pages(tile, state, row, count);
    if (pages.first >= pages.end) return;
    const int first = pages.first / 2 * 2, end = static_cast<int>(divide_up(pages.end, 2)) * 2;
    const int size = call.head_size, steps = size / Bf16::kPack, upper = std::min(count, kTileHeight);
    alignas(64) PromptScores scores;
    float shrink[kPromptRows];
    const LeftRows left{queries, queries + upper * steps, int64_t{steps} * kWordBytes};
    for (int p = first; p < end; p += 2) score_prompt<HasLower>(left, steps, tile, p, scores);
    for (int at = 0; at < count; at += kLanes)
        weigh_prompt(scores, at, first * kPanel, end * kPanel, tile, call.scale * kLog2E, row + at,
                     std::min(count - at, kLanes), state, shrink + at);
    float* const sums = state.sums + row * size;
    for (int i = 0; i < count; ++i)
        if (shrink[i] != 1.0f)
            for (int c = 0; c < size; c += kLanes) store(sums + i * size + c, load(sums + i * size + c) * shrink[i]);
    make_stores();
    const LeftRows weights{weights_of(scores[0]), weights_of(scores[kTileHeight]), sizeof scores[0]};
    for (int c = 0; c < size; c += kBlockColumns) sum_prompt_values<HasLower>(weights, values, first, end, sums, size, c);
}

// Attention of a prompt's rows [row, end) to a tile; the head size is a multiple of 32.
inline void attend_prompt(const AttentionCall& call, const Word* queries, const KeyTile& tile, int row, int end,
                          AttentionState& state) {
    const int steps = call.head_size / Bf16::kPack;
    const PageRange pages(tile, state, row, end - row);
    if (pages.first >= pages.end) return;
    alignas(64) Word values[kTileKeys / Bf16::kPack * kMaxHeadSize];
    gather_values(tile, pages.first / 2 * 2, static_cast<int>(divide_up(pages.end, 2)) * 2, call.head_size, values);
    const auto meet = [&](auto has_lower, int count, int last) {
        const TileShapes::Shape upper{std::min(count, kTileHeight), kTileWords}, right{kTileHeight, kTileWords};
        const TileShapes::Shape lower = has_lower ? TileShapes::Shape{count - kTileHeight, kTileWords} : upper;
        const TileShapes shapes({upper, upper, lower, lower, upper, lower, right, right});
        for (; row + count <= last; row += count, queries += count * steps)
            attend_prompt_rows<decltype(has_lower)::value>(call, queries, tile, values, row, count, state);
    };
    if (row + kPromptRows <= end) meet(std::true_type{}, kPromptRows, end);
    if (end - row > kTileHeight)
        meet(std::true_type{}, end - row, end);
    else if (row < end)
        meet(std::false_type{}, end - row, end);
}

}  // namespace SHOAL_ISA
}  // namespace shoal

#endif
