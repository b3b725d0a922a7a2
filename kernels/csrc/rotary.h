// RMSNorm (Zhang and Sennrich 2019), and rotary embeddings (Su et al. 2021) with the write into the KV pages.
#pragma once

#include <cmath>
#include <utility>

#include "simd.h"

namespace shoal {
namespace SHOAL_ISA {

SHOAL_INLINE float inverse_rms(const float* x, float eps, int size) {
    F32 squares{};
    int i = 0;
    for (; i + kLanes <= size; i += kLanes) {
        __builtin_prefetch(x + size + i);  // the next row
        squares += load(x + i) * load(x + i);
    }
    float sum = horizontal_sum(squares);
    for (; i < size; ++i) sum += x[i] * x[i];
    return 1.0f / std::sqrt(sum / static_cast<float>(size) + eps);
}

template <class T>
void rms_norm_row(const float* x, const float* weight, float eps, typename T::Scalar* out, int size) {
    const float scale = inverse_rms(x, eps, size);
    int i = 0;
    for (; i + kLanes <= size; i += kLanes) T::store_row(out + i, load(x + i) * scale * load(weight + i));
    for (; i < size; ++i) out[i] = T::narrow(x[i] * scale * weight[i]);
}

void rms_norm(Dtype dtype, const float* x, const float* weight, float eps, void* out, int size) {
    if (dtype == Dtype::Bf16)
        rms_norm_row<Bf16>(x, weight, eps, static_cast<uint16_t*>(out), size);
    else
        rms_norm_row<Float32>(x, weight, eps, static_cast<float*>(out), size);
}

void add_rms_norm(const float* x, const float* weight, float eps, float* stream, int size) {
    const float scale = inverse_rms(x, eps, size);
    int i = 0;
    for (; i + kLanes <= size; i += kLanes) store(stream + i, load(stream + i) + load(x + i) * scale * load(weight + i));
    for (; i < size; ++i) stream[i] += x[i] * scale * weight[i];
}

// How the heads of a token's queries, or keys, are normed: each by itself, all of them together, or not at all.
struct HeadNorm {
    const float* weight;  // null if not at all
    float eps;
    bool spans_heads;

    // The scale of all heads of x, if they have one together.
    SHOAL_INLINE float shared_scale(const float* x, int heads, int size) const {
        return weight != nullptr && spans_heads ? inverse_rms(x, eps, heads * size) : 0.0f;
    }
    SHOAL_INLINE const float* weight_of(int head, int size) const { return spans_heads ? weight + head * size : weight; }
};

// One head, normed if it is to be, then rotated to its position, in the dtype.
template <class T>
SHOAL_INLINE void rotate(const float* x, const HeadNorm& norm, float shared_scale, int head, const float* cos_sin,
                         typename T::Scalar* out, int size) {
    float normed[kMaxHeadSize];
    if (norm.weight != nullptr) {
        const float scale = norm.spans_heads ? shared_scale : inverse_rms(x, norm.eps, size);
        const float* const weight = norm.weight_of(head, size);
        for (int i = 0; i < size; ++i) normed[i] = x[i] * scale * weight[i];
        x = normed;
    }
    const int half = size / 2;
    const float* sin = cos_sin + half;
    int i = 0;
    for (; i + kLanes <= half; i += kLanes) {
        const F32 first = load(x + i), second = load(x + half + i), c = load(cos_sin + i), s = load(sin + i);
        T::store_row(out + i, first * c - second * s);
        T::store_row(out + half + i, second * c + first * s);
    }
    for (; i < half; ++i) {
        out[i] = T::narrow(x[i] * cos_sin[i] - x[half + i] * sin[i]);
        out[half + i] = T::narrow(x[half + i] * cos_sin[i] + x[i] * sin[i]);
    }
}

// Where a token's key and value of a head are stored: in a lane of the page of keys and of the values that follow it.
struct PagePlace {
    Word* keys;
    int lane;
};

SHOAL_INLINE PagePlace find_place(const RotaryCall& call, int token, int head, int64_t page) {
    const int64_t slot = call.slots[token], block = slot / call.block_size;
    const int offset = static_cast<int>(slot % call.block_size);
    const int64_t number = (block * call.kv_heads + head) * (call.block_size / kPanel) + offset / kPanel;
    return {call.pool + number * 2 * page, offset % kPanel};
}

// How many tokens of this step, from `token` on, fill its page. Other threads may be the ones to write them.
SHOAL_INLINE int tokens_ahead(const RotaryCall& call, int token) {
    int ahead = 1;
    while (ahead < kPanel && token + ahead < call.tokens && call.slots[token + ahead] == call.slots[token] + ahead) ++ahead;
    return ahead;
}

// Clears a new page beyond its first `kept` tokens: what an earlier sequence left there, even NaN, must not reach the
// sums of this one, in which it is multiplied by a weight of zero.
template <class T>
SHOAL_INLINE void clear_values(Word* values, int kept, int size) {
    auto* v = reinterpret_cast<typename T::Scalar*>(values);
    for (int lane = kept; lane < kPanel; ++lane)
        for (int i = 0; i < size; ++i) v[((lane / T::kPack) * size + i) * T::kPack + lane % T::kPack] = 0;
}

// Transposes kLanes vectors in place.
template <int... Lane>
SHOAL_INLINE void transpose(U32 (&rows)[kLanes], std::integer_sequence<int, Lane...>) {
#pragma GCC unroll 4
    for (int width = 1; width < kLanes; width *= 2) {
        // Of two rows whose numbers differ in one bit, the elements whose lanes differ from their rows in it change
        // places.
        const I32 even{(Lane & width ? Lane - width + kLanes : Lane)...}, odd{(Lane & width ? Lane + kLanes : Lane + width)...};
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
            if (i & width) continue;
            const U32 first = rows[i], second = rows[i + width];
            rows[i] = __builtin_shuffle(first, second, even);
            rows[i + width] = __builtin_shuffle(first, second, odd);
        }
    }
}

// Stores `words` words of each of a page's tokens, which are given one token after the other, into the tokens' lanes.
SHOAL_INLINE void store_lanes(const Word* tokens, int words, Word* page) {
    for (int i = 0; i < words; i += kLanes)
        for (int lane = 0; lane < kPanel; lane += kLanes) {
            U32 rows[kLanes];
#pragma GCC unroll 16
            for (int r = 0; r < kLanes; ++r) rows[r] = load(tokens + int64_t{lane + r} * words + i);
            transpose(rows, std::make_integer_sequence<int, kLanes>{});
#pragma GCC unroll 16
            for (int r = 0; r < kLanes; ++r) store(page + int64_t{i + r} * kPanel + lane, rows[r]);
        }
}

// Writes the keys and values of the tokens from `token` on that fill a page.
template <class T>
SHOAL_INLINE void fill_page(const RotaryCall& call, const float* rows, int64_t row_values, int token, int64_t page) {
    const int size = call.head_size, words = size / T::kPack;
    const HeadNorm norm{call.key_norm, call.eps, call.norms_span_heads};
    float scales[kPanel];
    for (int t = 0; t < kPanel; ++t) scales[t] = norm.shared_scale(rows + t * row_values, call.kv_heads, size);
    alignas(64) Word turned[kPanel * kMaxHeadSize / T::kPack];
    for (int head = 0; head < call.kv_heads; ++head) {
        const float* key = rows + head * size;
        const float* value = key + call.kv_heads * size;
        Word* const keys = find_place(call, token, head, page).keys;
        for (int t = 0; t < kPanel; ++t)
            rotate<T>(key + t * row_values, norm, scales[t], head, call.cos_sin + call.positions[token + t] * size,
                      reinterpret_cast<typename T::Scalar*>(turned + t * words), size);
        store_lanes(turned, words, keys);
        for (int t = 0; t < kPanel; t += T::kPack)
            for (int i = 0; i < size; i += kLanes)
                T::store_side_by_side(keys + page + t * words + i, value + t * row_values + i, row_values);
    }
}

// Writes the keys and values of one token; the head size is a multiple of 16.
template <class T>
SHOAL_INLINE void fill_lane(const RotaryCall& call, const float* row, int token, int64_t page) {
    constexpr int pack = T::kPack;
    using Scalar = typename T::Scalar;
    const int size = call.head_size;
    const float* cos_sin = call.cos_sin + call.positions[token] * size;
    const HeadNorm norm{call.key_norm, call.eps, call.norms_span_heads};
    const float scale = norm.shared_scale(row, call.kv_heads, size);
    alignas(Word) Scalar narrowed[kMaxHeadSize];
    for (int head = 0; head < call.kv_heads; ++head) {
        const float* key = row + head * size;
        const float* value = key + call.kv_heads * size;
        const auto [keys, lane] = find_place(call, token, head, page);
        Word* const values = keys + page;
        if (lane == 0) clear_values<T>(values, tokens_ahead(call, token), size);
        rotate<T>(key, norm, scale, head, cos_sin, narrowed, size);
        for (int i = 0; i < size / pack; ++i) std::memcpy(keys + i * kPanel + lane, narrowed + i * pack, sizeof(Word));
        for (int i = 0; i < size; i += kLanes) T::store_row(narrowed + i, load(value + i));
        auto* v = reinterpret_cast<Scalar*>(values) + (lane / pack) * size * pack + lane % pack;
        for (int i = 0; i < size; ++i) v[i * pack] = narrowed[i];
    }
}

template <class T>
void rotary_rows(const RotaryCall& call, int token_begin, int token_end) {
    const int size = call.head_size, group = call.heads / call.kv_heads;
    const int64_t page = static_cast<int64_t>(size) * kPanel / T::kPack;
    const int64_t row_values = int64_t{call.heads + 2 * call.kv_heads} * size;
    auto* queries = reinterpret_cast<typename T::Scalar*>(call.queries);
    const HeadNorm norm{call.query_norm, call.eps, call.norms_span_heads};
    for (int token = token_begin, filled = token_begin; token < token_end; ++token) {
        const float* row = call.qkv + token * row_values;
        const float* keys = row + call.heads * size;
        const float scale = norm.shared_scale(row, call.heads, size);
        for (int head = 0; head < call.heads; ++head) {
            const int64_t at = (static_cast<int64_t>(head / group) * call.tokens + token) * group + head % group;
            rotate<T>(row + head * size, norm, scale, head, call.cos_sin + call.positions[token] * size,
                      queries + at * size, size);
        }
        if (token < filled) continue;
        const bool is_whole = call.slots[token] % kPanel == 0 && token + kPanel <= token_end && size % (T::kPack * kLanes) == 0 &&
                              tokens_ahead(call, token) == kPanel;
        if (is_whole)
            fill_page<T>(call, keys, row_values, token, page);
        else
            fill_lane<T>(call, keys, token, page);
        filled = token + (is_whole ? kPanel : 1);
    }
}

void rotary(Dtype dtype, const RotaryCall& call, int token_begin, int token_end) {
    if (dtype == Dtype::Bf16)
        rotary_rows<Bf16>(call, token_begin, token_end);
    else
        rotary_rows<Float32>(call, token_begin, token_end);
}

}  // namespace SHOAL_ISA
}  // namespace shoal
