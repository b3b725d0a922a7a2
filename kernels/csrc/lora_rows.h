// The parts of an adapted product that are not matrix products themselves.
#pragma once

#include "gates.h"

namespace shoal {
namespace SHOAL_ISA {

// Rounds a row to the dtype.
template <class T>
void narrow_row(const float* x, void* out, int size) {
    auto* const to = static_cast<typename T::Scalar*>(out);
    int i = 0;
    for (; i + kLanes <= size; i += kLanes) T::store_row(to + i, load(x + i));
    for (; i < size; ++i) to[i] = T::narrow(x[i]);
}

void narrow(Dtype dtype, const float* x, void* out, int size) {
    dtype == Dtype::Bf16 ? narrow_row<Bf16>(x, out, size) : narrow_row<Float32>(x, out, size);
}

// What a product with the gated kFinish computes, from a row of sums in the order of packed columns.
template <class T, Finish kFinish>
void gate_row(const float* sums, void* out, int blocks) {
    auto* const to = static_cast<typename T::Scalar*>(out);
    for (int b = 0; b < blocks; ++b)
        for (int lane = 0; lane < kPanel; lane += kLanes) {
            const float* const gate = sums + b * kBlockColumns + lane;
            T::store_row(to + b * kPanel + lane, activate<kFinish>(load(gate)) * load(gate + kPanel));
        }
}

template <Finish kFinish>
void gate_in(Dtype dtype, const float* sums, void* out, int blocks) {
    dtype == Dtype::Bf16 ? gate_row<Bf16, kFinish>(sums, out, blocks) : gate_row<Float32, kFinish>(sums, out, blocks);
}

void gate(Dtype dtype, Finish finish, const float* sums, void* out, int blocks) {
    finish == Finish::GeGlu ? gate_in<Finish::GeGlu>(dtype, sums, out, blocks)
                            : gate_in<Finish::SwiGlu>(dtype, sums, out, blocks);
}

}  // namespace SHOAL_ISA
}  // namespace shoal
