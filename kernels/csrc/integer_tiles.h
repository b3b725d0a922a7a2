// Packed matrix product with 8-bit weights, using tile registers: exact sums within a group, then its scales, as with
// vectors.
#pragma once

#if defined(__AMX_INT8__)

#include <algorithm>
#include <vector>

#include "gemm.h"
#include "tiles.h"

namespace shoal {
namespace SHOAL_ISA {

typedef uint8_t Bytes __attribute__((vector_size(64)));

constexpr int kGroupRows = kGroup / 4;       // rows of a right side: words of four inputs
constexpr int kSplitWords = 2 * kGroupRows;  // of one row of a group, split
constexpr int kLeastSplitRows = kIntegerTileRows + 1;  // fewer rows are one tile of vectors, which is faster
constexpr int kSplitTiles = 4;               // tiles that are split at once, then multiplied with each block in turn

// The 16-bit integers of rows, split into signed upper bytes and unsigned lower bytes: value = 256 * upper + lower. For
// each tile of rows and each group: every row's upper bytes, then its lower bytes, in the order of a weight's words.
class SplitRows {
public:
    SplitRows(const GemmCall& call, int row_begin, int row_end) : rows_(row_end - row_begin), groups_(call.linear->groups()) {
        words_.resize(static_cast<size_t>(divide_up(rows_, kTileHeight) * kTileHeight * groups_) * kSplitWords);
        Bytes order;
        for (int k = 0; k < kGroup; ++k) {
            const int place = k / 4 * 4 + k % 2 * 2 + k % 4 / 2;
            order[place] = static_cast<uint8_t>(2 * k + 1);
            order[kGroup + place] = static_cast<uint8_t>(2 * k);
        }
        for (int row = 0; row < rows_; ++row) {
            const Word* x = call.x + (row_begin + row) * call.x_stride;
            for (int g = 0; g < groups_; ++g, x += row_group_words(false))
                store(at(row / kTileHeight, g) + row % kTileHeight * kSplitWords, (U32)__builtin_shuffle((Bytes)load(x), order));
        }
    }
    const Word* tile(int number, int group) const { return const_cast<SplitRows*>(this)->at(number, group); }

private:
    Word* at(int tile, int group) {
        return words_.data() + (int64_t{tile} * groups_ + group) * kTileHeight * kSplitWords;
    }
    const int rows_, groups_;
    std::vector<Word> words_;
};

// The exact sums of one group: upper bytes by both panels, then lower bytes by both.
using GroupSums = int32_t[4][kTileHeight][kPanel];

// totals += sums, times the scales of the group's columns and rows.
SHOAL_INLINE void add_group(float (&totals)[kTileHeight][kBlockColumns], const GroupSums& sums, U32 scales,
                            const Word* row_scales, int64_t stride, int rows) {
    for (int j = 0; j < 2; ++j) {
        const F32 scale = half_bf16(scales, j);
        for (int i = 0; i < rows; ++i) {
            const I32 upper = (I32)load(reinterpret_cast<const Word*>(sums[j][i]));
            const I32 lower = (I32)load(reinterpret_cast<const Word*>(sums[2 + j][i]));
            const F32 part = __builtin_convertvector((upper << 8) + lower, F32) * scale;
            float* const total = &totals[i][j * kPanel];
            store(total, load(total) + part * broadcast_float(row_scales + i * stride));
        }
    }
}

// Multiplies up to 16 rows by a block. A group's sums are added to the totals while the next group's are computed.
SHOAL_INLINE void multiply_integer_tile(const GemmCall& call, const SplitRows& split, int tile, int row, int rows, int block) {
    const Linear& linear = *call.linear;
    const int groups = linear.groups();
    const int64_t group_words = linear.group_words();
    const Word* const row_scales = call.x + row * call.x_stride + kSplitWords + kRowScale;
    constexpr int64_t right_bytes = kBlockColumns * kWordBytes, left_bytes = kSplitWords * kWordBytes;
    alignas(64) float totals[kTileHeight][kBlockColumns];
    alignas(64) GroupSums sums[2];
    for (int i = 0; i < rows; ++i)
        for (int j = 0; j < 2; ++j) store(&totals[i][j * kPanel], bias_of(linear, block, j * kPanel));
    const Word* words = linear.block(block);
    const auto add = [&](int g, const Word* of) {
        add_group(totals, sums[g % 2], load(of + linear.bits() * kBlockColumns), row_scales + g * row_group_words(false),
                  call.x_stride, rows);
    };
    for (int g = 0; g < groups; ++g, words += group_words) {
        const Word* const left = split.tile(tile, g);
        GroupSums& mine = sums[g % 2];
        for (int64_t i = 0; i < group_words; i += kPanel) __builtin_prefetch(words + 2 * group_words + i, 0, 2);
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        _tile_loadd(4, left, left_bytes);
        _tile_loadd(5, left + kGroupRows, left_bytes);
        _tile_stream_loadd(6, words, right_bytes);
        _tile_stream_loadd(7, words + kPanel, right_bytes);
        _tile_dpbssd(0, 4, 6);
        _tile_dpbssd(1, 4, 7);
        _tile_dpbusd(2, 5, 6);
        _tile_dpbusd(3, 5, 7);
        if (g > 0) add(g - 1, words - group_words);
        _tile_stored(0, mine[0], sizeof mine[0][0]);
        _tile_stored(1, mine[1], sizeof mine[0][0]);
        _tile_stored(2, mine[2], sizeof mine[0][0]);
        _tile_stored(3, mine[3], sizeof mine[0][0]);
    }
    add(groups - 1, words - group_words);
    for (int i = 0; i < rows; ++i) {
        const F32 acc[1][2] = {{load(&totals[i][0]), load(&totals[i][kPanel])}};
        finish_tile<Bf16, 1>(call, row + i, block, 0, acc);
    }
}

// Gives the same bits as vectors do, which are faster for few rows.
void integers_by_tiles(const GemmCall& call, int row_begin, int row_end, int block_begin, int block_end) {
    if (row_end - row_begin < kLeastSplitRows) return gemm(call, row_begin, row_end, block_begin, block_end);
    for (int first = row_begin; first < row_end; first += kSplitTiles * kTileHeight) {
        const int end = std::min(row_end, first + kSplitTiles * kTileHeight), height = std::min(end - first, kTileHeight);
        const SplitRows split(call, first, end);
        const TileShapes::Shape sums{height, kPanel}, left{height, kGroupRows}, right{kGroupRows, kPanel};
        const TileShapes shapes({sums, sums, sums, sums, left, left, right, right});
        for (int block = block_begin; block < block_end; ++block)
            for (int row = first, tile = 0; row < end; row += kTileHeight, ++tile)
                multiply_integer_tile(call, split, tile, row, std::min(end - row, kTileHeight), block);
    }
}

}  // namespace SHOAL_ISA
}  // namespace shoal

#endif
