// Packed matrix product by tile registers: two by two of them hold up to 32 rows of one block of 32 columns.
#pragma once

#if defined(__AMX_BF16__)

#include <algorithm>

#include "gemm.h"
#include "tiles.h"

namespace shoal {
namespace SHOAL_ISA {

constexpr int kLinesOfStep = kTileWords * kBlockColumns / kPanel;  // of a weight block: what one step of a tile reads
// Left sides that are met by all of a call's blocks, one after the other: the second-level cache holds them. The first is
// worth more than the second: with fewer rows, weights do not come fast enough.
constexpr int64_t kHeldBytes = 1 << 20;
constexpr int kLeastHeldRows = 128;

// The sums of a tile, whose rows are finished while those of the next are being summed.
struct TileSums {
    alignas(64) float sums[2 * kTileHeight][kBlockColumns];
    int row = 0, block = 0, next = 0, end = 0;  // of the call's rows the one of sums[0]; of sums those yet to be finished

    SHOAL_INLINE void finish(const GemmCall& call, int count) {
        for (const int stop = std::min(end, next + count); next < stop; ++next) {
            F32 acc[1][2];
            for (int j = 0; j < 2; ++j) acc[0][j] = load(&sums[next][j * kPanel]) + bias_of(*call.linear, block, j, 0);
            finish_tile<Bf16, 1>(call, row + next, block, 0, acc);
        }
    }
};

// Sums 0 and 1 become the first `upper` rows from `row` on by the panels of a block, 2 and 3 the rows after them if there
// are any. Meanwhile those before are finished.
template <bool HasLower>
SHOAL_INLINE void sum_tile(const GemmCall& call, int row, int upper, int block, const Ahead& ahead, TileSums& before) {
    const Word* right = call.linear->block(block);
    const Word* const left = call.x + row * call.x_stride;
    const Word* const lower = left + upper * call.x_stride;
    const int64_t left_bytes = call.x_stride * kWordBytes, right_bytes = kBlockColumns * kWordBytes;
    const int steps = call.linear->steps() / kTileWords, each = static_cast<int>(divide_up(before.end - before.next, steps));
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const Word* fetched = ahead.words;
    for (int s = 0; s < steps; ++s, right += kTileWords * kBlockColumns) {
        _tile_loadd(6, right, right_bytes);
        _tile_loadd(4, left + s * kTileWords, left_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, right + kPanel, right_bytes);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (HasLower) {
            _tile_loadd(5, lower + s * kTileWords, left_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        for (int i = 0; i < ahead.lines; ++i, fetched += kPanel) __builtin_prefetch(fetched, 0, 2);
        before.finish(call, each);
    }
    before.finish(call, before.end);
}

// The next block's part that a tile fetches, a few lines a step.
SHOAL_INLINE Ahead next_block(const Linear& linear, int block, int block_end, int tile, int tiles) {
    const int share = static_cast<int>(divide_up(kLinesOfStep, tiles)), lines = std::min(share, kLinesOfStep - tile * share);
    if (block + 1 == block_end || lines <= 0) return {};
    return {linear.block(block + 1) + int64_t{tile} * share * (linear.steps() / kTileWords) * kPanel, lines};
}

template <bool HasLower>
void multiply_tiles(const GemmCall& call, int row_begin, int row_end, int block_begin, int block_end) {
    const int rows = row_end - row_begin, tiles = static_cast<int>(divide_up(rows, 2 * kTileHeight));
    const int height = static_cast<int>(divide_up(rows, tiles));
    const int upper = HasLower ? static_cast<int>(divide_up(height, 2)) : height;
    const TileShapes::Shape above{upper, kTileWords}, right{kTileWords, kTileWords};
    const TileShapes::Shape below = HasLower ? TileShapes::Shape{height - upper, kTileWords} : above;
    const TileShapes shapes({above, above, below, below, above, below, right, right});
    TileSums sums;
    for (int block = block_begin; block < block_end; ++block)
        for (int tile = 0; tile < tiles; ++tile) {
            // All are equally high. So the last may begin among rows of the one before, which are not finished again.
            const int first = row_begin + tile * height, row = std::min(first, row_end - height);
            sum_tile<HasLower>(call, row, upper, block, next_block(*call.linear, block, block_end, tile, tiles), sums);
            _tile_stored(0, &sums.sums[0][0], sizeof sums.sums[0]);
            _tile_stored(1, &sums.sums[0][kPanel], sizeof sums.sums[0]);
            if constexpr (HasLower) {
                _tile_stored(2, &sums.sums[upper][0], sizeof sums.sums[0]);
                _tile_stored(3, &sums.sums[upper][kPanel], sizeof sums.sums[0]);
            }
            sums.row = row;
            sums.block = block;
            sums.next = first - row;
            sums.end = height;
        }
    sums.finish(call, sums.end);
}

// All rows of a weight go by tile registers, or none do: so a row's result is the same beside any others.
void gemm_by_tiles(const GemmCall& call, int row_begin, int row_end, int block_begin, int block_end) {
    const Linear& linear = *call.linear;
    if (linear.format != Format::Plain || linear.dtype != Dtype::Bf16 || linear.steps() % kTileWords != 0)
        return gemm(call, row_begin, row_end, block_begin, block_end);
    if (block_begin == block_end) return;
    const int held = std::max(kLeastHeldRows, static_cast<int>(kHeldBytes / (int64_t{linear.steps()} * kWordBytes)));
    for (int row = row_begin, end; row < row_end; row = end) {
        end = row + static_cast<int>(divide_up(row_end - row, divide_up(row_end - row, held)));
        const auto multiply = end - row <= kTileHeight ? multiply_tiles<false> : multiply_tiles<true>;
        multiply(call, row, end, block_begin, block_end);
    }
}

}  // namespace SHOAL_ISA
}  // namespace shoal

#endif
