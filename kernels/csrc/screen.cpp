#include "screen.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <numeric>

#include "decoder.h"

namespace shoal {

namespace {

constexpr float kLongest = 1e30f;  // limits for a row, and for a column of the head, so that their product is finite
constexpr double kLargestColumn = 1e6;
constexpr float kUnderflow = 1e-30f;  // a generous bound on the sum of products below float32's normal numbers

float widen(uint16_t value) {
    const uint32_t bits = static_cast<uint32_t>(value) << 16;
    float out;
    std::memcpy(&out, &bits, sizeof out);
    return out;
}

// Rounds a positive number to the nearest bf16.
uint16_t narrow(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

struct Squares {
    double weight, error;
};

// Rounds a group of a column to 8 bits: value * scale. Squares are summed in multiples of the scale, because those of
// small weights would be 0.
Squares round_group(const uint16_t* weight, uint8_t* values, uint16_t& scale) {
    constexpr float magic = 12582912.0f;  // adding 1.5 * 2^23 rounds to the nearest integer
    constexpr int lanes = 8;              // parallel sums: a single one would take several times as long
    float w[kGroup], tops[lanes] = {};
    for (int k = 0; k < kGroup; k += lanes)
        for (int lane = 0; lane < lanes; ++lane) {
            w[k + lane] = widen(weight[k + lane]);
            const float size = std::fabs(w[k + lane]);
            tops[lane] = tops[lane] < size ? size : tops[lane];
        }
    const float top = *std::max_element(tops, tops + lanes);
    scale = narrow(top / 127.0f);
    float step = widen(scale);
    if (!(step >= FLT_MIN)) {  // too small to divide by: all values become 0, so the error is the weights themselves
        std::memset(values, 0, kGroup);
        scale = 0;
        const double squares = double{kGroup} * top * top;
        return {squares, squares};
    }
    const float inverse = 1.0f / step;
    float weights[lanes] = {}, errors[lanes] = {};
    for (int k = 0; k < kGroup; k += lanes)
        for (int lane = 0; lane < lanes; ++lane) {
            const float exact = w[k + lane] * inverse, rounded = (exact + magic) - magic;
            const float value = rounded > 127.0f ? 127.0f : rounded < -127.0f ? -127.0f : rounded;
            values[k + lane] = static_cast<uint8_t>(static_cast<int32_t>(value));
            weights[lane] += exact * exact;
            errors[lane] += (exact - value) * (exact - value);
        }
    const double square = double{step} * step;
    return {std::accumulate(weights, weights + lanes, 0.0f) * square, std::accumulate(errors, errors + lanes, 0.0f) * square};
}

// An upper bound on the length (Euclidean norm) of a row.
float length(const Word* row, int64_t words) {
    float squares = 0.0f;
    for (int64_t i = 0; i < words; ++i) {
        const float low = widen(static_cast<uint16_t>(row[i])), high = widen(static_cast<uint16_t>(row[i] >> 16));
        squares += low * low + high * high;
    }
    return std::sqrt(squares) * 1.001f;
}

bool is_finite(const uint16_t* weights, int count) {
    constexpr uint16_t exponent = 0x7f80;
    uint16_t is_endless = 0;  // no early exit, so that the loop is vectorised
    for (int i = 0; i < count; ++i) is_endless |= (weights[i] & exponent) == exponent;
    return is_endless == 0;
}

}  // namespace

Screen make_screen(Arena& arena, const void* weight, int outputs, int inputs) {
    const auto* source = static_cast<const uint16_t*>(weight);
    if (inputs % kGroup != 0) return {};
    for (int64_t column = 0; column < outputs; ++column)
        if (!is_finite(source + column * inputs, inputs)) return {};
    const int groups = inputs / kGroup;
    // Errors besides the rounding of weights: rounding the row to 16 bits, at most sqrt(32) / 65534 of its length; and
    // rounding in both products' float32 sums, at most one unit in the last place per input.
    const double others = 1e-4 + inputs * 0x1p-23;
    std::vector<uint8_t> values(static_cast<size_t>(inputs));
    std::vector<uint16_t> scales(static_cast<size_t>(groups));
    Screen screen;
    screen.slack.resize(static_cast<size_t>(divide_up(outputs, kBlockColumns) * kBlockColumns), 0.0f);
    screen.head = make_integers(arena, Format::Int8, outputs, inputs, false);
    for (int column = 0; column < outputs; ++column, source += inputs) {
        double weights = 0.0, errors = 0.0;
        for (int g = 0; g < groups; ++g) {
            const Squares squares = round_group(source + g * kGroup, &values[g * kGroup], scales[g]);
            weights += squares.weight;
            errors += squares.error;
        }
        if (weights >= kLargestColumn * kLargestColumn) return {};
        screen.slack[column] = static_cast<float>((std::sqrt(errors) + others * std::sqrt(weights)) * 1.001) + kUnderflow;
        pack_output(screen.head, screen.head.block(column / kBlockColumns), column % kBlockColumns, values.data(),
                    scales.data(), nullptr);
    }
    return screen;
}

bool Decoder::screens(const ShoalStep& step) const {
    return step.maxima_alone != 0 && has_maxima(step) && exchange_ == nullptr && screen_.head.words != nullptr &&
           step.num_samples <= kernels_.screened_rows;
}

void Decoder::screen_maxima(Team::Member& member, const ShoalStep& step) {
    const int threads = team_.size(), rows = step.num_samples;
    const int64_t vocab = shape_.vocab_size, hidden = shape_.hidden_size, words = hidden / values_per_word(dtype_);
    float* const near = step.logits;
    float* const exact = exact_logits_.data();
    multiply(member, screen_.head, normed_.data(), normed_stride_, rows, near, vocab, Finish::Store);

    const GemmCall call = product(head_, normed_.data(), normed_stride_, 0, exact, vocab, Finish::Store);
    const auto size_of = [&](int64_t first, int64_t end) { return std::min(vocab, end * kBlockColumns) - first * kBlockColumns; };
    // The largest of a row's exact logits, in blocks that have been computed.
    const auto largest = [&](int row, int64_t first, int64_t end) {
        const int64_t begin = first * kBlockColumns;
        const Maximum found = kernels_.row_maximum(exact + row * vocab + begin, size_of(first, end));
        return Maximum{found.value, found.place + begin};
    };
    // First compute, in each part of a row, the block where it seems to be largest. The largest logit found in any part
    // is what a column must reach.
    Maximum* const seen = maxima_.data() + rows * threads;
    member.parallel_for(rows * threads, [&](int i) {
        const int row = i / threads;
        const int64_t first = part_begin(i % threads), end = part_begin(i % threads + 1);
        seen[i] = {kMinusInfinity, 0};
        if (first == end) return;
        const Maximum top = kernels_.row_maximum(near + row * vocab + first * kBlockColumns, size_of(first, end));
        seen[i].value = top.value;
        if (!std::isfinite(top.value)) return;
        const int64_t block = first + top.place / kBlockColumns;
        kernels_.gemm(call, row, row + 1, static_cast<int>(block), static_cast<int>(block) + 1);
        seen[i] = largest(row, block, block + 1);
    });
    // Then compute all blocks that may reach it; a block that any row leaves in question is read once and searched for
    // all.
    member.parallel_for(threads, [&](int part) {
        const int64_t first = part_begin(part), end = part_begin(part + 1);
        float least[kMostScreenedRows], size[kMostScreenedRows];
        for (int row = 0; row < rows; ++row) {
            maxima_[row * threads + part] = {kMinusInfinity, 0};
            least[row] = kMinusInfinity;
            bool is_sure = true;
            for (int t = 0; t < threads; ++t) {
                const float value = seen[row * threads + t].value;
                is_sure &= value == value && value < INFINITY;
                least[row] = std::max(least[row], value);
            }
            size[row] = length(normed_.data() + row * (normed_stride_ / values_per_word(dtype_)), words);
            if (!is_sure || !(size[row] < kLongest)) size[row] = INFINITY;  // the whole row is in question
        }
        const auto is_in_question = [&](int64_t block) {
            const int64_t begin = block * kBlockColumns;
            const int columns = static_cast<int>(std::min<int64_t>(kBlockColumns, vocab - begin));
            const float* const slack = &screen_.slack[begin];
            for (int row = 0; row < rows; ++row) {
                const float* const logits = near + row * vocab + begin;
                int reach = 0;
                for (int c = 0; c < columns; ++c) reach |= !(logits[c] + (size[row] * slack[c] + kUnderflow) < least[row]);
                if (reach != 0) return true;
            }
            return false;
        };
        for (int64_t begin = first; begin < end; ++begin) {
            int64_t stop = begin;
            while (stop < end && is_in_question(stop)) ++stop;
            if (stop == begin) continue;
            kernels_.gemm(call, 0, rows, static_cast<int>(begin), static_cast<int>(stop));
            looked_at_[part] += static_cast<int>(stop - begin);
            for (int row = 0; row < rows; ++row) {
                const Maximum found = largest(row, begin, stop);
                Maximum& most = maxima_[row * threads + part];
                // Of equal values the first is kept; the first NaN counts as larger than any number.
                if (found.value > most.value || (found.value != found.value && most.value == most.value)) most = found;
            }
            begin = stop;
        }
    });
}

}  // namespace shoal
