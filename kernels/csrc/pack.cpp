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

Linear make_linear(Arena& arena, Dtype dtype, Format format, int outputs, int inputs, bool gated) {
    Linear linear;
    linear.dtype = dtype;
    linear.format = format;
    linear.outputs = outputs;
    linear.inputs = inputs;
    linear.gated = gated;
    linear.blocks = static_cast<int>(gated ? divide_up(outputs / 2, kPanel) : divide_up(outputs, kBlockColumns));
    linear.words = arena.words(linear.blocks * linear.block_words());
    return linear;
}

// Calls place(block, column of the block, output) for every packed column that has an output.
template <class Place>
void for_each_column(const Linear& linear, const Place& place) {
    for (int b = 0; b < linear.blocks; ++b)
        for (int c = 0; c < kBlockColumns; ++c) {
            const int output = output_at(linear, static_cast<int64_t>(b) * kBlockColumns + c);
            if (output >= 0) place(linear.block(b), c, output);
        }
}

// Where input k of a group lies: its word, and the first bit of its 8 or 4.
struct Place {
    int word, shift;
};

Place place_of(Format format, int k) {
    const int bits = static_cast<int>(format), per_word = 32 / bits, in_word = k % per_word;
    return {k / per_word, in_word % 2 * 16 + in_word / 2 * bits};
}

}  // namespace

Linear pack_linear(Arena& arena, Dtype dtype, const void* weight, int outputs, int inputs, bool gated) {
    const Linear linear = make_linear(arena, dtype, Format::Plain, outputs, inputs, gated);
    const int steps = linear.steps();
    const auto* source = static_cast<const Word*>(weight);  // a word of a row is a word of the summed dimension
    for_each_column(linear, [&](Word* block, int column, int output) {
        const Word* row = source + static_cast<int64_t>(output) * steps;
        for (int s = 0; s < steps; ++s) block[s * kBlockColumns + column] = row[s];
    });
    return linear;
}

Linear make_integers(Arena& arena, Format format, int outputs, int inputs, bool gated) {
    return make_linear(arena, Dtype::Bf16, format, outputs, inputs, gated);
}

void pack_output(const Linear& linear, Word* block, int column, const uint8_t* values, const uint16_t* scales,
                 const uint16_t* minimums) {
    const int bits = linear.bits(), half = column / kPanel * 16;
    Place places[kGroup];
    for (int k = 0; k < kGroup; ++k) places[k] = place_of(linear.format, k);
    for (int g = 0; g < linear.groups(); ++g, values += kGroup, block += linear.group_words()) {
        Word packed[8] = {};
        for (int k = 0; k < kGroup; ++k) packed[places[k].word] |= static_cast<Word>(values[k]) << places[k].shift;
        for (int w = 0; w < bits; ++w) block[w * kBlockColumns + column] = packed[w];
        Word* at = block + int64_t{bits} * kBlockColumns + column % kPanel;
        at[0] |= static_cast<Word>(scales[g]) << half;
        if (minimums != nullptr) at[kPanel] |= static_cast<Word>(minimums[g]) << half;
    }
}

Linear pack_integers(Arena& arena, const Integers& integers, int outputs, int inputs, bool gated) {
    const Linear linear = make_integers(arena, integers.format, outputs, inputs, gated);
    const int64_t groups = linear.groups();
    for_each_column(linear, [&](Word* block, int column, int output) {
        const int64_t row = output;
        pack_output(linear, block, column, integers.values + row * inputs, integers.scales + row * groups,
                    integers.minimums != nullptr ? integers.minimums + row * groups : nullptr);
    });
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
    const int column = output % kBlockColumns;
    const Word* words = linear.block(output / kBlockColumns);
    if (linear.format == Format::Plain) {
        const int pack = values_per_word(linear.dtype);
        for (int s = 0; s < linear.steps(); ++s)
            for (int i = 0; i < pack; ++i) out[s * pack + i] = widen(linear.dtype, words + s * kBlockColumns + column, i);
        return;
    }
    const int bits = linear.bits(), half = column / kPanel;
    for (int g = 0; g < linear.groups(); ++g, words += linear.group_words()) {
        const Word* scales = words + int64_t{bits} * kBlockColumns + column % kPanel;
        const float scale = widen(Dtype::Bf16, scales, half);
        const float minimum = linear.format == Format::Int4 ? widen(Dtype::Bf16, scales + kPanel, half) : 0.0f;
        for (int k = 0; k < kGroup; ++k) {
            const Place place = place_of(linear.format, k);
            const Word field = words[place.word * kBlockColumns + column] >> place.shift;
            const int value = linear.format == Format::Int8 ? static_cast<int8_t>(field) : static_cast<int>(field & 15);
            *out++ = scale * static_cast<float>(value) + minimum;
        }
    }
}

}  // namespace shoal
