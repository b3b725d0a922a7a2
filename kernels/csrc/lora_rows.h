// The parts of an adapted product that are not matrix products themselves.
#pragma once

#include "simd.h"

namespace shoal {
namespace SHOAL_ISA {

// Rounds a row to the dtype. `size` is a multiple of a vector.
template <class T>
void narrow_row(const float* x, void* out, int size) {
    auto* const to = static_cast<typename T::Scalar*>(out);
    for (int i = 0; i < size; i += kLanes) T::store_row(to + i, load(x + i));
}

void narrow(Dtype dtype, const float* x, void* out, int size) {
    dtype == Dtype::Bf16 ? narrow_row<Bf16>(x, out, size) : narrow_row<Float32>(x, out, size);
}

// silu(gate) * up, as a product with Finish::SwiGlu computes it, from a row of sums in the order of packed columns.
template <class T>
void gate_row(const float* sums, void* out, int blocks) {
    auto* const to = static_cast<typename T::Scalar*>(out);
    for (int b = 0; b < blocks; ++b)
        for (int lane = 0; lane < kPanel; lane += kLanes) {
            const float* const gate = sums + b * kBlockColumns + lane;
            T::store_row(to + b * kPanel + lane, silu(load(gate)) * load(gate + kPanel));
        }
}

void swiglu(Dtype dtype, const float* sums, void* out, int blocks) {
    dtype == Dtype::Bf16 ? gate_row<Bf16>(sums, out, blocks) : gate_row<Float32>(sums, out, blocks);
}

}  // namespace SHOAL_ISA
}  // namespace shoal
