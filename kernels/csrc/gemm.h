// Packed matrix product: the sums of a tile of rows by one block of 32 columns, or with short vectors by some of these
// at a time, stay in registers over the whole summed dimension.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "integer_sums.h"

namespace shoal {
namespace SHOAL_ISA {

// What a tile prefetches.
enum class Fetch {
    Nothing,
    NextBlock,  // one line per step, by which the first two tiles of a block fetch the next one
    Own,        // two lines per step, a little ahead in its own block
    OwnFar      // the same, farther ahead and into the L1 cache
};

struct Ahead {
    const Word* words = nullptr;
    Fetch fetch = Fetch::Nothing;
};

// A tile that has its block to itself reads it as fast as memory delivers. From this many rows on, it is so slow that
// the hardware prefetcher does not run far enough ahead (or it passes over the block twice); with fewer rows,
// prefetches of its own only get in the way.
constexpr int kUnforeseenRows = kLanes == kPanel ? 10 : 3;
constexpr int kAheadWords = (3 << 10) / sizeof(Word);

// The same where the L1 cache holds the lines on their way beside the rows (measured on Zen 5, with 48 KiB).
constexpr int kFarRows = 5, kFarAheadWords = (12 << 10) / sizeof(Word);
#ifdef _SC_LEVEL1_DCACHE_SIZE
inline const bool kFetchesFar = kLanes == kPanel && sysconf(_SC_LEVEL1_DCACHE_SIZE) >= 48 << 10;
#else
constexpr bool kFetchesFar = false;
#endif

inline Ahead ahead_of(const Word* words, int rows) {
    if (kFetchesFar) return rows < kFarRows ? Ahead{} : Ahead{words + kFarAheadWords, Fetch::OwnFar};
    return rows < kUnforeseenRows ? Ahead{} : Ahead{words + kAheadWords, Fetch::Own};
}

template <int Lines, int Locality>
struct FetchLines {
    const Word* words;
    SHOAL_INLINE void operator()(int step) const {
        for (int i = 0; i < Lines; ++i) __builtin_prefetch(words + (step * Lines + i) * kPanel, 0, Locality);
    }
};

// Prefetches the output, to which a tile's sums will be added or written, while they are being computed.
template <class T, int MR>
SHOAL_INLINE void fetch_out(const GemmCall& call, int row, int block) {
    constexpr int line = 64;
    const bool gated = is_gated(call.finish);
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
    const auto accumulate_all = [&](const auto&... fetch) __attribute__((always_inline)) {
        accumulate<T>(acc, x, call.x_stride, right, kBlockColumns, linear.steps(), fetch...);
    };
    if (kLanes == kPanel && MR >= kFarRows && ahead.fetch == Fetch::OwnFar)
        accumulate_all(FetchLines<2, 3>{ahead.words});
    else if (MR >= kUnforeseenRows && ahead.fetch == Fetch::Own)
        accumulate_all(FetchLines<2, 2>{ahead.words});
    else if (ahead.fetch == Fetch::NextBlock)
        accumulate_all(FetchLines<1, 2>{ahead.words});
    else
        accumulate_all();
}

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

template <int Bits, int MR, bool Bytes>
void integer_tile(const GemmCall& call, int row, int block, const Ahead&) {
    const auto sum = [&](auto column, F32 (&total)[MR][2]) __attribute__((always_inline)) {
        sum_integers<Bits, MR, decltype(column)::value, Bytes>(call, row, block, total);
    };
    sum_by_columns<Bf16, MR, 2>(call, row, block, sum, ColumnsOf<2>{});
}

using GemmTile = void (*)(const GemmCall&, int row, int block, const Ahead&);

template <class T, int... I>
GemmTile gemm_tile_of(int rows, std::integer_sequence<int, I...>) {
    static constexpr GemmTile tiles[] = {gemm_tile<T, I + 1>...};
    return tiles[rows - 1];
}

template <int Bits, bool Bytes, int... I>
GemmTile integer_tile_of(int rows, std::integer_sequence<int, I...>) {
    static constexpr GemmTile tiles[] = {integer_tile<Bits, I + 1, Bytes>...};
    return tiles[rows - 1];
}

GemmTile choose_tile(const Linear& linear, int rows) {
    constexpr std::make_integer_sequence<int, kTileRows> heights;
    constexpr std::make_integer_sequence<int, kIntegerTileRows> integer_heights;
    if (is_integer(linear.format)) {
        const bool is_int8 = linear.format == Format::Int8;
        if (holds_bytes(linear))
            return is_int8 ? integer_tile_of<8, kMultipliesBytes>(rows, integer_heights)
                           : integer_tile_of<4, kMultipliesBytes>(rows, integer_heights);
        return is_int8 ? integer_tile_of<8, false>(rows, integer_heights) : integer_tile_of<4, false>(rows, integer_heights);
    }
    return linear.dtype == Dtype::Bf16 ? gemm_tile_of<Bf16>(rows, heights) : gemm_tile_of<Float32>(rows, heights);
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
                ahead = ahead_of(linear.block(block), rows);
            else if (tile < 2 && block + 1 < block_end)
                ahead = {linear.block(block + 1) + tile * linear.block_words() / 2, Fetch::NextBlock};
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
