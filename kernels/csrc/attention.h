// Paged attention with an online softmax (FlashAttention: Dao et al. 2022), for decode and for chunked prefill alike.
//
// The heads of a group share their keys, so (token, head of the group) pairs are the rows of one matrix product with a
// page's keys, and of one with its values. Rows go in register tiles; keys in tiles that stay in the second-level cache.
// Sequences that begin alike decode together: their rows meet each tile of the shared pages at once, then each goes on
// with its own. A row's tiles and sums are the same as alone, so its result is the same to the bit.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <utility>

#include "simd.h"

namespace shoal {
namespace SHOAL_ISA {

constexpr int kTileKeys = 256;
constexpr int kStreamedKeys = 128;  // of a tile whose pages are read once, while those of the next are fetched
constexpr int kTilePages = kTileKeys / kPanel;
constexpr int kStreamedPages = kStreamedKeys / kPanel;
static_assert(2 * kStreamedPages <= kTilePages);

// Rows, the keys that each one sees, and its softmax so far.
struct AttentionState {
    alignas(64) float sums[kAttentionRows * kMaxHeadSize];
    float maximum[kAttentionRows];
    float denominator[kAttentionRows];
    int low[kAttentionRows], high[kAttentionRows];
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

template <class T, int MR, int NV>
SHOAL_INLINE void score_pages(const Word* queries, int steps, const KeyTile& tile, int p,
                              float (&scores)[kTileRows][kTileKeys]) {
    for (int lane = 0; lane < kPanel; lane += kLanes) {
        const Word* right[NV];
        for (int j = 0; j < NV; ++j) right[j] = tile.pages[p + j] + lane;
        F32 acc[MR][NV] = {};
        if (tile.streams)
            accumulate<T>(acc, queries, steps, right, kPanel, steps,
                          FetchPages{{tile.pages[p + kStreamedPages] + lane,
                                      tile.pages[p + NV - 1 + kStreamedPages] + lane}, kPanel});
        else
            accumulate<T>(acc, queries, steps, right, kPanel, steps);
#pragma GCC unroll 16
        for (int i = 0; i < MR; ++i)
#pragma GCC unroll 2
            for (int j = 0; j < NV; ++j) store(&scores[i][(p + j) * kPanel + lane], acc[i][j]);
    }
}

template <class T, int MR>
SHOAL_INLINE void score_rows(const Word* queries, int steps, const KeyTile& tile, int first, int end,
                             float (&scores)[kTileRows][kTileKeys]) {
    for (; first + 1 < end; first += 2) score_pages<T, MR, 2>(queries, steps, tile, first, scores);
    if (first < end) score_pages<T, MR, 1>(queries, steps, tile, first, scores);
}

// Columns [begin, end) of a row's scores, whole vectors: in [all_begin, all_end) every key is visible, of the others those
// in [low, high) are.
struct Visible {
    int begin, all_begin, all_end, end, low, high;

    Visible(int first, int last, int low_key, int high_key) : begin(first), end(last), low(low_key), high(high_key) {
        all_begin = low > begin ? std::min(static_cast<int>(divide_up(low, kPanel)) * kPanel, end) : begin;
        all_end = high < end ? std::max(std::max(high, 0) / kPanel * kPanel, all_begin) : end;
    }
    // visit(column, whether all of the vector is visible), in order.
    template <class Visit>
    SHOAL_INLINE void each(const Visit& visit) const {
        for (int c = begin; c < all_begin; c += kLanes) visit(c, std::false_type{});
#pragma GCC unroll 4
        for (int c = all_begin; c < all_end; c += kLanes) visit(c, std::true_type{});
        for (int c = all_end; c < end; c += kLanes) visit(c, std::false_type{});
    }
};

// The largest of a row's visible scores; what is not visible becomes -inf.
SHOAL_INLINE float row_top(float* scores, const Visible& visible) {
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
    return horizontal_max(top);
}

// Turns a row's scores into weights 2^(score * scale - maximum), and gives their sum.
template <class T>
SHOAL_INLINE float weigh_row(const float* scores, Word* weights, const Visible& visible, float scale, float maximum) {
    auto* out = reinterpret_cast<typename T::Scalar*>(weights);
    F32 sum{};
    visible.each([&](int c, auto is_whole) {
        const F32 s = load(scores + c);
        F32 w = exp2<T::kFine>(s * scale - maximum);
        if constexpr (!is_whole) w = (s == splat(kMinusInfinity)) ? F32{} : w;
        sum += w;
        T::store_row(out + c, w);
    });
    return horizontal_sum(sum);
}

// Turns the scores of rows [row, row + MR) over columns [begin, end) into weights. `shrink` is what their earlier sums
// are to be multiplied by.
template <class T, int MR>
SHOAL_INLINE void weigh_rows(float (&scores)[kTileRows][kTileKeys], Word (&weights)[kTileRows][kTileKeys], int begin,
                             int end, const KeyTile& tile, float scale, int row, AttentionState& state, float* shrink) {
    float top[MR];
    const auto visible = [&](int i) {
        return Visible(begin, end, state.low[row + i] - tile.first_key, state.high[row + i] - tile.first_key);
    };
    // All of them first: a maximum comes late, and nothing waits for it meanwhile.
    for (int i = 0; i < MR; ++i) top[i] = row_top(scores[i], visible(i));
    for (int i = 0; i < MR; ++i) {
        const float before = state.maximum[row + i], maximum = std::max(before, top[i] * scale);
        state.maximum[row + i] = maximum;
        // Without any visible key so far, the scores are all -inf and so are the weights 0, whatever the maximum.
        const float finite = maximum == kMinusInfinity ? 0.0f : maximum;
        const float sum = weigh_row<T>(scores[i], weights[i], visible(i), scale, finite);
        shrink[i] = before == kMinusInfinity ? 0.0f : exp2<true>(splat(before - maximum))[0];
        state.denominator[row + i] = state.denominator[row + i] * shrink[i] + sum;
    }
}

template <class T, int MR>
SHOAL_INLINE void sum_values(const Word (&weights)[kTileRows][kTileKeys], const KeyTile& tile, int first, int end,
                             const float* shrink, float* sums, int head_size) {
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
                accumulate<T>(acc, &weights[0][p * steps], kTileKeys, right, head_size, steps,
                              FetchPages{{later + column, later + other}, head_size});
            } else {
                accumulate<T>(acc, &weights[0][p * steps], kTileKeys, right, head_size, steps);
            }
        }
#pragma GCC unroll 16
        for (int i = 0; i < MR; ++i) store(sums + i * head_size + column, acc[i][0]);
        if (!both) continue;
#pragma GCC unroll 16
        for (int i = 0; i < MR; ++i) store(sums + i * head_size + other, acc[i][1]);
    }
}

// Rows [row, row + MR), of which no later one sees less of the tile's end or more of its beginning.
template <class T, int MR>
void attend_rows(const AttentionCall& call, const Word* queries, const KeyTile& tile, int row, AttentionState& state) {
    const int size = call.head_size, steps = size / T::kPack;
    const int begin = state.low[row] - tile.first_key, end = std::min(state.high[row + MR - 1] - tile.first_key, tile.count);
    const int first_page = std::max(begin, 0) / kPanel, end_page = static_cast<int>(divide_up(std::max(end, 0), kPanel));
    if (first_page >= end_page) return;

    alignas(64) float scores[kTileRows][kTileKeys];
    alignas(64) Word weights[kTileRows][kTileKeys];
    float shrink[MR];
    score_rows<T, MR>(queries, steps, tile, first_page, end_page, scores);
    weigh_rows<T, MR>(scores, weights, first_page * kPanel, end_page * kPanel, tile, call.scale * kLog2E, row, state,
                      shrink);
    sum_values<T, MR>(weights, tile, first_page, end_page, shrink, state.sums + row * size, size);
}

template <class T>
using AttendRows = void (*)(const AttentionCall&, const Word* queries, const KeyTile&, int row, AttentionState&);

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

// Keys [key, key + count) of a unit; what comes after its last page are the pages of `next` from page `next_page` on.
SHOAL_INLINE void fill_tile(KeyTile& tile, const AttentionCall& call, const AttentionUnit& unit, int key, int count,
                            const AttentionUnit& next, int next_page) {
    const int last = (unit.key_end - 1) / kPanel, next_last = (next.key_end - 1) / kPanel;
    tile.first_key = key;
    tile.count = std::min(count, unit.key_end - key);
    for (int p = 0; p < kTilePages; ++p) {
        const int number = key / kPanel + p, beyond = number - last - 1;
        tile.pages[p] = beyond < 0 ? find_page(call, unit, number, tile.page)
                                   : find_page(call, next, std::min(next_page + beyond, next_last), tile.page);
    }
}

// Rows [row, end) against a tile, in register tiles of nearly equal height.
template <class T>
SHOAL_INLINE void attend_tile(const AttentionCall& call, const Word* queries, const KeyTile& tile, int row, int end,
                              AttentionState& state) {
    const int steps = call.head_size / T::kPack;
    for (int count; row < end; row += count, queries += count * steps) {
        count = static_cast<int>(divide_up(end - row, divide_up(end - row, kTileRows)));
        attend_rows_of<T>(count, std::make_integer_sequence<int, kTileRows>{})(call, queries, tile, row, state);
    }
}

// All rows of units of one token against the tiles of whole pages that they share. Returns the first key after those.
template <class T>
int attend_shared(const AttentionCall& call, const AttentionUnit* units, int count, int shared_end, int tile_keys,
                  KeyTile& tile, AttentionState& state) {
    const int group = call.heads / call.kv_heads, rows = count * group;
    const int64_t words = static_cast<int64_t>(group) * call.head_size / T::kPack;  // of a unit's queries
    alignas(64) Word queries[kSharedRows * kMaxHeadSize];
    for (int i = 0; i < count; ++i)
        std::copy_n(call.queries + (int64_t{units[i].kv_head} * call.step_tokens + units[i].first_row) * words, words,
                    queries + i * words);
    const int first_rows = std::min(rows, kTileRows), steps = call.head_size / T::kPack;
    int key = units[0].key_begin / kPanel * kPanel;
    for (; key + tile_keys <= shared_end; key += tile_keys) {
        fill_tile(tile, call, units[0], key, tile_keys, units[1], (key + tile_keys) / kPanel);
        tile.streams = tile_keys == kStreamedKeys;
        attend_tile<T>(call, queries, tile, 0, first_rows, state);
        tile.streams = false;  // what the first rows have brought
        attend_tile<T>(call, queries + first_rows * steps, tile, first_rows, rows, state);
    }
    return key;
}

template <class T>
void attend(const AttentionCall& call, const AttentionUnit* units, int count, int shared_end, const AttentionUnit& next) {
    const int group = call.heads / call.kv_heads, size = call.head_size;
    AttentionState state;
    int rows = 0;
    for (int u = 0; u < count; ++u)
        for (int token = 0; token < units[u].tokens; ++token)
            for (int g = 0; g < group; ++g, ++rows) {
                const int position = units[u].position + token, oldest = call.window > 0 ? position - call.window + 1 : 0;
                state.low[rows] = std::max(oldest, units[u].key_begin);
                state.high[rows] = std::min(position + 1, units[u].key_end);
            }
    std::fill_n(state.sums, rows * size, 0.0f);
    std::fill_n(state.maximum, rows, kMinusInfinity);
    std::fill_n(state.denominator, rows, 0.0f);
    KeyTile tile;
    tile.page = static_cast<int64_t>(size) * kPanel / T::kPack;
    const bool streams = units[0].tokens * group <= kTileRows;
    const int tile_keys = streams ? kStreamedKeys : kTileKeys;
    int begin = units[0].key_begin / kPanel * kPanel;
    if (count > 1) begin = attend_shared<T>(call, units, count, shared_end, tile_keys, tile, state);
    tile.streams = streams;
    for (int u = 0, row = 0; u < count; ++u) {
        const AttentionUnit& unit = units[u];
        const int end = row + unit.tokens * group;
        const Word* queries =
            call.queries + (int64_t{unit.kv_head} * call.step_tokens + unit.first_row) * group * (size / T::kPack);
        const AttentionUnit& after = u + 1 < count ? units[u + 1] : next;
        const int after_page = (u + 1 < count ? begin : after.key_begin) / kPanel;
        for (int key = begin; key < unit.key_end; key += tile_keys) {
            fill_tile(tile, call, unit, key, tile_keys, after, after_page);
            attend_tile<T>(call, queries, tile, row, end, state);
        }
        for (; row < end; ++row) {
            const int in_unit = row - (end - unit.tokens * group);
            if (unit.partial < 0) {
                store_normalised<T>(call, state.sums + row * size, state.denominator[row], unit.first_row + in_unit / group,
                                    unit.kv_head * group + in_unit % group);
                continue;
            }
            float* part = call.partials + (static_cast<int64_t>(unit.partial) * group + in_unit) * (size + 2);
            std::copy_n(state.sums + row * size, size, part);
            part[size] = state.maximum[row];
            part[size + 1] = state.denominator[row];
        }
    }
}

void attention(Dtype dtype, const AttentionCall& call, const AttentionUnit* units, int count, int shared_end,
               const AttentionUnit& next) {
    if (dtype == Dtype::Bf16)
        attend<Bf16>(call, units, count, shared_end, next);
    else
        attend<Float32>(call, units, count, shared_end, next);
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
