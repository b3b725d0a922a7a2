// RMSNorm (Zhang and Sennrich 2019), and rotary positions (Su et al. 2021) with the write into the KV pages.
#pragma once

#include <cmath>

#include "simd.h"

namespace shoal {
namespace SHOAL_ISA {

SHOAL_INLINE float inverse_rms(const float* x, float eps, int size) {
    F32 squares{};
    int i = 0;
    for (; i + kLanes <= size; i += kLanes) squares += load(x + i) * load(x + i);
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

// One head, normed if asked and turned to its position, in the dtype.
template <class T>
SHOAL_INLINE void rotate(const float* x, const float* norm, float eps, const float* cos_sin, typename T::Scalar* out,
                         int size) {
    float normed[kMaxHeadSize];
    if (norm != nullptr) {
        const float scale = inverse_rms(x, eps, size);
        for (int i = 0; i < size; ++i) normed[i] = x[i] * scale * norm[i];
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

// How many tokens of this step, from `token` on, fill its page. They may be other threads' to write.
SHOAL_INLINE int tokens_ahead(const RotaryCall& call, int token) {
    int ahead = 1;
    while (ahead < kPanel && token + ahead < call.tokens && call.slots[token + ahead] == call.slots[token] + ahead) ++ahead;
    return ahead;
}

// A page begins clean: what an earlier sequence left beyond the first `kept` tokens, even NaN, must not reach this one's
// sums, where it is multiplied by a weight of zero.
template <class T>
SHOAL_INLINE void clear_values(Word* values, int kept, int size) {
    auto* v = reinterpret_cast<typename T::Scalar*>(values);
    for (int lane = kept; lane < kPanel; ++lane)
        for (int i = 0; i < size; ++i) v[((lane / T::kPack) * size + i) * T::kPack + lane % T::kPack] = 0;
}

// `size` values, a multiple of 16, in the dtype.
template <class T>
SHOAL_INLINE void narrow_row(const float* x, typename T::Scalar* out, int size) {
    for (int i = 0; i < size; i += kLanes) T::store_row(out + i, load(x + i));
}

template <class T>
void rotary_rows(const RotaryCall& call, int token_begin, int token_end) {
    constexpr int pack = T::kPack;
    using Scalar = typename T::Scalar;
    const int size = call.head_size, group = call.heads / call.kv_heads;
    const int64_t page = static_cast<int64_t>(size) * kPanel / pack;
    const int pages_per_block = call.block_size / kPanel;
    alignas(Word) Scalar narrowed[kMaxHeadSize];
    for (int token = token_begin; token < token_end; ++token) {
        const float* row = call.qkv + static_cast<int64_t>(token) * (call.heads + 2 * call.kv_heads) * size;
        const float* cos_sin = call.cos_sin + call.positions[token] * size;
        auto* queries = reinterpret_cast<Scalar*>(call.queries);
        for (int head = 0; head < call.heads; ++head) {
            const int64_t at = (static_cast<int64_t>(head / group) * call.tokens + token) * group + head % group;
            rotate<T>(row + head * size, call.query_norm, call.eps, cos_sin, queries + at * size, size);
        }
        const int64_t slot = call.slots[token], block = slot / call.block_size;
        const int offset = static_cast<int>(slot % call.block_size), lane = offset % kPanel;
        for (int head = 0; head < call.kv_heads; ++head) {
            const float* key = row + (call.heads + head) * size;
            const float* value = key + call.kv_heads * size;
            Word* keys = call.pool + ((block * call.kv_heads + head) * pages_per_block + offset / kPanel) * 2 * page;
            Word* values = keys + page;
            if (lane == 0) clear_values<T>(values, tokens_ahead(call, token), size);
            rotate<T>(key, call.key_norm, call.eps, cos_sin, narrowed, size);
            for (int i = 0; i < size / pack; ++i) std::memcpy(keys + i * kPanel + lane, narrowed + i * pack, sizeof(Word));
            narrow_row<T>(value, narrowed, size);
            auto* v = reinterpret_cast<Scalar*>(values) + (lane / pack) * size * pack + lane % pack;
            for (int i = 0; i < size; ++i) v[i * pack] = narrowed[i];
        }
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
