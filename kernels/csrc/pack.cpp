// Packs weights into their layout, once, when the model is loaded.
#include <algorithm>
#include <cstring>

#include "coded.h"

namespace shoal {

namespace {

float widen(Dtype dtype, const void* data, int64_t at) {
    if (dtype == Dtype::Float32) return static_cast<const float*>(data)[at];
    const uint32_t bits = static_cast<uint32_t>(static_cast<const uint16_t*>(data)[at]) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// The output at a packed column, or -1 after the end of a ragged last block.
int output_at(const Linear& linear, int64_t column) {
    if (!linear.gated) return column < linear.outputs ? static_cast<int>(column) : -1;
    const int half = linear.outputs / 2;
    const int64_t unit = column / kBlockColumns * kPanel + column % kPanel;
    if (unit >= half) return -1;
    return static_cast<int>(column % kBlockColumns < kPanel ? unit : half + unit);
}

Linear describe_linear(Dtype dtype, Format format, int outputs, int inputs, bool gated) {
    Linear linear;
    linear.dtype = dtype;
    linear.format = format;
    linear.outputs = outputs;
    linear.inputs = inputs;
    linear.gated = gated;
    linear.blocks = static_cast<int>(gated ? divide_up(outputs / 2, kPanel) : divide_up(outputs, kBlockColumns));
    return linear;
}

Linear make_linear(Arena& arena, Dtype dtype, Format format, int outputs, int inputs, bool gated) {
    Linear linear = describe_linear(dtype, format, outputs, inputs, gated);
    linear.words = arena.words(linear.blocks * linear.block_words());
    return linear;
}

// Calls place(column of the block, output) for every column of a block that has an output.
template <class Place>
void for_each_column(const Linear& linear, int64_t block, const Place& place) {
    for (int c = 0; c < kBlockColumns; ++c) {
        const int output = output_at(linear, block * kBlockColumns + c);
        if (output >= 0) place(c, output);
    }
}

// Packs a block as words [inputs / pack][32], from a weight whose rows consist of such words.
void pack_block(const Linear& linear, const Word* weight, int64_t number, Word* block) {
    const int steps = linear.steps();
    for_each_column(linear, number, [&](int column, int output) {
        const Word* row = weight + static_cast<int64_t>(output) * steps;
        for (int s = 0; s < steps; ++s) block[s * kBlockColumns + column] = row[s];
    });
}

// Where input k of a group is stored: its word, and the first of its 8 or 4 bits.
struct Place {
    int word, shift;
};

Place place_of(Format format, int k) {
    const int bits = static_cast<int>(format), per_word = 32 / bits, in_word = k % per_word;
    return {k / per_word, in_word % 2 * 16 + in_word / 2 * bits};
}

void unpack_coded(const Linear& linear, int output, float* out) {
    const int64_t block = output / kBlockColumns;
    const int column = output % kBlockColumns, half = column / kPanel;
    const auto* tile = reinterpret_cast<const uint8_t*>(linear.block(block));
    const uint8_t* top = linear.tops_of(block);
    for (int i = 0; i < 2 * linear.groups(); tile += tile_bytes(top[i]), ++i) {
        if (i % 2 != half) continue;
        uint16_t values[kGroup];
        decode_column(tile, top[i], column % kPanel, values);
        for (int k = 0; k < kGroup; ++k) *out++ = widen(Dtype::Bf16, values, k);
    }
}

}  // namespace

Linear pack_linear(Arena& arena, Dtype dtype, const void* weight, int outputs, int inputs, bool gated) {
    const Linear linear = make_linear(arena, dtype, Format::Plain, outputs, inputs, gated);
    for (int b = 0; b < linear.blocks; ++b) pack_block(linear, static_cast<const Word*>(weight), b, linear.block(b));
    return linear;
}

Linear code_linear(Arena& arena, const void* weight, int outputs, int inputs, bool gated) {
    Linear linear = describe_linear(Dtype::Bf16, Format::Coded, outputs, inputs, gated);
    std::vector<Word> plain(static_cast<size_t>(linear.steps()) * kBlockColumns);
    std::vector<uint8_t> bytes;
    // An upper bound: about a quarter stays untouched.
    bytes.reserve(static_cast<size_t>(linear.blocks) * linear.groups() * 2 * kPlainBytes);
    for (int b = 0; b < linear.blocks; ++b) {
        std::fill(plain.begin(), plain.end(), 0);
        pack_block(linear, static_cast<const Word*>(weight), b, plain.data());
        linear.starts.push_back(static_cast<int64_t>(bytes.size() / sizeof(Word)));
        code_block(plain.data(), linear.groups(), bytes, linear.tops);
    }
    linear.starts.push_back(static_cast<int64_t>(bytes.size() / sizeof(Word)));
    linear.words = arena.words(linear.starts.back());
    std::copy(bytes.begin(), bytes.end(), reinterpret_cast<uint8_t*>(linear.words));
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
    Linear linear = make_integers(arena, integers.format, outputs, inputs, gated);
    linear.row_bits = integers.row_bits;
    const int64_t groups = linear.groups();
    for (int b = 0; b < linear.blocks; ++b)
        for_each_column(linear, b, [&](int column, int output) {
            const int64_t row = output;
            pack_output(linear, linear.block(b), column, integers.values + row * inputs, integers.scales + row * groups,
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
    if (linear.format == Format::Coded) return unpack_coded(linear, output, out);
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
