// Packed matrix product using tile registers: 2 x 2 of them hold the sums of up to 32 rows by one block of 32 columns.
#pragma once

#if defined(__AMX_BF16__)

#include <algorithm>

#include "coded_tiles.h"
#include "gemm.h"
#include "integer_tiles.h"
#include "tiles.h"

namespace shoal {
namespace SHOAL_ISA {

// Lines of a weight block from which one step is decoded, and a little more for tiles that are stored as they are.
constexpr int kLinesOfStep = 2 * kCodedBytes / kLineBytes + 1;
// Steps between decoding and use: tile registers can only be loaded from stores that have left the store buffer.
constexpr int kDecodedAhead = 2;
// Steps in a part of a block. The L1 cache keeps a decoded part for all rows, while the rows' own values bypass it.
constexpr int kPartSteps = 18;
// Rows that all blocks of a call are multiplied with, one block after the other, so that the L2 cache holds them: as
// many as fit kHeldBytes, within these limits. With fewer than kLeastHeldRows, weights do not arrive fast enough.
constexpr int64_t kHeldBytes = 1 << 20;
constexpr int kLeastHeldRows = 128;
constexpr int kMostHeldRows = 640;
// This many rows are worth specialised code (PlainColumns).
constexpr int kManyRows = 192;

constexpr int kMostTileRows = 2 * kTileHeight;
static_assert(kMostHeldRows % kMostTileRows == 0);
using TileSums = float[kMostTileRows][kBlockColumns];

// Finishes a row of sums, for any weight.
struct AnyColumns {
    static constexpr bool kAreMany = false;
    static SHOAL_INLINE void finish(const GemmCall& call, int row, int block, const float* sums) {
        F32 acc[1][2];
        for (int j = 0; j < 2; ++j) acc[0][j] = load(sums + j * kPanel) + bias_of(*call.linear, block, j * kPanel);
        finish_tile<Bf16, 1>(call, row, block, 0, acc);
    }
};

// The same for many rows of whole columns without bias, where looking up the bias for each row would show. Zero is
// added instead, to give the same bits; and storing rows as loaded takes longer than adding something to them.
template <Finish kFinish>
struct PlainColumns {
    static constexpr bool kAreMany = true;
    static SHOAL_INLINE void finish(const GemmCall& call, int row, int block, const float* sums) {
        const F32 acc[1][2] = {{load(sums) + F32{}, load(sums + kPanel) + F32{}}};
        finish_columns<Bf16, 1, kFinish>(call, row, block, 0, acc);
    }
};

// The complete sums of a tile, whose rows are finished while the next tile is being summed.
template <class Columns>
struct Unfinished {
    const TileSums* sums = nullptr;
    // The first sums are of row `row` of the call; those of [next, end) are still to be finished.
    int row = 0, block = 0, next = 0, end = 0;

    SHOAL_INLINE void finish(const GemmCall& call, int count) {
        for (const int stop = std::min(end, next + count); next < stop; ++next)
            Columns::finish(call, row + next, block, (*sums)[next]);
    }
};

// Steps [first, end) of a block's sums.
struct Part {
    int block, first, end;
};

// The right-hand sides for rows that fit one tile: the steps of a call's blocks, each decoded while earlier ones are
// being multiplied. With so few rows the product is bound by memory, so coded data is prefetched far ahead: even past
// the call's last block, where the thread usually continues.
class StreamedRights {
public:
    StreamedRights(const Linear& linear, int block_begin, int block_end) : codes_(linear, block_begin, block_end) {
        for (int s = 0; s < kDecodedAhead; ++s) codes_.decode<true>(steps_[s]);
    }
    SHOAL_INLINE const StepTiles& step(int) const { return steps_[number_ % kHeldSteps]; }
    SHOAL_INLINE void go_on(int) { codes_.decode<true>(steps_[(number_++ + kDecodedAhead) % kHeldSteps]); }

private:
    static constexpr unsigned kHeldSteps = 4;
    Codes codes_;
    unsigned number_ = 0;
    StepTiles steps_[kHeldSteps];
};

// The steps of a part, decoded by its first tile and kept for the others. Each tile prefetches a share of the next
// part.
template <bool kDecodes>
struct HeldRights {
    Codes& codes;
    StepTiles* steps;
    int count;
    const uint8_t* asked;
    int lines;  // prefetched per step

    SHOAL_INLINE const StepTiles& step(int s) {
        if (kDecodes && s == 0)
            for (int i = 0; i < std::min(count, kDecodedAhead); ++i) codes.decode<false>(steps[i]);
        return steps[s];
    }
    SHOAL_INLINE void go_on(int s) {
        for (int i = 0; i < lines; ++i, asked += kLineBytes) __builtin_prefetch(asked, 0, 2);
        if (kDecodes && s + kDecodedAhead < count) codes.decode<false>(steps[s + kDecodedAhead]);
    }
};

// Adds a part to the sums of the first `upper` rows from `row` on, and of the rows after them if HasLower; the first
// part starts from zero. Meanwhile, the sums in `before` are finished.
template <bool HasLower, class Rights, class Columns>
SHOAL_INLINE void sum_tile(const GemmCall& call, int row, int upper, const Part& part, TileSums& sums, Rights& rights,
                           Unfinished<Columns>& before) {
    const Word* const left = call.x + row * call.x_stride;
    const Word* const lower = left + upper * call.x_stride;
    const int64_t left_bytes = call.x_stride * kWordBytes;
    constexpr int64_t right_bytes = kPanel * kWordBytes;
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
    for (int s = part.first; s < part.end; ++s) {
        const StepTiles& right = rights.step(s - part.first);
        make_stores();
        _tile_loadd(6, right.tiles[0], right_bytes);
        _tile_loadd(7, right.tiles[1], right_bytes);
        _tile_stream_loadd(4, left + s * kTileWords, left_bytes);
        constexpr bool amid = HasLower && Columns::kAreMany;  // registers then wait less (with few rows: more)
        if constexpr (amid) _tile_stream_loadd(5, lower + s * kTileWords, left_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (amid) before.finish(call, each);
        if constexpr (HasLower) {
            if constexpr (!amid) _tile_stream_loadd(5, lower + s * kTileWords, left_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        rights.go_on(s - part.first);
        if constexpr (!amid) before.finish(call, each);
    }
    before.finish(call, before.end);
    _tile_stored(0, &sums[0][0], sizeof sums[0]);
    _tile_stored(1, &sums[0][kPanel], sizeof sums[0]);
    if constexpr (HasLower) {
        _tile_stored(2, &sums[upper][0], sizeof sums[0]);
        _tile_stored(3, &sums[upper][kPanel], sizeof sums[0]);
    }
}

// Shapes for 2 x 2 registers of sums with `height` rows in all, the first `upper` of them in the upper ones; or for the
// upper two alone.
template <bool HasLower>
TileShapes shapes_of(int upper, int height) {
    const TileShapes::Shape above{upper, kTileWords}, right{kTileWords, kTileWords};
    const TileShapes::Shape below = HasLower ? TileShapes::Shape{height - upper, kTileWords} : above;
    return TileShapes({above, above, below, below, above, below, right, right});
}

// Multiplies rows that fit one tile.
template <bool HasLower>
void multiply_tile(const GemmCall& call, int row_begin, int row_end, int block_begin, int block_end) {
    const int height = row_end - row_begin, upper = HasLower ? static_cast<int>(divide_up(height, 2)) : height;
    const TileShapes shapes = shapes_of<HasLower>(upper, height);
    alignas(64) TileSums sums;
    StreamedRights rights(*call.linear, block_begin, block_end);
    Unfinished<AnyColumns> before;
    for (int block = block_begin; block < block_end; ++block) {
        sum_tile<HasLower>(call, row_begin, upper, {block, 0, call.linear->groups()}, sums, rights, before);
        before = {&sums, row_begin, block, 0, height};
    }
    before.finish(call, before.end);
}

// Multiplies rows of several tiles: each part of a block is decoded once for all of them.
template <class Columns>
void multiply_tiles(const GemmCall& call, int row_begin, int row_end, int block_begin, int block_end) {
    const int rows = row_end - row_begin, tiles = static_cast<int>(divide_up(rows, kMostTileRows));
    const int height = static_cast<int>(divide_up(rows, tiles)), upper = static_cast<int>(divide_up(height, 2));
    const TileShapes shapes = shapes_of<true>(upper, height);
    const int steps = call.linear->groups(), parts = static_cast<int>(divide_up(steps, kPartSteps));
    const int share = static_cast<int>(divide_up(kLinesOfStep, tiles));
    alignas(64) TileSums sums[kMostHeldRows / kMostTileRows];
    StepTiles decoded[kPartSteps];
    Codes codes(*call.linear, block_begin, block_end);
    Unfinished<Columns> before;
    for (int block = block_begin; block < block_end; ++block)
        for (int p = 0; p < parts; ++p) {
            const Part part{block, steps * p / parts, steps * (p + 1) / parts};
            const int count = part.end - part.first;
            const uint8_t* const following = codes.next() + int64_t{kLinesOfStep} * count * kLineBytes;
            for (int tile = 0; tile < tiles; ++tile) {
                // All tiles have the same height, so the last may overlap the one before; common rows are finished
                // once.
                const int first = row_begin + tile * height, row = std::min(first, row_end - height);
                TileSums& mine = sums[parts == 1 ? 0 : tile];
                const int skipped = tile * share, lines = std::min(share, kLinesOfStep - skipped);
                const uint8_t* const asked = following + int64_t{skipped} * count * kLineBytes;
                if (tile == 0) {
                    HeldRights<true> rights{codes, decoded, count, asked, lines};
                    sum_tile<true>(call, row, upper, part, mine, rights, before);
                } else {
                    HeldRights<false> rights{codes, decoded, count, asked, lines};
                    sum_tile<true>(call, row, upper, part, mine, rights, before);
                }
                if (p + 1 == parts) before = {&mine, row, block, first - row, height};
            }
        }
    before.finish(call, before.end);
}

using Multiply = void (*)(const GemmCall& call, int row_begin, int row_end, int block_begin, int block_end);

Multiply multiply_of(const GemmCall& call, int rows, int block_end) {
    if (rows <= kTileHeight) return multiply_tile<false>;
    if (rows <= kMostTileRows) return multiply_tile<true>;
    if (rows < kManyRows || !call.linear->bias.empty() || !are_whole(call, block_end)) return multiply_tiles<AnyColumns>;
    if (call.finish == Finish::SwiGlu) return multiply_tiles<PlainColumns<Finish::SwiGlu>>;
    if (call.finish == Finish::GeGlu) return multiply_tiles<PlainColumns<Finish::GeGlu>>;
    if (call.finish == Finish::Add) return multiply_tiles<PlainColumns<Finish::Add>>;
    return multiply_tiles<PlainColumns<Finish::Store>>;
}

// For a bf16 weight either all rows use tile registers or none do, so that a row's result does not depend on the
// others.
void gemm_by_tiles(const GemmCall& call, int row_begin, int row_end, int block_begin, int block_end) {
    const Linear& linear = *call.linear;
    if (linear.format == Format::Int8 && !holds_bytes(linear))
        return integers_by_tiles(call, row_begin, row_end, block_begin, block_end);
    if (linear.format != Format::Coded) return gemm(call, row_begin, row_end, block_begin, block_end);
    if (block_begin == block_end) return;
    const int64_t fitting = kHeldBytes / (int64_t{linear.steps()} * kWordBytes);
    const int held = static_cast<int>(std::clamp<int64_t>(fitting, kLeastHeldRows, kMostHeldRows));
    for (int row = row_begin, end; row < row_end; row = end) {
        end = row + static_cast<int>(divide_up(row_end - row, divide_up(row_end - row, held)));
        multiply_of(call, end - row, block_end)(call, row, end, block_begin, block_end);
    }
}

}  // namespace SHOAL_ISA
}  // namespace shoal

#endif
