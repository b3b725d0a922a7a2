// bf16 weights in 12 bits each, without loss: nearly all of a tile's upper bytes, a sign and seven bits of the exponent, are
// among sixteen.
//
// A tile is 32 inputs of 16 columns, as a tile register takes it: of each pair of inputs a row, of all columns. Its top is
// the largest of its exponents' upper bits, and a value's code the sign and how far below the top its own are. Four times
// there is a line of codes and two of lower bytes, of four rows: the first two have the lower halves of the bytes of codes,
// and turns of eight bytes, so that interleaving upper and lower bytes by lanes of 16 gives rows. Where values differ more,
// for some are 0, the last code stands for no bits at all (kHasSmall). A tile that this does not cover is held as it is, and
// its top is 0.
//
// That trained weights have few exponents is from DFloat11 (Zhang et al., 2025, arXiv:2504.11651), which gives them codes by
// their frequency, of fewer bits, and needs more time for each.
#pragma once

#include "kernels.h"

namespace shoal {

constexpr int kQuarters = 4, kQuarterRows = 4;
constexpr int kRowValues = 2 * kPanel;       // of a row of a tile
constexpr int kTileRowsHeld = kQuarters * kQuarterRows;
constexpr int kLineBytes = 64;
constexpr int kQuarterLines = 3;             // codes, lower bytes of two rows, and of the other two
constexpr int kCodedBytes = kQuarters * kQuarterLines * kLineBytes;  // of a tile
constexpr int kPlainBytes = kTileRowsHeld * kRowValues * 2;
constexpr int kFarthest = 7;                 // below the top
constexpr uint8_t kSign = 0x80;              // of an upper byte
constexpr uint8_t kHasSmall = 0x80;          // beside a top: kFarthest means 0

inline int64_t tile_bytes(uint8_t top) { return top == 0 ? kPlainBytes : kCodedBytes; }

// Appends a block's tiles to `bytes` and their tops: plain [inputs / 2][32], of so many groups of inputs.
void code_block(const Word* plain, int groups, std::vector<uint8_t>& bytes, std::vector<uint8_t>& tops);
// The 32 inputs of one of its 16 columns, as bits of bf16.
void decode_column(const uint8_t* tile, uint8_t top, int column, uint16_t* out);

}  // namespace shoal
