// Paged attention with an online softmax (FlashAttention: Dao et al. 2022), for decode and for chunked prefill alike.
//
// The query heads of a group share their keys, so all (token, head of the group) pairs are rows of one matrix product
// with a page's keys, and of another with its values. Rows are processed in register tiles, keys in tiles that stay in
// the L2 cache. Sequences with a common prefix decode together: their rows are multiplied with each tile of the shared
// pages at once, then each sequence continues with its own pages. A row goes through the same tiles and sums as it
// would alone, so its result is the same to the bit.
#pragma once

#include <algorithm>
#include <cmath>

#include "attention_rows.h"
#include "attention_tiles.h"

namespace shoal {
namespace SHOAL_ISA {

template <class T>
void store_normalised(const AttentionCall& call, const float* sums, float denominator, int64_t token, int head) {
    const int size = call.head_size;
    auto* out = static_cast<typename T::Scalar*>(call.out) + token * call.out_stride + head * size;
    for (int i = 0; i < size; i += kLanes) T::store_row(out + i, load(sums + i) * (1.0f / denominator));
}

// The page that holds keys [16 * number, 16 * number + 16) of a unit.
SHOAL_INLINE const Word* find_page(const AttentionCall& call, const AttentionUnit& unit, int number, int64_t page) {
    const int per_block = call.block_size / kPanel;
    const int64_t block = call.block_tables[unit.sequence * call.table_stride + number / per_block];
    return call.pool + ((block * call.kv_heads + unit.kv_head) * per_block + number % per_block) * 2 * page;
}

// Fills in the tile for keys [key, key + count) of a unit. After the unit's last page, the pages of `next` follow, from
// page `next_page` on: they are prefetched.
SHOAL_INLINE void fill_tile(KeyTile& tile, const AttentionCall& call, const AttentionUnit& unit, int key, int count,
                            const AttentionUnit& next, int next_page) {
    const int last = (unit.key_end - 1) / kPanel, next_last = (next.key_end - 1) / kPanel;
    tile.first_key = key;
    tile.count = std::min(count, unit.key_end - key);
    tile.num_pages = static_cast<int>(divide_up(tile.count, kPanel));
    const int pages = count <= kStreamedKeys ? 2 * kStreamedPages : kTilePages;
    for (int p = 0; p < pages; ++p) {
        const int number = key / kPanel + p, beyond = number - last - 1;
        tile.pages[p] = beyond < 0 ? find_page(call, unit, number, tile.page)
                                   : find_page(call, next, std::min(next_page + beyond, next_last), tile.page);
    }
}

// Attention of all rows of one-token units to the tiles of pages that they share. Returns the first key after these.
template <class T>
int attend_shared(const AttentionCall& call, const AttentionUnit* units, int count, int shared_end, int tile_keys,
                  KeyTile& tile, AttentionState& state) {
    const int group = call.heads / call.kv_heads, rows = count * group;
    const int64_t words = static_cast<int64_t>(group) * call.head_size / T::kPack;  // of a unit's queries
    alignas(64) Word gathered[kSharedRows * kMaxHeadSize];
    alignas(64) typename T::Left widened[kWidensLeft<T> ? kSharedRows * kMaxHeadSize : 1];
    for (int i = 0; i < count; ++i)
        std::copy_n(call.queries + (int64_t{units[i].kv_head} * call.step_tokens + units[i].first_row) * words, words,
                    gathered + i * words);
    const auto* queries = to_lefts<T>(gathered, count * words, widened);
    const int first_rows = std::min(rows, kRowsAtOnce<T>), lefts = call.head_size / T::kPack * T::kParts;
    int key = units[0].key_begin / kPanel * kPanel;
    for (; key + tile_keys <= shared_end; key += tile_keys) {
        fill_tile(tile, call, units[0], key, tile_keys, units[1], (key + tile_keys) / kPanel);
        tile.streams = tile_keys == kStreamedKeys;
        attend_tile<T>(call, queries, tile, 0, first_rows, state);
        tile.streams = false;  // the first rows have brought the tile into the cache
        attend_tile<T>(call, queries + first_rows * lefts, tile, first_rows, rows, state);
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
    alignas(64) typename T::Left widened[kWidensLeft<T> ? kUnitRows * kMaxHeadSize : 1];
    KeyTile tile;
    tile.page = static_cast<int64_t>(size) * kPanel / T::kPack;
    const bool streams = units[0].tokens * group <= kRowsAtOnce<T>;
    int begin = units[0].key_begin / kPanel * kPanel;
    tile.of_prompt = !streams && units[0].tokens > 1;  // if there are several units, each has one token
    const int tile_keys = streams ? kStreamedKeys : tile.of_prompt ? kTileKeys : kSharedKeys;
    if (count > 1) begin = attend_shared<T>(call, units, count, shared_end, tile_keys, tile, state);
    tile.streams = streams;
    for (int u = 0, row = 0; u < count; ++u) {
        const AttentionUnit& unit = units[u];
        const int end = row + unit.tokens * group;
        const int64_t words = int64_t{group} * (size / T::kPack);  // of a token's queries
        const auto* queries = to_lefts<T>(
            call.queries + (int64_t{unit.kv_head} * call.step_tokens + unit.first_row) * words, unit.tokens * words, widened);
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

// Combines the partial results of one query token, in the order of their keys (FlashDecoding: Dao et al. 2023).
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
