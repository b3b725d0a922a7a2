#include "coded.h"

#include <algorithm>
#include <cstring>

namespace shoal {

namespace {

using Rows = uint16_t[kTileRowsHeld][kRowValues];
constexpr int kRun = 8;  // values of a row whose bytes are contiguous

// Where a run of a row is within its quarter: the offsets of its codes and of its lower bytes, and by how much its
// codes are shifted (each byte of codes has two halves).
struct Place {
    int codes, lower, shift;

    Place(int row, int run) {
        const int pair = row % kQuarterRows / 2;
        codes = (run * 2 + row % 2) * kRun;
        lower = (1 + pair) * kLineBytes + codes;
        shift = 4 * pair;
    }
};

int quarter_begin(int row) { return row / kQuarterRows * kQuarterLines * kLineBytes; }

int upper_of(uint16_t value) { return value >> 8 & ~kSign; }

// The tile's top, with kHasSmall if it is needed; 0 if no code covers the tile.
uint8_t top_of(const Rows& rows) {
    uint16_t top = 0, least = 0xff, least_but_zero = 0xff;
    for (const auto& row : rows)
        for (const uint16_t value : row) {
            const auto upper = static_cast<uint16_t>(upper_of(value));
            top = std::max(top, upper);
            least = std::min(least, upper);
            least_but_zero = std::min(least_but_zero, upper == 0 ? uint16_t{0xff} : upper);
        }
    if (top == 0) return kHasSmall;
    if (top - least <= kFarthest) return static_cast<uint8_t>(top);
    return top - least_but_zero < kFarthest ? static_cast<uint8_t>(top | kHasSmall) : 0;
}

// Codes a tile into zeroed bytes. Exponent bits that are too far below the top are 0, which kFarthest means with
// kHasSmall.
void code_tile(const Rows& rows, uint8_t top, uint8_t* out) {
    const int highest = top & ~kHasSmall;
    for (int r = 0; r < kTileRowsHeld; ++r) {
        uint8_t* const quarter = out + quarter_begin(r);
        for (int run = 0; run < kRowValues / kRun; ++run) {
            const Place place(r, run);
            for (int i = 0; i < kRun; ++i) {
                const uint16_t value = rows[r][run * kRun + i];
                const int code = std::min(highest - upper_of(value), kFarthest) | value >> 15 << 3;
                quarter[place.codes + i] |= static_cast<uint8_t>(code << place.shift);
                quarter[place.lower + i] = static_cast<uint8_t>(value);
            }
        }
    }
}

}  // namespace

void code_block(const Word* plain, int groups, std::vector<uint8_t>& bytes, std::vector<uint8_t>& tops) {
    for (int g = 0; g < groups; ++g, plain += kGroup / 2 * kBlockColumns)
        for (int half = 0; half < 2; ++half) {
            Rows rows;
            for (int r = 0; r < kTileRowsHeld; ++r)
                std::memcpy(rows[r], plain + r * kBlockColumns + half * kPanel, sizeof rows[r]);
            const uint8_t top = top_of(rows);
            const size_t begin = bytes.size();
            bytes.resize(begin + tile_bytes(top));
            if (top == 0)
                std::memcpy(&bytes[begin], rows, sizeof rows);
            else
                code_tile(rows, top, &bytes[begin]);
            tops.push_back(top);
        }
}

void decode_column(const uint8_t* tile, uint8_t top, int column, uint16_t* out) {
    const int first = 2 * column;
    if (top == 0) {
        for (int r = 0; r < kTileRowsHeld; ++r) std::memcpy(out + 2 * r, tile + (r * kRowValues + first) * 2, 4);
        return;
    }
    uint16_t uppers[16];
    for (int code = 0; code < 16; ++code) {
        const int below = code & kFarthest, is_small = (top & kHasSmall) != 0 && below == kFarthest;
        uppers[code] = static_cast<uint16_t>((code >> 3) << 15 | (is_small ? 0 : ((top & ~kHasSmall) - below) & 0x7f) << 8);
    }
    for (int r = 0; r < kTileRowsHeld; ++r) {
        const uint8_t* const quarter = tile + quarter_begin(r);
        const Place place(r, first / kRun);
        for (int i = first % kRun; i < first % kRun + 2; ++i)
            *out++ = uppers[quarter[place.codes + i] >> place.shift & 15] | quarter[place.lower + i];
    }
}

}  // namespace shoal
