// Packed matrix product: a tile of rows by one block of 32 columns, held in registers over the whole summed dimension.
#pragma once

#include <utility>

#include "simd.h"

namespace shoal {
namespace SHOAL_ISA {

template <class T, int MR>
void gemm_tile(const GemmCall& call, int row, int block) {
    const Linear& linear = *call.linear;
    const Word* words = linear.block(block);
    const Word* x = call.x + row * call.x_stride;
    for (int lane = 0; lane < kPanel; lane += kLanes) {
        // Vector j lies in panel j, so that a gate and its up column meet in one tile.
        const Word* const right[2] = {words + lane, words + kPanel + lane};
        F32 acc[MR][2];
        for (int j = 0; j < 2; ++j) {
            const F32 bias = linear.bias.empty() ? F32{} : load(&linear.bias[block * kBlockColumns + j * kPanel + lane]);
            for (int i = 0; i < MR; ++i) acc[i][j] = bias;
        }
        accumulate<T>(acc, x, call.x_stride, right, kBlockColumns, linear.steps());
        if (call.finish == Finish::SwiGlu) {
            auto* out = static_cast<typename T::Scalar*>(call.out) + row * call.out_stride + block * kPanel + lane;
            for (int i = 0; i < MR; ++i) T::store_row(out + i * call.out_stride, silu(acc[i][0]) * acc[i][1]);
            continue;
        }
        float* out = static_cast<float*>(call.out) + row * call.out_stride;
        for (int i = 0; i < MR; ++i, out += call.out_stride) {
            for (int j = 0; j < 2; ++j) {
                const int column = block * kBlockColumns + j * kPanel + lane;
                if (column + kLanes <= linear.outputs) {
                    store(out + column, call.finish == Finish::Add ? acc[i][j] + load(out + column) : acc[i][j]);
                    continue;
                }
                for (int k = 0; column + k < linear.outputs && k < kLanes; ++k)  // the last, ragged columns
                    out[column + k] = call.finish == Finish::Add ? out[column + k] + acc[i][j][k] : acc[i][j][k];
            }
        }
    }
}

template <class T>
using GemmTile = void (*)(const GemmCall&, int row, int block);

template <class T, int... I>
GemmTile<T> gemm_tile_of(int rows, std::integer_sequence<int, I...>) {
    static constexpr GemmTile<T> tiles[] = {gemm_tile<T, I + 1>...};
    return tiles[rows - 1];
}

template <class T>
void gemm_rows(const GemmCall& call, int row_begin, int row_end, int block_begin, int block_end) {
    for (int block = block_begin; block < block_end; ++block) {
        // Tiles of nearly equal height: a short last one would leave the dot product's latency bare.
        for (int row = row_begin, left = row_end - row_begin; left > 0;) {
            const int tiles = static_cast<int>(divide_up(left, kTileRows));
            const int rows = static_cast<int>(divide_up(left, tiles));
            gemm_tile_of<T>(rows, std::make_integer_sequence<int, kTileRows>{})(call, row, block);
            row += rows;
            left -= rows;
        }
    }
}

void gemm(const GemmCall& call, int row_begin, int row_end, int block_begin, int block_end) {
    if (call.linear->dtype == Dtype::Bf16)
        gemm_rows<Bf16>(call, row_begin, row_end, block_begin, block_end);
    else
        gemm_rows<Float32>(call, row_begin, row_end, block_begin, block_end);
}

}  // namespace SHOAL_ISA
}  // namespace shoal
