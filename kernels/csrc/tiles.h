// Tile registers (Intel AMX: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18).
//
// A register holds up to 16 rows of 64 bytes: as a left side, rows of 32 bf16 values; as a right side, 16 columns of 32
// inputs in pairs, which is the layout of a KV page and of a decoded weight; as sums, 16 float32 per row. A row is
// summed in one order, whatever rows share its registers.
#pragma once

#if defined(__AMX_BF16__)

#include "simd.h"

namespace shoal {
namespace SHOAL_ISA {

constexpr int kTileHeight = 16;  // rows of a register
constexpr int kTileWords = 16;   // words of a row
constexpr int kWordBytes = sizeof(Word);

// Makes earlier stores visible to later loads of tile registers: compilers are not told that these read memory.
SHOAL_INLINE void make_stores() { asm volatile("" ::: "memory"); }

// The shapes of the calling thread's tile registers, during the lifetime of this object.
class TileShapes {
public:
    struct Shape {
        int rows, words;  // words: per row
    };
    explicit TileShapes(const Shape (&shapes)[8]) {
        for (int i = 0; i < 8; ++i) {
            layout_.rows[i] = static_cast<uint8_t>(shapes[i].rows);
            layout_.row_bytes[i] = static_cast<uint16_t>(shapes[i].rows == 0 ? 0 : shapes[i].words * kWordBytes);
        }
        make_stores();
        _tile_loadconfig(&layout_);
    }
    ~TileShapes() { _tile_release(); }
    TileShapes(const TileShapes&) = delete;
    TileShapes& operator=(const TileShapes&) = delete;

private:
    struct alignas(64) {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};
    } layout_;
};

}  // namespace SHOAL_ISA
}  // namespace shoal

#endif
