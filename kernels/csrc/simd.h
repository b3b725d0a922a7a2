// Vectors of one instruction set, using compiler vector extensions.
//
// isa.cpp is compiled once for each instruction set, with the flags of that set; everything that includes this header
// is in the namespace of that set. The only intrinsics here are the dot products, conversions to bf16 (one with a
// permutation), a maximum and two steps of 2^x; some inline assembly keeps an order. The rest is plain vector
// arithmetic that the compiler lowers to AVX-512, AVX2, NEON or SSE2.
//
// Packed data consists of 32-bit words: two bf16 values that are consecutive along the summed dimension, or one
// float32. A matrix product broadcasts a word, or each of its values if there is no product of bf16 pairs, so both
// dtypes share every loop.
#pragma once

#include <cstring>

#include "kernels.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#include <arm_neon.h>
#endif

namespace shoal {
namespace SHOAL_ISA {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kTileRows = 12;  // 24 accumulators, 2 right-hand vectors and a broadcast, of 32 registers
constexpr int kIntegerTileRows = 6;  // each row also has the sums of its group
#elif defined(__AVX2__)
constexpr int kLanes = 8;
constexpr int kTileRows = 5;  // 10 accumulators, 2 right-hand vectors, a broadcast and a mask, of 16 registers
constexpr int kIntegerTileRows = 4;
#elif defined(__aarch64__)
constexpr int kLanes = 4;
constexpr int kTileRows = 8;  // 32 registers, as AVX-512 has
constexpr int kIntegerTileRows = 4;
#else
constexpr int kLanes = 4;
constexpr int kTileRows = 4;
constexpr int kIntegerTileRows = 2;
#endif

typedef float F32 __attribute__((vector_size(kLanes * 4)));
typedef int32_t I32 __attribute__((vector_size(kLanes * 4)));
typedef uint32_t U32 __attribute__((vector_size(kLanes * 4)));
typedef int16_t I16 __attribute__((vector_size(kLanes * 4)));
typedef float F32Unaligned __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef uint32_t U32Unaligned __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));

#define SHOAL_INLINE inline __attribute__((always_inline))

SHOAL_INLINE F32 load(const float* p) { return *reinterpret_cast<const F32Unaligned*>(p); }
SHOAL_INLINE U32 load(const Word* p) { return *reinterpret_cast<const U32Unaligned*>(p); }
SHOAL_INLINE void store(float* p, F32 v) { *reinterpret_cast<F32Unaligned*>(p) = v; }
SHOAL_INLINE void store(Word* p, U32 v) { *reinterpret_cast<U32Unaligned*>(p) = v; }
SHOAL_INLINE F32 splat(float x) { return F32{} + x; }
#if defined(__AVX512F__)
// The same as a > b ? a : b, for which compilers generate this instruction too, but not if one operand is a constant.
SHOAL_INLINE F32 max(F32 a, F32 b) { return (F32)_mm512_maskz_max_ps(0xffff, (__m512)a, (__m512)b); }
#else
SHOAL_INLINE F32 max(F32 a, F32 b) { return a > b ? a : b; }
#endif

SHOAL_INLINE I32 lane_index() {
#if defined(__AVX512F__)
    return I32{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif defined(__AVX2__)
    return I32{0, 1, 2, 3, 4, 5, 6, 7};
#else
    return I32{0, 1, 2, 3};
#endif
}

// Swaps each lane with the lane whose number differs in one bit.
SHOAL_INLINE F32 swapped(F32 v, int bit) { return __builtin_shuffle(v, lane_index() ^ bit); }

// Sums and maxima across lanes, by repeated halving.
SHOAL_INLINE float horizontal_sum(F32 v) {
#pragma GCC unroll 4
    for (int width = kLanes / 2; width > 0; width /= 2) v += swapped(v, width);
    return v[0];
}

SHOAL_INLINE float horizontal_max(F32 v) {
#pragma GCC unroll 4
    for (int width = kLanes / 2; width > 0; width /= 2) v = max(v, swapped(v, width));
    return v[0];
}

// 2^x; anything below 2^-125 becomes 2^-125, or 0. Fine: relative error about 1e-7 (Cephes exp2f). Coarse: 1e-4, a
// tenth of the error of rounding to bf16.
template <bool Fine>
SHOAL_INLINE F32 exp2(F32 x) {
#if defined(__AVX512DQ__)
    if constexpr (!Fine) {  // the fraction, in [0, 1), and scaling by the whole part are one instruction each
        constexpr int down = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
        const F32 f = (F32)_mm512_maskz_reduce_ps(0xffff, (__m512)x, down);
        F32 p = splat(7.72059038e-2f);
        p = p * f + 2.26738900e-1f;
        p = p * f + 6.95927978e-1f;
        p = p * f + 9.99914110e-1f;
        return (F32)_mm512_maskz_scalef_ps(0xffff, (__m512)p, (__m512)x);
    }
#endif
    x = max(splat(-125.0f), x);  // in this order a NaN stays one
    const F32 magic = splat(12582912.0f);  // adding 1.5 * 2^23 rounds to the nearest integer
    const F32 shifted = x + magic;
    const F32 f = x - (shifted - magic);
    F32 p;
    if constexpr (Fine) {
        p = splat(1.535336188319500e-4f);
        p = p * f + 1.339887440266574e-3f;
        p = p * f + 9.618437357674640e-3f;
        p = p * f + 5.550332471162809e-2f;
        p = p * f + 2.402264791363012e-1f;
        p = p * f + 6.931472028550421e-1f;
    } else {
        p = splat(5.459282e-2f);
        p = p * f + 2.4221784e-1f;
        p = p * f + 6.933686e-1f;
    }
    p = p * f + 1.0f;
    return (F32)((I32)p + ((I32)shifted << 23));
}

constexpr float kLog2E = 1.4426950408889634f;

// Rounds to nearest even, to the upper 16 bits. NaN stays NaN.
SHOAL_INLINE U32 round_bf16(F32 v) {
    const U32 bits = (U32)v;
    const U32 rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    return ((v == v) ? rounded : bits | 0x00400000u) >> 16;
}

// The bf16 value in the lower or the upper half of each word.
SHOAL_INLINE F32 half_bf16(U32 words, int half) { return (F32)(half == 0 ? words << 16 : words & 0xffff0000u); }

// A dtype of packed data. In each step, a product takes a word of its right-hand side and does kParts multiplications:
// each part of the word by its own Left, which is broadcast.
struct Bf16 {
    static constexpr int kPack = 2;  // values in a word
    static constexpr bool kFine = false;
    using Scalar = uint16_t;

#if defined(__AVX512BF16__)
    static constexpr int kParts = 1;
    using Left = Word;
    static SHOAL_INLINE __m512bh part(U32 words, int) { return (__m512bh)words; }
    static SHOAL_INLINE void dot(F32& acc, const Left* left, __m512bh right) {
        acc = (F32)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32((int)*left), right);
    }
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    static constexpr int kParts = 1;
    using Left = Word;
    static SHOAL_INLINE bfloat16x8_t part(U32 words, int) { return (bfloat16x8_t)words; }
    static SHOAL_INLINE void dot(F32& acc, const Left* left, bfloat16x8_t right) {
        acc = (F32)vbfdotq_f32((float32x4_t)acc, right, vreinterpretq_bf16_u32(vdupq_n_u32(*left)));
    }
#else
    static constexpr int kParts = 2;  // no bf16 product: left-hand sides are float32, right-hand sides are widened
    using Left = float;
    static SHOAL_INLINE F32 part(U32 words, int number) { return half_bf16(words, number); }
    static SHOAL_INLINE void dot(F32& acc, const Left* left, F32 right) { acc += right * *left; }
#endif
    static SHOAL_INLINE float widen(Scalar x) {
        const uint32_t bits = static_cast<uint32_t>(x) << 16;
        float f;
        std::memcpy(&f, &bits, 4);
        return f;
    }
    static SHOAL_INLINE Scalar narrow(float x) {
        uint32_t bits;
        std::memcpy(&bits, &x, 4);
        if (x != x) return static_cast<Scalar>((bits | 0x00400000u) >> 16);
        return static_cast<Scalar>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
    }
    // Stores consecutive values as scalars.
    static SHOAL_INLINE void store_row(Scalar* p, F32 v) {
#if defined(__AVX512BF16__)
        const __m256bh half = _mm512_cvtneps_pbh((__m512)v);
        std::memcpy(p, &half, sizeof half);
#else
        typedef uint16_t Half __attribute__((vector_size(kLanes * 2)));
        const Half half = __builtin_convertvector(round_bf16(v), Half);
        std::memcpy(p, &half, sizeof half);
#endif
    }
    // Stores pairs of values in the same column of two rows, `row_values` apart: one word for each column of a vector.
    static SHOAL_INLINE void store_side_by_side(Word* p, const float* row, int64_t row_values) {
        const F32 first = load(row), second = load(row + row_values);
#if defined(__AVX512BF16__)
        const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
        store(p, (U32)_mm512_permutexvar_epi16((__m512i)(lane_index() * 0x10001 + 0x100000), halves));
#else
        store(p, round_bf16(first) | round_bf16(second) << 16);
#endif
    }
};

struct Float32 {
    static constexpr int kPack = 1;
    static constexpr bool kFine = true;
    using Scalar = float;
    static constexpr int kParts = 1;
    using Left = float;
    static SHOAL_INLINE F32 part(U32 words, int) { return (F32)words; }
    static SHOAL_INLINE void dot(F32& acc, const Left* left, F32 right) { acc += right * *left; }
    static SHOAL_INLINE float widen(Scalar x) { return x; }
    static SHOAL_INLINE Scalar narrow(float x) { return x; }
    static SHOAL_INLINE void store_row(Scalar* p, F32 v) { store(p, v); }
    static SHOAL_INLINE void store_side_by_side(Word* p, const float* row, int64_t) { store(p, (U32)load(row)); }
};

// Whether left-hand sides are float32, widened from words of another dtype.
template <class T>
constexpr bool kWidensLeft = T::kParts > 1;

// `count` words as a left-hand side: as they are, or widened into `buffer`, which has room for kParts times as many.
template <class T>
const typename T::Left* to_lefts(const Word* words, int64_t count, typename T::Left* buffer) {
    if constexpr (kWidensLeft<T>) {
        static_assert(T::kParts == T::kPack);
        const auto* values = reinterpret_cast<const typename T::Scalar*>(words);
        for (int64_t i = 0; i < count * T::kPack; ++i) buffer[i] = T::widen(values[i]);
        return buffer;
    } else {
        return reinterpret_cast<const typename T::Left*>(words);
    }
}

// Stores values that are consecutive along the summed dimension, from index `first` on, into a left-hand side.
template <class T>
SHOAL_INLINE void store_lefts(typename T::Left* lefts, int first, F32 v) {
    if constexpr (kWidensLeft<T>)
        store(lefts + first, v);
    else
        T::store_row(reinterpret_cast<typename T::Scalar*>(lefts) + first, v);
}

// The p-th pairs of integers in packed words, each in the lower and the upper 16 bits. Int8 is signed, Int4 is not.
template <int Bits>
SHOAL_INLINE I32 integer_pairs(U32 words, int p) {
    if constexpr (Bits == 8) return p == 0 ? (I32)((I16)words << 8 >> 8) : (I32)((I16)words >> 8);
    return (I32)(words >> (4 * p) & 0x000f000fu);
}

// acc += both products of the pair in `left` with each pair in `right`.
SHOAL_INLINE void dot_pairs(I32& acc, const Word* left, I32 right) {
#if defined(__AVX512VNNI__)
    acc = (I32)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)right, _mm512_set1_epi32((int)*left));
#elif defined(__AVX2__)
#if defined(__AVX512BW__)
    acc += (I32)_mm512_madd_epi16((__m512i)right, _mm512_set1_epi32((int)*left));
#else
    acc += (I32)_mm256_madd_epi16((__m256i)right, _mm256_set1_epi32((int)*left));
#endif
    asm("" : "+v"(acc));  // without it, compilers collect products in memory to add them in another order
#else
    acc += (right << 16 >> 16) * static_cast<int16_t>(*left) + (right >> 16) * static_cast<int16_t>(*left >> 16);
#endif
}

// Bytes of packed integers, as four words of pairs would have them (two where they are nibbles). They are multiplied as
// unsigned: signed ones come out too large by 128.
constexpr int kByteOffset = -128;

template <int Bits>
SHOAL_INLINE U32 integer_bytes(U32 words, int p) {
    if constexpr (Bits == 8) return words ^ 0x80808080u;
    return words >> (4 * p) & 0x0f0f0f0fu;
}

#if defined(__AVX512VNNI__)
constexpr bool kMultipliesBytes = true;
#else
constexpr bool kMultipliesBytes = false;
#endif

// acc += the products of the signed integers of a word in `left`, four bytes or two pairs, with those of each word in
// `right`, where bytes are unsigned.
template <bool Bytes>
SHOAL_INLINE void dot_integers(I32& acc, const Word* left, U32 right) {
#if defined(__AVX512VNNI__)
    if constexpr (Bytes) {
        acc = (I32)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)right, _mm512_set1_epi32((int)*left));
        return;
    }
#endif
    static_assert(kMultipliesBytes || !Bytes);
    dot_pairs(acc, left, (I32)right);
}

// Keeps the compiler from loading a vector again where it is used again.
SHOAL_INLINE void keep_loaded([[maybe_unused]] U32& loaded) {
#if defined(__AVX512F__)
    asm("" : "+v"(loaded));
#endif
}

// Keeps the compiler from starting what follows earlier: with few registers, more values at once would be spilled to
// memory.
SHOAL_INLINE void keep_order() {
#if !defined(__AVX512F__) && !defined(__aarch64__)
    asm volatile("" ::: "memory");
#endif
}

// Prefetches nothing.
struct NoFetch {
    SHOAL_INLINE void operator()(int) const {}
};

// acc[i][j] += sum over s of left row i at step s times right vector j at step s. Every caller sums in this one order,
// so a row's result does not depend on the rows that share its tile. fetch(s) may prefetch later data.
template <class T, int MR, int NV, class Fetch = NoFetch>
SHOAL_INLINE void accumulate(F32 (&acc)[MR][NV], const typename T::Left* left, long left_stride,
                             const Word* const (&right)[NV], long right_stride, int steps, const Fetch& fetch = {}) {
    for (int s = 0; s < steps; ++s) {
        fetch(s);
#pragma GCC unroll 2
        for (int p = 0; p < T::kParts; ++p) {
            decltype(T::part(U32{}, p)) parts[NV];
#pragma GCC unroll 8
            for (int j = 0; j < NV; ++j) parts[j] = T::part(load(right[j] + s * right_stride), p);
#pragma GCC unroll 16
            for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 8
                for (int j = 0; j < NV; ++j) T::dot(acc[i][j], left + i * left_stride + s * T::kParts + p, parts[j]);
            }
            if constexpr (T::kParts > 1) keep_order();
        }
    }
}

}  // namespace SHOAL_ISA
}  // namespace shoal
