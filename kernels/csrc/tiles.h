// Tile registers (Intel AMX: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18).
//
// One holds up to 16 rows of 64 bytes: as a left side rows of 32 bf16 values, as a right side 16 columns of 32 inputs in
// pairs, which is how a KV page lies and a coded weight once it is decoded; as sums 16 float32 a row. A row's sums come in one order, whatever
// rows it shares its registers with.
#pragma once

#if defined(__AMX_BF16__)

#include "simd.h"

namespace shoal {
namespace SHOAL_ISA {

constexpr int kTileHeight = 16;  // rows of a register
constexpr int kTileWords = 16;   // of a row
constexpr int kWordBytes = sizeof(Word);

// Stores before this are there for loads of registers after it, of which compilers are not told that they read memory.
SHOAL_INLINE void make_stores() { asm volatile("" ::: "memory"); }

// What the calling thread's registers hold, until the end of this one's life.
class TileShapes {
public:
    struct Shape {
        int rows, words;  // words: of a row
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
