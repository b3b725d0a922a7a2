// Decodes coded weights (coded.h) to bf16, for tile registers.
#pragma once

#if defined(__AMX_BF16__)

#include "coded.h"
#include "simd.h"

namespace shoal {
namespace SHOAL_ISA {

// One step of a block: two tiles.
struct alignas(kLineBytes) StepTiles {
    Word tiles[2][kTileRowsHeld * kPanel];
};

// Where decoding is bound by memory, data is prefetched twice before it is decoded: first into the L2 cache, then into
// L1.
constexpr int kAskedFar = 8192, kAskedNear = 512;  // bytes ahead

SHOAL_INLINE void ask_for(const uint8_t* line) {
    __builtin_prefetch(line + kAskedFar, 0, 2);
    __builtin_prefetch(line + kAskedNear, 0, 3);
}

// The upper byte of each code, repeated four times: a byte of two codes then is an index into 64 entries, by its lower
// six bits, of which the lower four are a code.
SHOAL_INLINE __m512i uppers_of(uint8_t top) {
    constexpr int64_t kBelow = 0x0706050403020100, kSigns = static_cast<int64_t>(0x8080808080808080);
    const __m512i below = _mm512_set1_epi64(kBelow), signs = _mm512_set_epi64(kSigns, 0, kSigns, 0, kSigns, 0, kSigns, 0);
    const __mmask64 is_upper = ~(static_cast<uint64_t>(top >> 7) * static_cast<uint64_t>(kSigns));
    const __m512i highest = _mm512_set1_epi8(static_cast<char>(top & ~kHasSmall));
    return _mm512_or_si512(_mm512_maskz_sub_epi8(is_upper, highest, below), signs);
}

// Decodes the tiles of a call's blocks one after the other.
class Codes {
public:
    Codes(const Linear& linear, int block_begin, int block_end)
        : next_(reinterpret_cast<const uint8_t*>(linear.block(block_begin))),
          top_(linear.tops_of(block_begin)),
          end_(linear.tops_of(block_end)) {}

    const uint8_t* next() const { return next_; }

    // Decodes the next step, if there is one.
    template <bool Asks>
    SHOAL_INLINE void decode(StepTiles& out) {
        if (top_ == end_) return;
#pragma GCC unroll 2
        for (int j = 0; j < 2; ++j) decode_tile<Asks>(out.tiles[j]);
    }

private:
    template <bool Asks>
    SHOAL_INLINE void decode_tile(Word* out) {
        const uint8_t top = *top_++;
        if (__builtin_expect(top == 0, 0)) {
            for (int r = 0; r < kTileRowsHeld; ++r, next_ += kLineBytes, out += kPanel) {
                if constexpr (Asks) ask_for(next_);
                _mm512_store_si512(out, _mm512_load_si512(next_));
            }
            return;
        }
        const __m512i uppers = uppers_of(top);
#pragma GCC unroll 4
        for (int q = 0; q < kQuarters; ++q) {
            __m512i lines[kQuarterLines];
#pragma GCC unroll 3
            for (int i = 0; i < kQuarterLines; ++i, next_ += kLineBytes) {
                if constexpr (Asks) ask_for(next_);
                lines[i] = _mm512_load_si512(next_);
            }
#pragma GCC unroll 2
            for (int i = 0; i < 2; ++i, out += 2 * kPanel) {
                const __m512i codes = i == 0 ? lines[0] : _mm512_srli_epi16(lines[0], 4), lower = lines[1 + i];
                const __m512i upper = _mm512_maskz_permutexvar_epi8(~__mmask64{0}, codes, uppers);
                _mm512_store_si512(out, _mm512_unpacklo_epi8(lower, upper));
                _mm512_store_si512(out + kPanel, _mm512_unpackhi_epi8(lower, upper));
            }
        }
    }

    const uint8_t* next_;
    const uint8_t* top_;
    const uint8_t* const end_;
};

}  // namespace SHOAL_ISA
}  // namespace shoal

#endif
