// What an MLP's gates pass on: SiLU, or GELU.
#pragma once

#include "simd.h"

namespace shoal {
namespace SHOAL_ISA {

SHOAL_INLINE F32 silu(F32 x) {
    // Below -80, exp2 of the negated argument would overflow; x * sigmoid(x) is then 0 to float32 precision.
    const F32 bounded = max(x, splat(-80.0f));
    return x / (exp2<true>(bounded * -kLog2E) + 1.0f);
}

// GELU by its tanh approximation, (x / 2) * (1 + tanh(u)), which is x * sigmoid(2 u).
SHOAL_INLINE F32 gelu_tanh(F32 x) {
    constexpr float kTwice = 1.5957691216f, kCubic = 0.044715f;  // 2 * sqrt(2 / pi)
    const F32 bounded = max(x * (x * x * (kTwice * kCubic) + kTwice), splat(-80.0f));
    return x / (exp2<true>(bounded * -kLog2E) + 1.0f);
}

template <Finish kFinish>
SHOAL_INLINE F32 activate(F32 x) {
    static_assert(is_gated(kFinish));
    return kFinish == Finish::GeGlu ? gelu_tanh(x) : silu(x);
}

}  // namespace SHOAL_ISA
}  // namespace shoal
