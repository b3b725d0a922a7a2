// Sums of products of integers: exact within a group, then scaled. And how rows become integers.
#pragma once

#include <cstdint>
#include <cstring>

#include "columns.h"

namespace shoal {
namespace SHOAL_ISA {

// How many words ahead 8-bit weights are prefetched for few rows, where this was measured and pays off; 0 elsewhere.
#if defined(__AMX_INT8__)
constexpr int kIntegersAhead = 512;
#else
constexpr int kIntegersAhead = 0;
#endif

// Whether the rows of a weight are held as bytes, and not as 16-bit integers.
inline bool holds_bytes(const Linear& linear) { return kMultipliesBytes && linear.row_bits == 8; }

// One group's sums for a tile's rows, by two vectors of columns.
template <int Bits, int MR, bool Bytes>
SHOAL_INLINE void sum_group(const Word* words, const Word* const (&x)[MR], I32 (&acc)[MR][2]) {
    constexpr int each = (Bytes ? 8 : 16) / Bits;  // words of a row that meet one of a column
#pragma GCC unroll 8
    for (int w = 0; w < Bits; ++w) {
        const Word* const held = words + w * kBlockColumns;
        // Read once: compilers would load them again for each p, at twice the time where they come from memory.
        U32 packed[2] = {load(held), load(held + kLanes)};
        keep_loaded(packed[0]);
        keep_loaded(packed[1]);
#pragma GCC unroll 4
        for (int p = 0; p < each; ++p) {
            U32 right[2];
#pragma GCC unroll 2
            for (int j = 0; j < 2; ++j)
                right[j] = Bytes ? integer_bytes<Bits>(packed[j], p) : (U32)integer_pairs<Bits>(packed[j], p);
#pragma GCC unroll 16
            for (int i = 0; i < MR; ++i) {
                const Word* const left = x[i] + w * each + p;
                dot_integers<Bytes>(acc[i][0], left, right[0]);
                dot_integers<Bytes>(acc[i][1], left, right[1]);
            }
            keep_order();
        }
    }
}

SHOAL_INLINE F32 broadcast_float(const Word* word) { return (F32)(U32{} + *word); }

// Sums for two vectors of columns, from column `Column` on: exact within a group, then multiplied by one scale of the
// weight and one of the row.
template <int Bits, int MR, int Column, bool Bytes>
SHOAL_INLINE void sum_integers(const GemmCall& call, int row, int block, F32 (&total)[MR][2]) {
    const Linear& linear = *call.linear;
    const int groups = linear.groups();
    const Word* words = linear.block(block);
    const int64_t group_words = linear.group_words();
    constexpr int row_words = row_group_words(Bytes), numbers = row_words - kRowNumbers;
    const Word* x[MR];
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i) x[i] = call.x + (row + i) * call.x_stride;
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
        const F32 bias = bias_of(linear, block, Column + j * kLanes);
#pragma GCC unroll 16
        for (int i = 0; i < MR; ++i) total[i][j] = bias;
    }
    for (int g = 0; g < groups; ++g, words += group_words) {
        if constexpr (kIntegersAhead > 0 && Bits == 8 && Column == 0)
            for (int64_t i = 0; i < group_words; i += kPanel) __builtin_prefetch(words + kIntegersAhead + i, 0, 2);
        I32 acc[MR][2] = {};
        if constexpr (Bytes && Bits == 8)
#pragma GCC unroll 16
            for (int i = 0; i < MR; ++i) acc[i][0] = acc[i][1] = (I32)(U32{} + x[i][numbers + kRowSum]);
        sum_group<Bits, MR, Bytes>(words + Column, x, acc);
        const Word* const scales_of = words + Bits * kBlockColumns;
#pragma GCC unroll 2
        for (int j = 0; j < 2; ++j) {
            const int column = Column + j * kLanes, panel = column / kPanel, lane = column % kPanel;
            const F32 scale = half_bf16(load(scales_of + lane), panel);
#pragma GCC unroll 16
            for (int i = 0; i < MR; ++i) {
                F32 part = __builtin_convertvector(acc[i][j], F32) * scale;
                if constexpr (Bits == 4)
                    part += half_bf16(load(scales_of + kPanel + lane), panel) * broadcast_float(x[i] + numbers + kRowSum);
                total[i][j] += part * broadcast_float(x[i] + numbers + kRowScale);
            }
        }
#pragma GCC unroll 16
        for (int i = 0; i < MR; ++i) {
            x[i] += row_words;
            asm("" : "+r"(x[i]));  // otherwise compilers derive addresses from one another, and keep them in memory
        }
    }
}

// The 16 pairs of a group, each in the lower and the upper half of a word, as bytes in the order of a weight's.
#if defined(__AVX512VNNI__)
SHOAL_INLINE void store_bytes(U32 pairs, Format format, Word* out) {
    typedef uint64_t U64 __attribute__((vector_size(64)));
    typedef uint32_t Half __attribute__((vector_size(32)));
    if (format == Format::Int4)  // in words of nibbles, the pairs after next are neighbours
        pairs = __builtin_shuffle(pairs, U32{0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15});
    const U64 two = (U64)(pairs & 0x00ff00ffu);
    const Half bytes = __builtin_convertvector(two | two >> 24, Half);
    std::memcpy(out, &bytes, sizeof bytes);
}
#else
SHOAL_INLINE void store_bytes(U32, Format, Word*) {}
#endif

// Rounds a row of bf16 to integers, each group scaled by its largest absolute value. With NaN or infinity in it, the
// row's first scale is NaN.
void round_row(const Word* x, Word* out, const Linear& linear) {
    constexpr int words = kGroup / 2;
    const bool bytes = holds_bytes(linear);
    const int numbers = bytes ? words / 2 : words;
    const float most = linear.row_bits == 8 ? 127.0f : 32767.0f;
    const F32 magic = splat(12582912.0f);  // adding 1.5 * 2^23 rounds to the nearest integer
    F32 nothing{};
    Word* const first = out;
    for (int g = 0; g < linear.groups(); ++g, x += words, out += numbers + kRowNumbers) {
        F32 largest{};
        for (int w = 0; w < words; w += kLanes) {
            const U32 pair = load(x + w);
            largest = max(largest, max(half_bf16(pair & 0x7fff7fffu, 0), half_bf16(pair & 0x7fff7fffu, 1)));
            nothing += (half_bf16(pair, 0) + half_bf16(pair, 1)) * 0.0f;
        }
        // Values so small that the inverse would not be finite become 0.
        const float top = horizontal_max(largest), scale = top * (1.0f / most);
        const float inverse = top > 1e-30f ? most / top : 0.0f;
        F32 sums{};
        for (int w = 0; w < words; w += kLanes) {
            const U32 pair = load(x + w);
            const F32 low = half_bf16(pair, 0) * inverse + magic, high = half_bf16(pair, 1) * inverse + magic;
            const U32 rounded = ((U32)low & 0xffffu) | (U32)high << 16;
            sums += (low - magic) + (high - magic);
            if (bytes)
                store_bytes(rounded, linear.format, out + w);
            else
                store(out + w, rounded);
        }
        const float sum = horizontal_sum(sums);
        std::memcpy(out + numbers + kRowScale, &scale, sizeof scale);
        if (linear.format == Format::Int4)
            std::memcpy(out + numbers + kRowSum, &sum, sizeof sum);
        else
            out[numbers + kRowSum] = static_cast<Word>(sum == sum ? kByteOffset * static_cast<int>(sum) : 0);
    }
    const float poison = horizontal_sum(nothing);
    float scale;
    std::memcpy(&scale, first + numbers + kRowScale, sizeof scale);
    scale += poison;
    std::memcpy(first + numbers + kRowScale, &scale, sizeof scale);
}

}  // namespace SHOAL_ISA
}  // namespace shoal
