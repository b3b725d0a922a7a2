// Weights to their packed layout, once, when the model is loaded.
#include <cstring>

#include "kernels.h"

namespace shoal {

namespace {

float widen(Dtype dtype, const void* data, int64_t at) {
    if (dtype == Dtype::Float32) return static_cast<const float*>(data)[at];
    const uint32_t bits = static_cast<uint32_t>(static_cast<const uint16_t*>(data)[at]) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// The output that stands at a packed column, or -1 where the last block is ragged.
int output_at(const Linear& linear, int64_t column) {
    if (!linear.gated) return column < linear.outputs ? static_cast<int>(column) : -1;
    const int half = linear.outputs / 2;
    const int64_t unit = column / kBlockColumns * kPanel + column % kPanel;
    if (unit >= half) return -1;
    return static_cast<int>(column % kBlockColumns < kPanel ? unit : half + unit);
}

}  // namespace

Linear pack_linear(Arena& arena, Dtype dtype, const void* weight, int outputs, int inputs, bool gated) {
    Linear linear;
    linear.dtype = dtype;
    linear.outputs = outputs;
    linear.inputs = inputs;
    linear.gated = gated;
    linear.blocks = static_cast<int>(gated ? divide_up(outputs / 2, kPanel) : divide_up(outputs, kBlockColumns));
    const int steps = linear.steps();
    linear.words = arena.words(static_cast<int64_t>(linear.blocks) * steps * kBlockColumns);
    const auto* source = static_cast<const Word*>(weight);  // a word of a row is a word of the summed dimension
    for (int b = 0; b < linear.blocks; ++b) {
        Word* block = linear.words + static_cast<int64_t>(b) * steps * kBlockColumns;
        for (int c = 0; c < kBlockColumns; ++c) {
            const int output = output_at(linear, static_cast<int64_t>(b) * kBlockColumns + c);
            if (output < 0) continue;
            const Word* row = source + static_cast<int64_t>(output) * steps;
            for (int s = 0; s < steps; ++s) block[s * kBlockColumns + c] = row[s];
        }
    }
    return linear;
}

std::vector<float> pack_bias(const Linear& linear, Dtype dtype, const void* bias) {
    std::vector<float> packed(static_cast<size_t>(linear.blocks) * kBlockColumns, 0.0f);
    for (size_t c = 0; c < packed.size(); ++c) {
        const int output = output_at(linear, static_cast<int64_t>(c));
        if (output >= 0) packed[c] = widen(dtype, bias, output);
    }
    return packed;
}

void unpack_row(const Linear& linear, int output, float* out) {
    const Word* column = linear.block(output / kBlockColumns) + output % kBlockColumns;
    const int pack = values_per_word(linear.dtype);
    for (int s = 0; s < linear.steps(); ++s, column += kBlockColumns)
        for (int i = 0; i < pack; ++i) out[s * pack + i] = widen(linear.dtype, column, i);
}

}  // namespace shoal
