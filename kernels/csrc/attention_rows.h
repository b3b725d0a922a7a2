// Attention of query rows to a tile of keys, using vectors.
#pragma once

#include <utility>

#include "softmax.h"

namespace shoal {
namespace SHOAL_ISA {

// Pages are scattered, which the hardware prefetcher cannot predict. So while a place of a page is read, the same place
// of the page one tile later is prefetched: into L2, because L1 would have no room for other lines while it waits for
// these.
struct FetchPages {
    const Word* places[2];
    long stride;
    SHOAL_INLINE void operator()(int step) const {
        __builtin_prefetch(places[0] + step * stride, 0, 2);
        __builtin_prefetch(places[1] + step * stride, 0, 2);
    }
};

template <class T, int MR, int NV>
SHOAL_INLINE void score_pages(const typename T::Left* queries, int steps, const KeyTile& tile, int p, KeyScores& scores) {
    for (int lane = 0; lane < kPanel; lane += kLanes) {
        const Word* right[NV];
        for (int j = 0; j < NV; ++j) right[j] = tile.pages[p + j] + lane;
        F32 acc[MR][NV] = {};
        if (tile.streams)
            accumulate<T>(acc, queries, steps * T::kParts, right, kPanel, steps,
                          FetchPages{{tile.pages[p + kStreamedPages] + lane,
                                      tile.pages[p + NV - 1 + kStreamedPages] + lane}, kPanel});
        else
            accumulate<T>(acc, queries, steps * T::kParts, right, kPanel, steps);
#pragma GCC unroll 16
        for (int i = 0; i < MR; ++i)
#pragma GCC unroll 2
            for (int j = 0; j < NV; ++j) store(&scores[i][(p + j) * kPanel + lane], acc[i][j]);
    }
}

template <class T, int MR>
SHOAL_INLINE void score_rows(const typename T::Left* queries, int steps, const KeyTile& tile, int first, int end,
                             KeyScores& scores) {
    for (; first + 1 < end; first += 2) score_pages<T, MR, 2>(queries, steps, tile, first, scores);
    if (first < end) score_pages<T, MR, 1>(queries, steps, tile, first, scores);
}

template <class T, int MR>
SHOAL_INLINE void sum_values(const KeyWeights<T>& weights, const KeyTile& tile, int first, int end, const float* shrink,
                             float* sums, int head_size) {
    constexpr int steps = kPanel / T::kPack;
    for (int column = 0; column < head_size; column += 2 * kLanes) {
        const bool both = column + kLanes < head_size;
        const int other = both ? column + kLanes : column;
        F32 acc[MR][2];
#pragma GCC unroll 16
        for (int i = 0; i < MR; ++i) {
            acc[i][0] = load(sums + i * head_size + column) * shrink[i];
            acc[i][1] = load(sums + i * head_size + other) * shrink[i];
        }
        for (int p = first; p < end; ++p) {
            const Word* values = tile.pages[p] + tile.page;
            const Word* const right[2] = {values + column, values + other};
            if (tile.streams) {
                const Word* later = tile.pages[p + kStreamedPages] + tile.page;
                accumulate<T>(acc, &weights[0][p * steps * T::kParts], kTileKeys, right, head_size, steps,
                              FetchPages{{later + column, later + other}, head_size});
            } else {
                accumulate<T>(acc, &weights[0][p * steps * T::kParts], kTileKeys, right, head_size, steps);
            }
        }
#pragma GCC unroll 16
        for (int i = 0; i < MR; ++i) store(sums + i * head_size + column, acc[i][0]);
        if (!both) continue;
#pragma GCC unroll 16
        for (int i = 0; i < MR; ++i) store(sums + i * head_size + other, acc[i][1]);
    }
}

// Attention of rows [row, row + MR). A later row must not see less of the tile's end, or more of its beginning, than an
// earlier one.
template <class T, int MR>
void attend_rows(const AttentionCall& call, const typename T::Left* queries, const KeyTile& tile, int row,
                 AttentionState& state) {
    const int size = call.head_size, steps = size / T::kPack;
    const PageRange pages(tile, state, row, MR);
    if (pages.first >= pages.end) return;
    alignas(64) KeyScores scores;
    alignas(64) KeyWeights<T> weights;
    float shrink[MR];
    score_rows<T, MR>(queries, steps, tile, pages.first, pages.end, scores);
    weigh_rows<T>(scores, weights, pages.first * kPanel, pages.end * kPanel, tile, call.scale * kLog2E, row, MR, state, shrink);
    sum_values<T, MR>(weights, tile, pages.first, pages.end, shrink, state.sums + row * size, size);
}

template <class T>
using AttendRows = void (*)(const AttentionCall&, const typename T::Left* queries, const KeyTile&, int row, AttentionState&);

template <class T, int... I>
AttendRows<T> attend_rows_of(int rows, std::integer_sequence<int, I...>) {
    static constexpr AttendRows<T> tiles[] = {attend_rows<T, I + 1>...};
    return tiles[rows - 1];
}

// Attention of rows [row, end) to a tile of keys, in register tiles of nearly equal height.
template <class T>
void attend_tile(const AttentionCall& call, const typename T::Left* queries, const KeyTile& tile, int row, int end,
                 AttentionState& state) {
    const int lefts = call.head_size / T::kPack * T::kParts;
    for (int count; row < end; row += count, queries += count * lefts) {
        count = static_cast<int>(divide_up(end - row, divide_up(end - row, kRowsAtOnce<T>)));
        attend_rows_of<T>(count, std::make_integer_sequence<int, kTileRows>{})(call, queries, tile, row, state);
    }
}

}  // namespace SHOAL_ISA
}  // namespace shoal
