// Low-rank adapters (LoRA, Hu et al. 2021): to some products of a layer, y = x W^T, an adapter adds (x A^T) B^T.
#pragma once

#include <array>
#include <vector>

#include "kernels.h"
#include "memory.h"

namespace shoal {

// The products of a layer that can be adapted.
enum class Projection { Qkv, Output, GateUp, Down };
constexpr int kProjections = 4;

// A product's adaptation, packed as weights are: `down` is A, `up` is B, whose outputs are in the product's own layout.
struct LoraFactors {
    Linear down, up;
    bool is_empty() const { return down.blocks == 0; }
};

struct LoraAdapter {
    Arena arena;
    std::vector<std::array<LoraFactors, kProjections>> layers;

    const LoraFactors& factors(int layer, Projection projection) const {
        return layers[static_cast<size_t>(layer)][static_cast<size_t>(projection)];
    }
};

// Consecutive rows that have the same adapter.
struct LoraRun {
    const LoraAdapter* adapter;
    int begin, end;
};
using LoraRuns = std::vector<LoraRun>;

// Rows of a product to be adapted: its inputs x and its outputs, both from row `first` of the runs' rows on.
struct LoraRows {
    int layer;
    Projection projection;
    const LoraRuns& runs;
    const Word* x;
    int64_t x_values;  // values from one row of x to the next
    float* out;
    int64_t out_stride;
    int first = 0;
};

}  // namespace shoal
