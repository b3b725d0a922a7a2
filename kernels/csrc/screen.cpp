#include "screen.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "decoder.h"

namespace shoal {

namespace {

constexpr float kLongest = 1e30f;  // a row and a column of the head: their product is finite
constexpr float kLargestColumn = 1e6f;

float widen(uint16_t value) {
    const uint32_t bits = static_cast<uint32_t>(value) << 16;
    float out;
    std::memcpy(&out, &bits, sizeof out);
    return out;
}

// A positive number, to the nearest bf16.
uint16_t narrow(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

struct Squares {
    float weight, error;
};

// A group of a column in 8 bits: value * scale.
Squares round_group(const uint16_t* weight, uint8_t* values, uint16_t& scale) {
    constexpr float magic = 12582912.0f;  // adding 1.5 * 2^23 rounds to the nearest integer
    float w[kGroup], top = 0.0f;
    for (int k = 0; k < kGroup; ++k) {
        w[k] = widen(weight[k]);
        top = std::max(top, std::fabs(w[k]));
    }
    scale = narrow(top / 127.0f);
    const float step = widen(scale), inverse = step > 0.0f ? 1.0f / step : 0.0f;
    Squares squares{};
    for (int k = 0; k < kGroup; ++k) {
        const float value = std::min(std::max((w[k] * inverse + magic) - magic, -127.0f), 127.0f);
        values[k] = static_cast<uint8_t>(static_cast<int8_t>(value));
        squares.weight += w[k] * w[k];
        squares.error += (w[k] - value * step) * (w[k] - value * step);
    }
    return squares;
}

// No shorter than the row is.
float length(const Word* row, int64_t words) {
    float squares = 0.0f;
    for (int64_t i = 0; i < words; ++i) {
        const float low = widen(static_cast<uint16_t>(row[i])), high = widen(static_cast<uint16_t>(row[i] >> 16));
        squares += low * low + high * high;
    }
    return std::sqrt(squares) * 1.001f;
}

}  // namespace

Screen make_screen(Arena& arena, const void* weight, int outputs, int inputs) {
    if (inputs % kGroup != 0) return {};
    const int groups = inputs / kGroup;
    // Besides the rounding of weights: that of the row to 16 bits, at most sqrt(32) / 65534 of its length, and that of both
    // products' sums in float32, at most one unit in the last place for each input.
    const float others = 1e-4f + static_cast<float>(inputs) * 0x1p-23f;
    std::vector<uint8_t> values(static_cast<size_t>(outputs) * inputs);
    std::vector<uint16_t> scales(static_cast<size_t>(outputs) * groups);
    Screen screen;
    screen.slack.resize(static_cast<size_t>(divide_up(outputs, kBlockColumns) * kBlockColumns), 0.0f);
    const auto* source = static_cast<const uint16_t*>(weight);
    for (int64_t column = 0; column < outputs; ++column) {
        float weights = 0.0f, errors = 0.0f;
        for (int64_t g = column * groups; g < (column + 1) * groups; ++g) {
            const Squares squares = round_group(source + g * kGroup, &values[g * kGroup], scales[g]);
            weights += squares.weight;
            errors += squares.error;
        }
        if (!(weights < kLargestColumn * kLargestColumn)) return {};  // or NaN
        screen.slack[column] = (std::sqrt(errors) + others * std::sqrt(weights)) * 1.001f + 1e-30f;
    }
    screen.head = pack_integers(arena, {Format::Int8, values.data(), scales.data(), nullptr}, outputs, inputs, false);
    return screen;
}

void Decoder::screen_maxima(Team::Member& member, const ShoalStep& step) {
    const int threads = team_.size(), parts = step.num_samples * threads;
    const int64_t vocab = shape_.vocab_size, hidden = shape_.hidden_size, words = hidden / values_per_word(dtype_);
    float* const near = own_logits_.data();
    float* const exact = near + step.num_samples * vocab;
    multiply(member, screen_.head, normed_.data(), hidden, step.num_samples, near, vocab, Finish::Store);

    const GemmCall call = product(head_, normed_.data(), hidden, 0, exact, vocab, Finish::Store);
    // The exact logits of blocks [first, end) of a row, and the largest of them.
    const auto look = [&](int row, int64_t first, int64_t end) {
        kernels_.gemm(call, row, row + 1, static_cast<int>(first), static_cast<int>(end));
        const int64_t begin = first * kBlockColumns, size = std::min(vocab, end * kBlockColumns) - begin;
        const Maximum found = kernels_.row_maximum(exact + row * vocab + begin, size);
        return Maximum{found.value, found.place + begin};
    };
    // First where the row seems to be largest. That of its parts' largest is what a column must reach.
    Maximum* const seen = maxima_.data() + parts;
    member.parallel_for(parts, [&](int i) {
        const int row = i / threads;
        const int64_t first = part_begin(i % threads), end = part_begin(i % threads + 1), begin = first * kBlockColumns;
        seen[i] = {kMinusInfinity, 0};
        if (first == end) return;
        const float* const logits = near + row * vocab + begin;
        const Maximum top = kernels_.row_maximum(logits, std::min(vocab, end * kBlockColumns) - begin);
        seen[i].value = top.value;
        if (!std::isfinite(top.value)) return;
        const int64_t block = first + top.place / kBlockColumns;
        seen[i] = look(row, block, block + 1);
    });
    member.parallel_for(parts, [&](int i) {
        const int row = i / threads;
        const int64_t first = part_begin(i % threads), end = part_begin(i % threads + 1);
        maxima_[i] = {kMinusInfinity, 0};
        if (first == end) return;
        const Maximum* const row_seen = seen + row * threads;
        float least = row_seen[0].value;
        bool is_sure = true;
        for (int t = 0; t < threads; ++t) {
            is_sure &= row_seen[t].value == row_seen[t].value && row_seen[t].value < INFINITY;
            least = std::max(least, row_seen[t].value);
        }
        const float size = length(normed_.data() + row * words, words);
        if (!is_sure || !(size < kLongest)) {
            maxima_[i] = look(row, first, end);
            return;
        }
        for (int64_t block = first; block < end; ++block) {
            const int64_t begin = block * kBlockColumns;
            const int columns = static_cast<int>(std::min<int64_t>(kBlockColumns, vocab - begin));
            const float* const logits = near + row * vocab + begin;
            const float* const slack = &screen_.slack[begin];
            int reach = 0;
            for (int c = 0; c < columns; ++c) reach |= logits[c] + size * slack[c] >= least;
            if (reach == 0) continue;
            const Maximum found = look(row, block, block + 1);
            if (found.value > maxima_[i].value) maxima_[i] = found;  // of equals the first
        }
    });
}

}  // namespace shoal
