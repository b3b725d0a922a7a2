// Packed matrix product by tile registers: two by two of them hold up to 32 rows of one block of 32 columns.
#pragma once

#if defined(__AMX_BF16__)

#include <algorithm>

#include "coded_tiles.h"
#include "gemm.h"
#include "integer_tiles.h"
#include "tiles.h"

namespace shoal {
namespace SHOAL_ISA {

// Of a weight block: what one step of a tile is decoded from, and a little for tiles that are held as they are.
constexpr int kLinesOfStep = 2 * kCodedBytes / kLineBytes + 1;
// Steps between decoding and use: tile registers are loaded from what has left the store buffer.
constexpr int kDecodedAhead = 2;
// Steps of a part of a block that the first-level cache keeps for all rows, while their own values pass by it.
constexpr int kPartSteps = 18;
// Left sides that are met by all of a call's blocks, one after the other: the second-level cache holds them. The first is
// worth more than the second: with fewer rows, weights do not come fast enough.
constexpr int64_t kHeldBytes = 1 << 20;
constexpr int kLeastHeldRows = 128;
constexpr int kMostHeldRows = 640;
// So many are worth code of their own.
constexpr int kManyRows = 192;

constexpr int kMostTileRows = 2 * kTileHeight;
static_assert(kMostHeldRows % kMostTileRows == 0);
using TileSums = float[kMostTileRows][kBlockColumns];

// What becomes of a row of sums: of any weight,
struct AnyColumns {
    static constexpr bool kAreMany = false;
    static SHOAL_INLINE void finish(const GemmCall& call, int row, int block, const float* sums) {
        F32 acc[1][2];
        for (int j = 0; j < 2; ++j) acc[0][j] = load(sums + j * kPanel) + bias_of(*call.linear, block, j * kPanel);
        finish_tile<Bf16, 1>(call, row, block, 0, acc);
    }
};

// and of many rows of whole columns without bias: looking that up for each shows. Zero is added as if it were
// the bias, for the same bits; and rows that are stored as they are loaded take longer than those that something is added to.
template <Finish kFinish>
struct PlainColumns {
    static constexpr bool kAreMany = true;
    static SHOAL_INLINE void finish(const GemmCall& call, int row, int block, const float* sums) {
        const F32 acc[1][2] = {{load(sums) + F32{}, load(sums + kPanel) + F32{}}};
        finish_columns<Bf16, 1, kFinish>(call, row, block, 0, acc);
    }
};

// Complete sums of a tile, whose rows are finished while those of the next are being summed.
template <class Columns>
struct Unfinished {
    const TileSums* sums = nullptr;
    int row = 0, block = 0, next = 0, end = 0;  // of the call's rows the one of the first sums; of sums those to be finished

    SHOAL_INLINE void finish(const GemmCall& call, int count) {
        for (const int stop = std::min(end, next + count); next < stop; ++next)
            Columns::finish(call, row + next, block, (*sums)[next]);
    }
};

// Steps [first, end) of a block's sums.
struct Part {
    int block, first, end;
};

// The steps of a call's blocks, decoded while those before them are multiplied: of rows that one tile holds. A row's sums wait
// for memory: what is decoded is asked for far ahead, past the call's last block, too, for there the thread mostly goes on.
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

// A part's steps, decoded by its first tile and kept for the others. Each asks for a share of what the next part is made of.
template <bool kDecodes>
struct HeldRights {
    Codes& codes;
    StepTiles* steps;
    int count;
    const uint8_t* asked;
    int lines;  // that are asked for at a step

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

// The sums of the first `upper` rows from `row` on, and of those after them if there are any, go on by a part, from zero at
// the first. Meanwhile those before are finished.
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
        constexpr bool amid = HasLower && Columns::kAreMany;  // so registers wait less; of few rows they would wait more
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

// Two by two registers of `height` rows, or two of as many.
template <bool HasLower>
TileShapes shapes_of(int upper, int height) {
    const TileShapes::Shape above{upper, kTileWords}, right{kTileWords, kTileWords};
    const TileShapes::Shape below = HasLower ? TileShapes::Shape{height - upper, kTileWords} : above;
    return TileShapes({above, above, below, below, above, below, right, right});
}

// Rows of one tile.
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

// Rows of several: a part of a block is decoded once for all.
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
                // All are equally high. So the last may begin among rows of the one before, which are not finished again.
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
    if (call.finish == Finish::Add) return multiply_tiles<PlainColumns<Finish::Add>>;
    return multiply_tiles<PlainColumns<Finish::Store>>;
}

// All rows of a bf16 weight go by tile registers, or none do: so a row's result is the same beside any others.
void gemm_by_tiles(const GemmCall& call, int row_begin, int row_end, int block_begin, int block_end) {
    const Linear& linear = *call.linear;
    if (linear.format == Format::Int8) return integers_by_tiles(call, row_begin, row_end, block_begin, block_end);
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
