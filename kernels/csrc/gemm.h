// Packed matrix product: the sums of a tile of rows by one block of 32 columns, or with short vectors by some of these
// at a time, stay in registers over the whole summed dimension.
#pragma once

#include <algorithm>
#include <utility>

#include "simd.h"

namespace shoal {
namespace SHOAL_ISA {

// The bias of one vector of a block's columns.
SHOAL_INLINE F32 bias_of(const Linear& linear, int block, int column) {
    return linear.bias.empty() ? F32{} : load(&linear.bias[block * kBlockColumns + column]);
}

// Finishes the last, ragged columns of a weight, one value at a time.
template <int MR>
void finish_ragged(const GemmCall& call, int row, int block, int lane, const F32 (&acc)[MR][2]) {
    float* out = static_cast<float*>(call.out) + row * call.out_stride;
    for (int i = 0; i < MR; ++i, out += call.out_stride)
        for (int j = 0; j < 2; ++j) {
            const int column = block * kBlockColumns + j * kPanel + lane;
            for (int k = 0; column + k < call.linear->outputs && k < kLanes; ++k)
                out[column + k] = call.finish == Finish::Add ? out[column + k] + acc[i][j][k] : acc[i][j][k];
        }
}

// Finishes the sums of whole vectors of columns. Unrolled, so that they need not leave their registers first.
template <class T, int MR, Finish kFinish>
SHOAL_INLINE void finish_columns(const GemmCall& call, int row, int block, int lane, const F32 (&acc)[MR][2]) {
    if constexpr (kFinish == Finish::SwiGlu) {
        auto* out = static_cast<typename T::Scalar*>(call.out) + row * call.out_stride + block * kPanel + lane;
#pragma GCC unroll 16
        for (int i = 0; i < MR; ++i) T::store_row(out + i * call.out_stride, silu(acc[i][0]) * acc[i][1]);
    } else {
        float* out = static_cast<float*>(call.out) + row * call.out_stride + block * kBlockColumns + lane;
#pragma GCC unroll 16
        for (int i = 0; i < MR; ++i) {
            float* const left = out + i * call.out_stride;
            float* const right = left + kPanel;
            store(left, kFinish == Finish::Add ? acc[i][0] + load(left) : acc[i][0]);
            store(right, kFinish == Finish::Add ? acc[i][1] + load(right) : acc[i][1]);
        }
    }
}

// Whether the blocks before `block_end` have all of their columns, so that whole vectors can be written.
inline bool are_whole(const GemmCall& call, int block_end) {
    return call.linear->gated || block_end * kBlockColumns <= call.linear->outputs;
}

// Finishes the sums of any columns.
template <class T, int MR>
SHOAL_INLINE void finish_tile(const GemmCall& call, int row, int block, int lane, const F32 (&acc)[MR][2]) {
    if (!are_whole(call, block + 1)) {
        F32 kept[MR][2];
#pragma GCC unroll 16
        for (int i = 0; i < MR; ++i) {
            kept[i][0] = acc[i][0];
            kept[i][1] = acc[i][1];
        }
        return finish_ragged<MR>(call, row, block, lane, kept);
    }
    if (call.finish == Finish::SwiGlu) return finish_columns<T, MR, Finish::SwiGlu>(call, row, block, lane, acc);
    if (call.finish == Finish::Add) return finish_columns<T, MR, Finish::Add>(call, row, block, lane, acc);
    finish_columns<T, MR, Finish::Store>(call, row, block, lane, acc);
}

// What a tile prefetches, and how many lines per step: none; one, by which the first two tiles of a block fetch the
// next block; or two, a little ahead in its own block.
struct Ahead {
    const Word* words = nullptr;
    int lines = 0;
};

// A tile that has its block to itself reads it as fast as memory delivers. From this many rows on, it is so slow that
// the hardware prefetcher does not run far enough ahead (or it passes over the block twice); with fewer rows,
// prefetches of its own only get in the way.
constexpr int kUnforeseenRows = kLanes == kPanel ? 10 : 3;
constexpr int kAheadWords = (3 << 10) / sizeof(Word);

template <int Lines>
struct FetchLines {
    const Word* words;
    SHOAL_INLINE void operator()(int step) const {
        for (int i = 0; i < Lines; ++i) __builtin_prefetch(words + (step * Lines + i) * kPanel, 0, 2);
    }
};

// Prefetches the output, to which a tile's sums will be added or written, while they are being computed.
template <class T, int MR>
SHOAL_INLINE void fetch_out(const GemmCall& call, int row, int block) {
    constexpr int line = 64;
    const bool gated = call.finish == Finish::SwiGlu;
    const int64_t size = gated ? sizeof(typename T::Scalar) : sizeof(float), columns = gated ? kPanel : kBlockColumns;
    const char* out = static_cast<const char*>(call.out) + (row * call.out_stride + block * columns) * size;
    for (int i = 0; i < MR; ++i, out += call.out_stride * size) {
        __builtin_prefetch(out, 1);
        if (columns * size > line) __builtin_prefetch(out + line, 1);
    }
}

// Sums for adjacent vectors of columns, starting from their bias.
template <class T, int MR, int... J>
SHOAL_INLINE void sum_columns(const GemmCall& call, int row, int block, int column, const Ahead& ahead,
                              F32 (&acc)[MR][sizeof...(J)], std::integer_sequence<int, J...>) {
    const Linear& linear = *call.linear;
    const Word* const words = linear.block(block) + column;
    const Word* const right[] = {words + J * kLanes...};
    const auto* x = reinterpret_cast<const typename T::Left*>(call.x) + row * call.x_stride;
#pragma GCC unroll 8
    for (int j = 0; j < static_cast<int>(sizeof...(J)); ++j) {
        const F32 bias = bias_of(linear, block, column + j * kLanes);
#pragma GCC unroll 16
        for (int i = 0; i < MR; ++i) acc[i][j] = bias;
    }
    if (MR >= kUnforeseenRows && ahead.lines == 2)
        accumulate<T>(acc, x, call.x_stride, right, kBlockColumns, linear.steps(), FetchLines<2>{ahead.words});
    else if (ahead.lines == 1)
        accumulate<T>(acc, x, call.x_stride, right, kBlockColumns, linear.steps(), FetchLines<1>{ahead.words});
    else
        accumulate<T>(acc, x, call.x_stride, right, kBlockColumns, linear.steps());
}

// Calls sum(column, acc) for NV vectors of columns at a time, and finishes the tile's sums. If vectors are shorter than
// a panel, all columns are summed first, because a gate column and its up column are in different panels.
template <class T, int MR, int NV, class Sum, int... I>
SHOAL_INLINE void sum_by_columns(const GemmCall& call, int row, int block, const Sum& sum, std::integer_sequence<int, I...>) {
    if constexpr (kLanes == kPanel) {
        static_assert(NV * kLanes == kBlockColumns);
        F32 acc[MR][NV];
        sum(std::integral_constant<int, 0>{}, acc);
        finish_tile<T>(call, row, block, 0, acc);
    } else {
        alignas(64) float sums[MR][kBlockColumns];
        const auto keep = [&](auto column) {
            F32 acc[MR][NV];
            sum(column, acc);
#pragma GCC unroll 16
            for (int i = 0; i < MR; ++i)
#pragma GCC unroll 8
                for (int j = 0; j < NV; ++j) store(&sums[i][column + j * kLanes], acc[i][j]);
        };
        (keep(std::integral_constant<int, I * NV * kLanes>{}), ...);
        for (int lane = 0; lane < kPanel; lane += kLanes) {
            F32 acc[MR][2];
#pragma GCC unroll 16
            for (int i = 0; i < MR; ++i)
                for (int j = 0; j < 2; ++j) acc[i][j] = load(&sums[i][j * kPanel + lane]);
            finish_tile<T>(call, row, block, lane, acc);
        }
    }
}

template <int NV>
using ColumnsOf = std::make_integer_sequence<int, kBlockColumns / kLanes / NV>;

constexpr int kHidingSums = 8;  // this many independent sums hide one another's latency

template <class T, int MR>
void gemm_tile(const GemmCall& call, int row, int block, const Ahead& ahead) {
    constexpr int all = kBlockColumns / kLanes, vectors = MR * all <= kHidingSums ? all : 2;
    fetch_out<T, MR>(call, row, block);
    const auto sum = [&](int column, F32 (&acc)[MR][vectors]) __attribute__((always_inline)) {
        sum_columns<T>(call, row, block, column, ahead, acc, std::make_integer_sequence<int, vectors>{});
    };
    sum_by_columns<T, MR, vectors>(call, row, block, sum, ColumnsOf<vectors>{});
}

// How many words ahead 8-bit weights are prefetched for few rows, where this was measured and pays off; 0 elsewhere.
#if defined(__AMX_INT8__)
constexpr int kIntegersAhead = 512;
#else
constexpr int kIntegersAhead = 0;
#endif

// Sums for two vectors of columns, from column `Column` on: exact within a group, then multiplied by one scale of the
// weight and one of the row.
template <int Bits, int MR, int Column>
SHOAL_INLINE void sum_integers(const GemmCall& call, int row, int block, F32 (&total)[MR][2]) {
    const Linear& linear = *call.linear;
    const int groups = linear.groups();
    const float* scales = call.integers.scales + static_cast<int64_t>(row) * groups;
    const float* sums = call.integers.sums + static_cast<int64_t>(row) * groups;
    const Word* words = linear.block(block);
    const Word* x = call.x + row * call.x_stride;
    const int64_t stride = call.x_stride, group_words = linear.group_words();
    for (int j = 0; j < 2; ++j) {
        const F32 bias = bias_of(linear, block, Column + j * kLanes);
        for (int i = 0; i < MR; ++i) total[i][j] = bias;
    }
    for (int g = 0; g < groups; ++g, words += group_words, x += kGroup / 2) {
        if constexpr (kIntegersAhead > 0 && Bits == 8 && Column == 0)
            for (int64_t i = 0; i < group_words; i += kPanel) __builtin_prefetch(words + kIntegersAhead + i, 0, 2);
        I32 acc[MR][2] = {};
#pragma GCC unroll 8
        for (int w = 0; w < Bits; ++w) {
            const Word* const held = words + w * kBlockColumns + Column;
#pragma GCC unroll 4
            for (int p = 0; p < 16 / Bits; ++p) {
                const I32 pairs[2] = {integer_pairs<Bits>(load(held), p), integer_pairs<Bits>(load(held + kLanes), p)};
#pragma GCC unroll 16
                for (int i = 0; i < MR; ++i) {
                    const Word* left = x + i * stride + w * (16 / Bits) + p;
                    dot_pairs(acc[i][0], left, pairs[0]);
                    dot_pairs(acc[i][1], left, pairs[1]);
                }
                keep_order();
            }
        }
        const Word* const scales_of = words + Bits * kBlockColumns;
#pragma GCC unroll 2
        for (int j = 0; j < 2; ++j) {
            const int column = Column + j * kLanes, panel = column / kPanel, lane = column % kPanel;
            const F32 scale = half_bf16(load(scales_of + lane), panel);
            for (int i = 0; i < MR; ++i) {
                F32 part = __builtin_convertvector(acc[i][j], F32) * scale;
                if constexpr (Bits == 4) part += half_bf16(load(scales_of + kPanel + lane), panel) * sums[i * groups + g];
                total[i][j] += part * scales[i * groups + g];
            }
        }
    }
}

template <int Bits, int MR>
void integer_tile(const GemmCall& call, int row, int block, const Ahead&) {
    const auto sum = [&](auto column, F32 (&total)[MR][2]) __attribute__((always_inline)) {
        sum_integers<Bits, MR, decltype(column)::value>(call, row, block, total);
    };
    sum_by_columns<Bf16, MR, 2>(call, row, block, sum, ColumnsOf<2>{});
}

// Rounds a row of bf16 to 16-bit integers, each group scaled by its largest absolute value. NaN and infinity make the
// group's scale NaN.
void round_row(const Word* x, const IntegerRows& out, int row, int inputs) {
    constexpr int words = kGroup / 2;
    const int64_t groups = inputs / kGroup, first = row * groups;
    const F32 magic = splat(12582912.0f);  // adding 1.5 * 2^23 rounds to the nearest integer
    for (int64_t g = 0; g < groups; ++g, x += words) {
        F32 largest{}, nothing{};
        for (int w = 0; w < words; w += kLanes) {
            const U32 pair = load(x + w);
            largest = max(largest, max(half_bf16(pair & 0x7fff7fffu, 0), half_bf16(pair & 0x7fff7fffu, 1)));
            nothing += (half_bf16(pair, 0) + half_bf16(pair, 1)) * 0.0f;
        }
        const float top = horizontal_max(largest), inverse = top > 0.0f ? 32767.0f / top : 0.0f;
        F32 sum{};
        for (int w = 0; w < words; w += kLanes) {
            const U32 pair = load(x + w);
            const F32 low = half_bf16(pair, 0) * inverse + magic, high = half_bf16(pair, 1) * inverse + magic;
            store(out.values + (first + g) * words + w, ((U32)low & 0xffffu) | (U32)high << 16);
            sum += (low - magic) + (high - magic);
        }
        out.scales[first + g] = top * (1.0f / 32767.0f) + horizontal_sum(nothing);
        out.sums[first + g] = horizontal_sum(sum);
    }
}

using GemmTile = void (*)(const GemmCall&, int row, int block, const Ahead&);

template <class T, int... I>
GemmTile gemm_tile_of(int rows, std::integer_sequence<int, I...>) {
    static constexpr GemmTile tiles[] = {gemm_tile<T, I + 1>...};
    return tiles[rows - 1];
}

template <int Bits, int... I>
GemmTile integer_tile_of(int rows, std::integer_sequence<int, I...>) {
    static constexpr GemmTile tiles[] = {integer_tile<Bits, I + 1>...};
    return tiles[rows - 1];
}

GemmTile choose_tile(const Linear& linear, int rows) {
    if (linear.format == Format::Int8) return integer_tile_of<8>(rows, std::make_integer_sequence<int, kIntegerTileRows>{});
    if (linear.format == Format::Int4) return integer_tile_of<4>(rows, std::make_integer_sequence<int, kIntegerTileRows>{});
    if (linear.dtype == Dtype::Bf16) return gemm_tile_of<Bf16>(rows, std::make_integer_sequence<int, kTileRows>{});
    return gemm_tile_of<Float32>(rows, std::make_integer_sequence<int, kTileRows>{});
}

// Multiplies rows that can be used as a left-hand side as they are: T::Left of the weight's dtype, or integers.
void multiply_lefts(const GemmCall& call, int row_begin, int row_end, int block_begin, int block_end) {
    const Linear& linear = *call.linear;
    const int tile_rows = linear.format == Format::Plain ? kTileRows : kIntegerTileRows;
    for (int block = block_begin; block < block_end; ++block) {
        // Tiles of nearly equal height: a short last one could not hide the latency of the dot products.
        const int all_rows = row_end - row_begin;
        for (int row = row_begin, left = all_rows, tile = 0; left > 0; ++tile) {
            const int rows = static_cast<int>(divide_up(left, divide_up(left, tile_rows)));
            Ahead ahead;
            if (all_rows <= tile_rows)
                ahead = {linear.block(block) + kAheadWords, rows < kUnforeseenRows ? 0 : 2};
            else if (tile < 2 && block + 1 < block_end)
                ahead = {linear.block(block + 1) + tile * linear.block_words() / 2, 1};
            choose_tile(linear, rows)(call, row, block, ahead);
            row += rows;
            left -= rows;
        }
    }
}

// Without a product of bf16 pairs, rows of bf16 are widened to float32 once for all blocks of a call: as many at a time
// as the L2 cache holds, but enough of them that reading the weights does not show.
constexpr int64_t kWidenedValues = 64 << 10;
constexpr int kLeastWidenedRows = 24;

void gemm(const GemmCall& call, int row_begin, int row_end, int block_begin, int block_end) {
    const Linear& linear = *call.linear;
    if (!kWidensLeft<Bf16> || linear.format != Format::Plain || linear.dtype != Dtype::Bf16)
        return multiply_lefts(call, row_begin, row_end, block_begin, block_end);
    if (block_begin >= block_end) return;
    const int64_t stride = divide_up(linear.inputs, 16) * 16 | 16;  // an odd number of cache lines
    const int64_t held = std::max<int64_t>(kLeastWidenedRows, kWidenedValues / stride);
    for (int row = row_begin, end; row < row_end; row = end) {
        end = row + static_cast<int>(divide_up(row_end - row, divide_up(row_end - row, held)));
        auto* const widened = reinterpret_cast<Bf16::Left*>(thread_scratch((end - row) * stride));
        for (int i = row; i < end; ++i)
            to_lefts<Bf16>(call.x + i * call.x_stride, linear.steps(), widened + (i - row) * stride);
        GemmCall part = call;
        part.x = reinterpret_cast<const Word*>(widened - row * stride);
        part.x_stride = stride;
        multiply_lefts(part, row, end, block_begin, block_end);
    }
}

}  // namespace SHOAL_ISA
}  // namespace shoal
