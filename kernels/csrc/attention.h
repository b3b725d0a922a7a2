// Paged attention with an online softmax (FlashAttention: Dao et al. 2022), for decode and for chunked prefill alike.
//
// The heads of a group share their keys, so (token, head of the group) pairs are the rows of one matrix product with a
// page's keys, and of one with its values. Rows go in register tiles; keys in tiles that stay in the second-level cache.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "simd.h"

namespace shoal {
namespace SHOAL_ISA {

constexpr int kTileKeys = 256;
constexpr int kStreamedKeys = 128;  // of a tile whose pages are read once, while those of the next are fetched
constexpr int kTilePages = kTileKeys / kPanel;
constexpr int kStreamedPages = kStreamedKeys / kPanel;
static_assert(2 * kStreamedPages <= kTilePages);
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Softmax state of a unit's rows.
struct AttentionState {
    alignas(64) float sums[kAttentionRows * kMaxHeadSize];
    float maximum[kAttentionRows];
    float denominator[kAttentionRows];
};

// The pages of one tile of keys; where it streams, those of the next follow.
struct KeyTile {
    const Word* pages[kTilePages];
    int first_key;
    int count;
    bool streams;  // each page is read once: the unit has a single tile of rows
    int64_t page;  // words of the keys of a page; its values follow
};

// Pages lie anywhere, which the processor cannot foresee: as it reads a place of a page, it asks for the same place of
// the page that comes a tile later. Into L2: waiting for all those lines, L1 would have no room for others.
struct FetchPages {
    const Word* places[2];
    long stride;
    SHOAL_INLINE void operator()(int step) const {
        __builtin_prefetch(places[0] + step * stride, 0, 2);
        __builtin_prefetch(places[1] + step * stride, 0, 2);
    }
};

template <class T, int MR>
SHOAL_INLINE void score_rows(const Word* queries, int steps, const KeyTile& tile, int first, int end,
                             float (&scores)[kTileRows][kTileKeys]) {
    for (int p = first; p < end; p += 2) {
        const int q = std::min(p + 1, end - 1);
        const Word *even = tile.pages[p], *odd = tile.pages[q];
        for (int lane = 0; lane < kPanel; lane += kLanes) {
            const Word* const right[2] = {even + lane, odd + lane};
            F32 acc[MR][2] = {};
            if (tile.streams)
                accumulate<T>(acc, queries, steps, right, kPanel, steps,
                              FetchPages{{tile.pages[p + kStreamedPages] + lane,
                                          tile.pages[q + kStreamedPages] + lane}, kPanel});
            else
                accumulate<T>(acc, queries, steps, right, kPanel, steps);
            for (int i = 0; i < MR; ++i) {
                store(&scores[i][p * kPanel + lane], acc[i][0]);
                if (p + 1 < end) store(&scores[i][(p + 1) * kPanel + lane], acc[i][1]);
            }
        }
    }
}

// Turns a row's scores into weights over columns [begin, end), of which [low, high) are visible. Returns the factor
// that the row's earlier sums shrink by.
template <class T>
SHOAL_INLINE float weigh_row(float* scores, Word* weights, int begin, int end, int low, int high, float scale,
                             float& maximum, float& denominator) {
    auto* out = reinterpret_cast<typename T::Scalar*>(weights);
    const I32 lanes = lane_index();
    F32 top = splat(kMinusInfinity);
    for (int c = begin; c < end; c += kLanes) {
        F32 s = load(scores + c);
        if (c < low || c + kLanes > high) {
            const I32 column = lanes + c;
            s = ((column >= low) & (column < high)) ? s : splat(kMinusInfinity);
            store(scores + c, s);
        }
        top = max(top, s);
    }
    const float before = maximum;
    maximum = std::max(maximum, horizontal_max(top) * scale);
    if (maximum == kMinusInfinity) {  // nothing visible yet
        for (int c = begin; c < end; c += kLanes) T::store_row(out + c, F32{});
        return 1.0f;
    }
    F32 sum{};
    for (int c = begin; c < end; c += kLanes) {
        const F32 s = load(scores + c);
        F32 w = exp2<T::kFine>(s * scale - maximum);
        if (c < low || c + kLanes > high) w = (s == splat(kMinusInfinity)) ? F32{} : w;
        sum += w;
        T::store_row(out + c, w);
    }
    const float shrink = before == kMinusInfinity ? 0.0f : std::exp2(before - maximum);
    denominator = denominator * shrink + horizontal_sum(sum);
    return shrink;
}

template <class T, int MR>
SHOAL_INLINE void sum_values(const Word (&weights)[kTileRows][kTileKeys], const KeyTile& tile, int first, int end,
                             const float* shrink, float* sums, int head_size) {
    constexpr int steps = kPanel / T::kPack;
    for (int column = 0; column < head_size; column += 2 * kLanes) {
        const bool both = column + kLanes < head_size;
        const int other = both ? column + kLanes : column;
        F32 acc[MR][2];
        for (int i = 0; i < MR; ++i) {
            acc[i][0] = load(sums + i * head_size + column) * shrink[i];
            acc[i][1] = load(sums + i * head_size + other) * shrink[i];
        }
        for (int p = first; p < end; ++p) {
            const Word* values = tile.pages[p] + tile.page;
            const Word* const right[2] = {values + column, values + other};
            if (tile.streams) {
                const Word* later = tile.pages[p + kStreamedPages] + tile.page;
                accumulate<T>(acc, &weights[0][p * steps], kTileKeys, right, head_size, steps,
                              FetchPages{{later + column, later + other}, head_size});
            } else {
                accumulate<T>(acc, &weights[0][p * steps], kTileKeys, right, head_size, steps);
            }
        }
        for (int i = 0; i < MR; ++i) {
            store(sums + i * head_size + column, acc[i][0]);
            if (both) store(sums + i * head_size + other, acc[i][1]);
        }
    }
}

// Rows [row, row + MR) of a unit against one tile of keys.
template <class T, int MR>
void attend_rows(const AttentionCall& call, const AttentionUnit& unit, const KeyTile& tile, int row,
                 AttentionState& state) {
    const int group = call.heads / call.kv_heads, size = call.head_size, steps = size / T::kPack;
    const int first_position = unit.position + row / group;
    const int last_position = unit.position + (row + MR - 1) / group;
    const int low_key = call.window > 0 ? std::max(0, first_position - call.window + 1) : 0;
    const int begin = std::max(low_key, unit.key_begin) - tile.first_key;
    const int end = std::min({last_position + 1 - tile.first_key, unit.key_end - tile.first_key, tile.count});
    const int first_page = std::max(begin, 0) / kPanel, end_page = static_cast<int>(divide_up(std::max(end, 0), kPanel));
    if (first_page >= end_page) return;

    alignas(64) float scores[kTileRows][kTileKeys];
    alignas(64) Word weights[kTileRows][kTileKeys];
    float shrink[MR];
    const int64_t first_row = static_cast<int64_t>(unit.kv_head) * call.step_tokens + unit.first_row;
    const Word* queries = call.queries + (first_row * group + row) * steps;
    score_rows<T, MR>(queries, steps, tile, first_page, end_page, scores);
    for (int i = 0; i < MR; ++i) {
        const int position = unit.position + (row + i) / group;
        const int oldest = call.window > 0 ? position - call.window + 1 : 0;
        const int low = std::max(oldest, unit.key_begin) - tile.first_key;
        const int high = std::min(position + 1, unit.key_end) - tile.first_key;
        shrink[i] = weigh_row<T>(scores[i], weights[i], first_page * kPanel, end_page * kPanel, low, high,
                                 call.scale * kLog2E, state.maximum[row + i], state.denominator[row + i]);
    }
    sum_values<T, MR>(weights, tile, first_page, end_page, shrink, state.sums + row * size, size);
}

template <class T>
using AttendRows = void (*)(const AttentionCall&, const AttentionUnit&, const KeyTile&, int, AttentionState&);

template <class T, int... I>
AttendRows<T> attend_rows_of(int rows, std::integer_sequence<int, I...>) {
    static constexpr AttendRows<T> tiles[] = {attend_rows<T, I + 1>...};
    return tiles[rows - 1];
}

template <class T>
void store_normalised(const AttentionCall& call, const float* sums, float denominator, int64_t token, int head) {
    const int size = call.head_size;
    auto* out = static_cast<typename T::Scalar*>(call.out) + (token * call.heads + head) * size;
    for (int i = 0; i < size; i += kLanes) T::store_row(out + i, load(sums + i) * (1.0f / denominator));
}

// The page that holds a unit's keys [16 number, 16 number + 16).
SHOAL_INLINE const Word* find_page(const AttentionCall& call, const AttentionUnit& unit, int number, int64_t page) {
    const int per_block = call.block_size / kPanel;
    const int64_t block = call.block_tables[unit.sequence * call.table_stride + number / per_block];
    return call.pool + ((block * call.kv_heads + unit.kv_head) * per_block + number % per_block) * 2 * page;
}

template <class T>
void attend(const AttentionCall& call, const AttentionUnit& unit, const AttentionUnit& next) {
    const int group = call.heads / call.kv_heads, size = call.head_size, rows = unit.tokens * group;
    AttentionState state;
    std::fill_n(state.sums, rows * size, 0.0f);
    std::fill_n(state.maximum, rows, kMinusInfinity);
    std::fill_n(state.denominator, rows, 0.0f);
    KeyTile tile;
    const int last_page = (unit.key_end - 1) / kPanel;
    const int next_first = next.key_begin / kPanel, next_last = (next.key_end - 1) / kPanel;
    tile.streams = rows <= kTileRows;
    tile.page = static_cast<int64_t>(size) * kPanel / T::kPack;
    const int tile_keys = tile.streams ? kStreamedKeys : kTileKeys;
    for (int key = unit.key_begin / kPanel * kPanel; key < unit.key_end; key += tile_keys) {
        tile.first_key = key;
        tile.count = std::min(tile_keys, unit.key_end - key);
        for (int p = 0; p < kTilePages; ++p) {
            const int number = key / kPanel + p, beyond = number - last_page - 1;
            tile.pages[p] = beyond < 0 ? find_page(call, unit, number, tile.page)
                                       : find_page(call, next, std::min(next_first + beyond, next_last), tile.page);
        }
        for (int row = 0; row < rows;) {
            const int tiles = static_cast<int>(divide_up(rows - row, kTileRows));
            const int count = static_cast<int>(divide_up(rows - row, tiles));
            attend_rows_of<T>(count, std::make_integer_sequence<int, kTileRows>{})(call, unit, tile, row, state);
            row += count;
        }
    }
    if (unit.partial >= 0) {
        for (int row = 0; row < rows; ++row) {
            float* part = call.partials + (static_cast<int64_t>(unit.partial) * group + row) * (size + 2);
            std::copy_n(state.sums + row * size, size, part);
            part[size] = state.maximum[row];
            part[size + 1] = state.denominator[row];
        }
        return;
    }
    for (int row = 0; row < rows; ++row)
        store_normalised<T>(call, state.sums + row * size, state.denominator[row], unit.first_row + row / group,
                            unit.kv_head * group + row % group);
}

void attention(Dtype dtype, const AttentionCall& call, const AttentionUnit& unit, const AttentionUnit& next) {
    if (dtype == Dtype::Bf16)
        attend<Bf16>(call, unit, next);
    else
        attend<Float32>(call, unit, next);
}

// Adds up the parts of one query token, in order of their keys (FlashDecoding: Dao et al. 2023).
void merge(Dtype dtype, const AttentionCall& call, const AttentionUnit& first, int parts) {
    const int group = call.heads / call.kv_heads, size = call.head_size;
    for (int g = 0; g < group; ++g) {
        const float* part = call.partials + (static_cast<int64_t>(first.partial) * group + g) * (size + 2);
        const int64_t stride = static_cast<int64_t>(group) * (size + 2);
        float maximum = kMinusInfinity, denominator = 0.0f;
        for (int p = 0; p < parts; ++p) maximum = std::max(maximum, part[p * stride + size]);
        alignas(64) float sums[kMaxHeadSize] = {};
        for (int p = 0; p < parts; ++p) {
            const float weight = std::exp2(part[p * stride + size] - maximum);
            denominator += weight * part[p * stride + size + 1];
            for (int i = 0; i < size; ++i) sums[i] += weight * part[p * stride + i];
        }
        const int head = first.kv_head * group + g;
        if (dtype == Dtype::Bf16)
            store_normalised<Bf16>(call, sums, denominator, first.first_row, head);
        else
            store_normalised<Float32>(call, sums, denominator, first.first_row, head);
    }
}

}  // namespace SHOAL_ISA
}  // namespace shoal
