// Lossless coding of bf16 weights in 12 bits each: in nearly every tile, the upper bytes (the sign and seven bits of
// the exponent) take no more than sixteen values.
//
// A tile is 32 inputs of 16 columns, laid out for a tile register: one row per pair of inputs, with all columns. Its
// top is the largest of its exponents' upper bits; the code of a value is its sign and how far its own upper bits are
// below the top. A coded tile has four quarters of four rows, each with one line of codes and two lines of lower bytes
// (one per two rows). The codes of the first two rows are in the lower halves of the bytes, those of the other two in
// the upper halves. Two rows alternate every eight bytes, so that interleaving upper and lower bytes within 16-byte
// lanes gives whole rows. If exponents differ by more because some values are 0, the last code stands for upper bits of
// 0 (kHasSmall). A tile that this does not cover is stored as it is, with a top of 0.
//
// That trained weights have few exponents is from DFloat11 (Zhang et al., 2025, arXiv:2504.11651), which codes them by
// frequency: its codes have fewer bits, but take more time to decode.
#pragma once

#include "kernels.h"

namespace shoal {

constexpr int kQuarters = 4, kQuarterRows = 4;
constexpr int kRowValues = 2 * kPanel;       // values in a row of a tile
constexpr int kTileRowsHeld = kQuarters * kQuarterRows;
constexpr int kLineBytes = 64;
constexpr int kQuarterLines = 3;             // codes, lower bytes of two rows, and of the other two
constexpr int kCodedBytes = kQuarters * kQuarterLines * kLineBytes;  // per tile
constexpr int kPlainBytes = kTileRowsHeld * kRowValues * 2;
constexpr int kFarthest = 7;                 // largest distance below the top
constexpr uint8_t kSign = 0x80;              // in an upper byte
constexpr uint8_t kHasSmall = 0x80;          // flag in a top: kFarthest means upper bits of 0

inline int64_t tile_bytes(uint8_t top) { return top == 0 ? kPlainBytes : kCodedBytes; }

// Appends the tiles of a block, plain [inputs / 2][32] with `groups` groups of inputs, to `bytes`, and their tops to
// `tops`.
void code_block(const Word* plain, int groups, std::vector<uint8_t>& bytes, std::vector<uint8_t>& tops);
// Decodes the 32 inputs of one of a tile's 16 columns to bf16 bits.
void decode_column(const uint8_t* tile, uint8_t top, int column, uint16_t* out);

}  // namespace shoal
