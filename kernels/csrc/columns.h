// The columns of a tile of sums: how many are summed at a time, and how sums are finished.
#pragma once

#include <utility>

#include "gates.h"

namespace shoal {
namespace SHOAL_ISA {

// The bias of one vector of a block's columns.
SHOAL_INLINE F32 bias_of(const Linear& linear, int block, int column) {
    return linear.bias.empty() ? F32{} : load(&linear.bias[block * kBlockColumns + column]);
}

// Finishes the last, ragged columns of a weight, one value at a time.
template <int MR>
void finish_ragged(const GemmCall& call, int row, int block, int lane, const F32 (&acc)[MR][2]) {
    float* out = static_cast<float*>(call.out) + row * call.out_stride;
    for (int i = 0; i < MR; ++i, out += call.out_stride)
        for (int j = 0; j < 2; ++j) {
            const int column = block * kBlockColumns + j * kPanel + lane;
            for (int k = 0; column + k < call.linear->outputs && k < kLanes; ++k)
                out[column + k] = call.finish == Finish::Add ? out[column + k] + acc[i][j][k] : acc[i][j][k];
        }
}

// Finishes the sums of whole vectors of columns. Unrolled, so that they need not leave their registers first.
template <class T, int MR, Finish kFinish>
SHOAL_INLINE void finish_columns(const GemmCall& call, int row, int block, int lane, const F32 (&acc)[MR][2]) {
    if constexpr (is_gated(kFinish)) {
        auto* out = static_cast<typename T::Scalar*>(call.out) + row * call.out_stride + block * kPanel + lane;
#pragma GCC unroll 16
        for (int i = 0; i < MR; ++i) T::store_row(out + i * call.out_stride, activate<kFinish>(acc[i][0]) * acc[i][1]);
    } else {
        float* out = static_cast<float*>(call.out) + row * call.out_stride + block * kBlockColumns + lane;
#pragma GCC unroll 16
        for (int i = 0; i < MR; ++i) {
            float* const left = out + i * call.out_stride;
            float* const right = left + kPanel;
            store(left, kFinish == Finish::Add ? acc[i][0] + load(left) : acc[i][0]);
            store(right, kFinish == Finish::Add ? acc[i][1] + load(right) : acc[i][1]);
        }
    }
}

// Whether the blocks before `block_end` have all of their columns, so that whole vectors can be written.
inline bool are_whole(const GemmCall& call, int block_end) {
    return call.linear->gated || block_end * kBlockColumns <= call.linear->outputs;
}

// Finishes the sums of any columns.
template <class T, int MR>
SHOAL_INLINE void finish_tile(const GemmCall& call, int row, int block, int lane, const F32 (&acc)[MR][2]) {
    if (!are_whole(call, block + 1)) {
        F32 kept[MR][2];
#pragma GCC unroll 16
        for (int i = 0; i < MR; ++i) {
            kept[i][0] = acc[i][0];
            kept[i][1] = acc[i][1];
        }
        return finish_ragged<MR>(call, row, block, lane, kept);
    }
    if (call.finish == Finish::SwiGlu) return finish_columns<T, MR, Finish::SwiGlu>(call, row, block, lane, acc);
    if (call.finish == Finish::GeGlu) return finish_columns<T, MR, Finish::GeGlu>(call, row, block, lane, acc);
    if (call.finish == Finish::Add) return finish_columns<T, MR, Finish::Add>(call, row, block, lane, acc);
    finish_columns<T, MR, Finish::Store>(call, row, block, lane, acc);
}

// Calls sum(column, acc) for NV vectors of columns at a time, and finishes the tile's sums. If vectors are shorter than
// a panel, all columns are summed first, because a gate column and its up column are in different panels.
template <class T, int MR, int NV, class Sum, int... I>
SHOAL_INLINE void sum_by_columns(const GemmCall& call, int row, int block, const Sum& sum, std::integer_sequence<int, I...>) {
    if constexpr (kLanes == kPanel) {
        static_assert(NV * kLanes == kBlockColumns);
        F32 acc[MR][NV];
        sum(std::integral_constant<int, 0>{}, acc);
        finish_tile<T>(call, row, block, 0, acc);
    } else {
        alignas(64) float sums[MR][kBlockColumns];
        const auto keep = [&](auto column) {
            F32 acc[MR][NV];
            sum(column, acc);
#pragma GCC unroll 16
            for (int i = 0; i < MR; ++i)
#pragma GCC unroll 8
                for (int j = 0; j < NV; ++j) store(&sums[i][column + j * kLanes], acc[i][j]);
        };
        (keep(std::integral_constant<int, I * NV * kLanes>{}), ...);
        for (int lane = 0; lane < kPanel; lane += kLanes) {
            F32 acc[MR][2];
#pragma GCC unroll 16
            for (int i = 0; i < MR; ++i)
                for (int j = 0; j < 2; ++j) acc[i][j] = load(&sums[i][j * kPanel + lane]);
            finish_tile<T>(call, row, block, lane, acc);
        }
    }
}

template <int NV>
using ColumnsOf = std::make_integer_sequence<int, kBlockColumns / kLanes / NV>;

}  // namespace SHOAL_ISA
}  // namespace shoal
