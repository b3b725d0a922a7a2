// Packed matrix product by tile registers: two by two of them hold up to 32 rows of one block of 32 columns.
#pragma once

#if defined(__AMX_BF16__)

#include <algorithm>

#include "gemm.h"
#include "integer_tiles.h"
#include "tiles.h"

namespace shoal {
namespace SHOAL_ISA {

constexpr int kLinesOfStep = kTileWords * kBlockColumns / kPanel;  // of a weight block: what one step of a tile reads
// Steps of a part of a block that the first-level cache keeps for all rows, while their own values pass by it.
constexpr int kPartSteps = 18;
// Left sides that are met by all of a call's blocks, one after the other: the second-level cache holds them. The first is
// worth more than the second: with fewer rows, weights do not come fast enough.
constexpr int64_t kHeldBytes = 1 << 20;
constexpr int kLeastHeldRows = 128;
constexpr int kMostHeldRows = 512;

constexpr int kMostTileRows = 2 * kTileHeight;
// So few rows wait for weights alone, which then come as fast as memory gives them: each line asked for half a step ahead, so
// that the first ones of a new page have come when its others are asked for, and kept out of the first-level cache, where
// rows and sums would otherwise wait behind what comes from memory. With more rows, finishing them takes what that gains.
constexpr int kStreamedTileRows = 8;
constexpr int kStreamedAhead = kLinesOfStep / 2 * kPanel;  // words
using TileSums = float[kMostTileRows][kBlockColumns];

// Complete sums of a tile, whose rows are finished while those of the next are being summed.
struct Unfinished {
    const TileSums* sums = nullptr;
    int row = 0, block = 0, next = 0, end = 0;  // of the call's rows the one of the first sums; of sums those to be finished

    SHOAL_INLINE void finish(const GemmCall& call, int count) {
        for (const int stop = std::min(end, next + count); next < stop; ++next) {
            F32 acc[1][2];
            for (int j = 0; j < 2; ++j) acc[0][j] = load(&(*sums)[next][j * kPanel]) + bias_of(*call.linear, block, j * kPanel);
            finish_tile<Bf16, 1>(call, row + next, block, 0, acc);
        }
    }
};

// Steps [first, end) of a block's sums.
struct Part {
    int block, first, end;
};

enum class Rights { Streamed, Held };  // whether a block of the weight is met by one tile of a few rows, or by more

SHOAL_INLINE void fetch_step(const Word* words) {
#pragma GCC unroll 32
    for (int i = 0; i < kLinesOfStep; ++i) __builtin_prefetch(words + i * kPanel, 0, 2);
}

// The sums of the first `upper` rows from `row` on, and of those after them if there are any, go on by a part, from zero at
// the first. Meanwhile those before are finished.
template <bool HasLower, Rights kRights>
SHOAL_INLINE void sum_tile(const GemmCall& call, int row, int upper, const Part& part, TileSums& sums, const Ahead& ahead,
                           Unfinished& before) {
    const Word* right = call.linear->block(part.block) + int64_t{part.first} * kTileWords * kBlockColumns;
    const Word* const left = call.x + row * call.x_stride;
    const Word* const lower = left + upper * call.x_stride;
    const int64_t left_bytes = call.x_stride * kWordBytes, right_bytes = kBlockColumns * kWordBytes;
    const int each = static_cast<int>(divide_up(before.end - before.next, part.end - part.first));
    if (part.first == 0) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, &sums[0][0], sizeof sums[0]);
        _tile_loadd(1, &sums[0][kPanel], sizeof sums[0]);
        if constexpr (HasLower) {
            _tile_loadd(2, &sums[upper][0], sizeof sums[0]);
            _tile_loadd(3, &sums[upper][kPanel], sizeof sums[0]);
        }
    }
    const Word* fetched = ahead.words;
    for (int s = part.first; s < part.end; ++s, right += kTileWords * kBlockColumns) {
        if constexpr (kRights == Rights::Streamed) {
            fetch_step(right + kStreamedAhead);
            _tile_stream_loadd(6, right, right_bytes);
            _tile_stream_loadd(7, right + kPanel, right_bytes);
        } else {
            _tile_loadd(6, right, right_bytes);
            _tile_loadd(7, right + kPanel, right_bytes);
        }
        _tile_stream_loadd(4, left + s * kTileWords, left_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (HasLower) {
            _tile_stream_loadd(5, lower + s * kTileWords, left_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        if constexpr (kRights == Rights::Held)
            for (int i = 0; i < ahead.lines; ++i, fetched += kPanel) __builtin_prefetch(fetched, 0, 2);
        before.finish(call, each);
    }
    before.finish(call, before.end);
    _tile_stored(0, &sums[0][0], sizeof sums[0]);
    _tile_stored(1, &sums[0][kPanel], sizeof sums[0]);
    if constexpr (HasLower) {
        _tile_stored(2, &sums[upper][0], sizeof sums[0]);
        _tile_stored(3, &sums[upper][kPanel], sizeof sums[0]);
    }
}

// What a tile fetches, a few lines a step, of as much as all of a part's tiles read: what follows the part, if anything does.
SHOAL_INLINE Ahead what_follows(const Linear& linear, const Part& part, int block_end, int tile, int tiles) {
    const int share = static_cast<int>(divide_up(kLinesOfStep, tiles)), lines = std::min(share, kLinesOfStep - tile * share);
    const bool is_last = part.block + 1 == block_end && (part.end == linear.steps() / kTileWords);
    if (is_last || lines <= 0) return {};
    const Word* const next = linear.block(part.block) + int64_t{part.end} * kTileWords * kBlockColumns;
    return {next + int64_t{tile} * share * (part.end - part.first) * kPanel, lines};
}

template <bool HasLower, Rights kRights>
void multiply_tiles(const GemmCall& call, int row_begin, int row_end, int block_begin, int block_end) {
    const int rows = row_end - row_begin, tiles = static_cast<int>(divide_up(rows, kMostTileRows));
    const int height = static_cast<int>(divide_up(rows, tiles));
    const int upper = HasLower ? static_cast<int>(divide_up(height, 2)) : height;
    const TileShapes::Shape above{upper, kTileWords}, right{kTileWords, kTileWords};
    const TileShapes::Shape below = HasLower ? TileShapes::Shape{height - upper, kTileWords} : above;
    const TileShapes shapes({above, above, below, below, above, below, right, right});
    const int steps = call.linear->steps() / kTileWords;
    const int parts = tiles == 1 ? 1 : static_cast<int>(divide_up(steps, kPartSteps));
    alignas(64) TileSums sums[kMostHeldRows / kMostTileRows];
    Unfinished before;
    for (int block = block_begin; block < block_end; ++block)
        for (int p = 0; p < parts; ++p) {
            const Part part{block, steps * p / parts, steps * (p + 1) / parts};
            for (int tile = 0; tile < tiles; ++tile) {
                // All are equally high. So the last may begin among rows of the one before, which are not finished again.
                const int first = row_begin + tile * height, row = std::min(first, row_end - height);
                TileSums& mine = sums[parts == 1 ? 0 : tile];
                const Ahead ahead = what_follows(*call.linear, part, block_end, tile, tiles);
                sum_tile<HasLower, kRights>(call, row, upper, part, mine, ahead, before);
                if (p + 1 == parts) before = {&mine, row, block, first - row, height};
            }
        }
    before.finish(call, before.end);
}

// All rows of a bf16 weight go by tile registers, or none do: so a row's result is the same beside any others.
void gemm_by_tiles(const GemmCall& call, int row_begin, int row_end, int block_begin, int block_end) {
    const Linear& linear = *call.linear;
    if (linear.format == Format::Int8) return integers_by_tiles(call, row_begin, row_end, block_begin, block_end);
    if (linear.format != Format::Plain || linear.dtype != Dtype::Bf16 || linear.steps() % kTileWords != 0)
        return gemm(call, row_begin, row_end, block_begin, block_end);
    if (block_begin == block_end) return;
    const int64_t fitting = kHeldBytes / (int64_t{linear.steps()} * kWordBytes);
    const int held = static_cast<int>(std::clamp<int64_t>(fitting, kLeastHeldRows, kMostHeldRows));
    for (int row = row_begin, end; row < row_end; row = end) {
        end = row + static_cast<int>(divide_up(row_end - row, divide_up(row_end - row, held)));
        const int rows = end - row;
        const auto multiply = rows <= kStreamedTileRows ? multiply_tiles<false, Rights::Streamed>
                              : rows <= kTileHeight     ? multiply_tiles<false, Rights::Held>
                                                        : multiply_tiles<true, Rights::Held>;
        multiply(call, row, end, block_begin, block_end);
    }
}

}  // namespace SHOAL_ISA
}  // namespace shoal

#endif
