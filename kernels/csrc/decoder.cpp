#include "decoder.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

namespace shoal {

namespace {

constexpr int kRowChunk = 10 * 12;    // rows of a product's unit: ten register tiles, which the second-level cache holds
constexpr int kSplitKeys = 512;       // keys of one part of a long decode; fixed, so that results do not depend on threads

const Kernels& choose_kernels(const ShoalShape& shape) {
    const Kernels* kernels = find_kernels(shape.kernels);
    if (kernels == nullptr) throw std::invalid_argument(std::string("kernels: this machine does not run ") + shape.kernels);
    return *kernels;
}

const ShoalShape& checked(const ShoalShape& s) {
    const int group = s.num_kv_heads > 0 ? s.num_heads / s.num_kv_heads : 0;
    if (group < 1 || s.num_heads % s.num_kv_heads != 0 || group > kAttentionRows)
        throw std::invalid_argument("num_heads: must be a multiple of num_kv_heads, at most 96 to one");
    if (s.head_size % 16 != 0 || s.head_size < 16 || s.head_size > kMaxHeadSize)
        throw std::invalid_argument("head_size: must be a multiple of 16, at most 256");
    if (s.block_size % kPanel != 0 || s.block_size < kPanel)
        throw std::invalid_argument("block_size: must be a multiple of 16");
    if (s.hidden_size % 2 != 0 || s.intermediate_size % 2 != 0)
        throw std::invalid_argument("hidden_size, intermediate_size: must be even");
    return s;
}

std::vector<float> widen(Dtype dtype, const void* data, int size) {
    std::vector<float> out(static_cast<size_t>(size));
    if (dtype == Dtype::Float32) {
        std::memcpy(out.data(), data, out.size() * sizeof(float));
        return out;
    }
    for (int i = 0; i < size; ++i) {
        const uint32_t bits = static_cast<uint32_t>(static_cast<const uint16_t*>(data)[i]) << 16;
        std::memcpy(&out[i], &bits, sizeof bits);
    }
    return out;
}

void expect(int64_t count, int64_t size) {
    if (count != size) throw std::invalid_argument("parameter: " + std::to_string(count) + " values, not " + std::to_string(size));
}

}  // namespace

Decoder::Decoder(const ShoalShape& shape)
    : shape_(checked(shape)),
      dtype_(static_cast<Dtype>(shape.dtype)),
      kernels_(choose_kernels(shape)),
      team_(shape.num_threads),
      pool_(shape.num_layers, shape.num_blocks,
            int64_t{2} * shape.num_kv_heads * (shape.block_size / kPanel) * page_words(dtype_, shape.head_size)),
      layers_(static_cast<size_t>(shape.num_layers)),
      gated_stride_(static_cast<int>(divide_up(shape.intermediate_size, kPanel) * kPanel)) {}

Decoder::Matrix Decoder::matrix(ShoalParameter parameter, int layer) {
    if (layer < 0 || layer >= shape_.num_layers) throw std::out_of_range("layer");
    const int hidden = shape_.hidden_size, intermediate = shape_.intermediate_size;
    const int queries = shape_.num_heads * shape_.head_size, kv = shape_.num_kv_heads * shape_.head_size;
    Layer& l = layers_[static_cast<size_t>(layer)];
    switch (parameter) {
        case SHOAL_EMBEDDING: return {&embedding_, shape_.vocab_size, hidden, false};
        case SHOAL_HEAD: return {&head_, shape_.vocab_size, hidden, false};
        case SHOAL_QKV: return {&l.qkv, queries + 2 * kv, hidden, false};
        case SHOAL_OUTPUT: return {&l.output, hidden, queries, false};
        case SHOAL_GATE_UP: return {&l.gate_up, 2 * intermediate, hidden, true};
        case SHOAL_DOWN: return {&l.down, hidden, intermediate, false};
        default: return {nullptr, 0, 0, false};
    }
}

void Decoder::set_parameter(ShoalParameter parameter, int layer, const void* data, int64_t count) {
    if (const Matrix m = matrix(parameter, layer); m.linear != nullptr) {
        expect(count, int64_t{m.outputs} * m.inputs);
        *m.linear = pack_linear(arena_, dtype_, data, m.outputs, m.inputs, m.gated);
        return;
    }
    Layer& l = layers_[static_cast<size_t>(layer)];
    const auto norm = [&](std::vector<float>& weight, int size) {
        expect(count, size);
        weight = widen(dtype_, data, size);
    };
    // A bias is set after its weight, whose packing it follows.
    const auto bias = [&](Linear& linear) {
        expect(count, linear.outputs);
        linear.bias = pack_bias(linear, dtype_, data);
    };
    switch (parameter) {
        case SHOAL_FINAL_NORM: return norm(final_norm_, shape_.hidden_size);
        case SHOAL_INPUT_NORM: return norm(l.input_norm, shape_.hidden_size);
        case SHOAL_POST_NORM: return norm(l.post_norm, shape_.hidden_size);
        case SHOAL_QUERY_NORM: return norm(l.query_norm, shape_.head_size);
        case SHOAL_KEY_NORM: return norm(l.key_norm, shape_.head_size);
        case SHOAL_QKV_BIAS: return bias(l.qkv);
        case SHOAL_OUTPUT_BIAS: return bias(l.output);
        case SHOAL_GATE_UP_BIAS: return bias(l.gate_up);
        case SHOAL_DOWN_BIAS: return bias(l.down);
        default: throw std::invalid_argument("parameter");
    }
}

void Decoder::set_integers(ShoalParameter parameter, int layer, const Integers& integers, int64_t count) {
    const Matrix m = matrix(parameter, layer);
    if (m.linear == nullptr) throw std::invalid_argument("parameter: only matrices may be integers");
    if (dtype_ != Dtype::Bf16) throw std::invalid_argument("dtype: integer weights need bfloat16 activations");
    if (integers.format != Format::Int8 && integers.format != Format::Int4)
        throw std::invalid_argument("bits: must be 8 or 4");
    if ((integers.format == Format::Int4) != (integers.minimums != nullptr))
        throw std::invalid_argument("minimums: 4 bits need them, 8 bits have none");
    if (m.inputs % kGroup != 0) throw std::invalid_argument("inputs: must be a multiple of 32");
    expect(count, int64_t{m.outputs} * m.inputs);
    has_integers_ = true;
    *m.linear = pack_integers(arena_, integers, m.outputs, m.inputs, m.gated);
}

void Decoder::set_rotary(const float* cos_sin) {
    cos_sin_.assign(cos_sin, cos_sin + static_cast<int64_t>(shape_.max_positions) * shape_.head_size);
}

void Decoder::check(const ShoalStep& step) const {
    const int64_t slots = static_cast<int64_t>(shape_.num_blocks) * shape_.block_size;
    for (int i = 0; i < step.num_tokens; ++i) {
        if (step.input_ids[i] < 0 || step.input_ids[i] >= shape_.vocab_size) throw std::out_of_range("token id");
        if (step.positions[i] < 0 || step.positions[i] >= shape_.max_positions) throw std::out_of_range("position");
        if (step.slots[i] < 0 || step.slots[i] >= slots) throw std::out_of_range("slot");
    }
    for (int s = 0; s < step.num_seqs; ++s)
        for (int b = 0; b < divide_up(step.seq_lens[s], shape_.block_size); ++b) {
            const int32_t block = step.block_tables[s * step.table_stride + b];
            if (block < 0 || block >= shape_.num_blocks) throw std::out_of_range("block id");
        }
    for (int i = 0; i < step.num_samples; ++i)
        if (step.sample_rows[i] < 0 || step.sample_rows[i] >= step.num_tokens) throw std::out_of_range("sample row");
}

void Decoder::reserve(int64_t tokens, int64_t samples) {
    const int64_t pack = values_per_word(dtype_), heads = shape_.num_heads, size = shape_.head_size;
    residual_.reserve(tokens * shape_.hidden_size);
    normed_.reserve(std::max(tokens, samples) * shape_.hidden_size / pack);
    qkv_.reserve(tokens * (heads + 2 * shape_.num_kv_heads) * size);
    queries_.reserve(tokens * heads * size / pack);
    attended_.reserve(tokens * heads * size / pack);
    gated_.reserve(tokens * gated_stride_ / pack);
    sampled_.reserve(samples * shape_.hidden_size);
    if (!has_integers_) return;
    const int64_t widest = std::max({int64_t{shape_.hidden_size}, heads * size, int64_t{shape_.intermediate_size}});
    integers_.reserve(std::max(tokens, samples) * widest / 2);
    integer_scales_.reserve(std::max(tokens, samples) * widest / kGroup);
    integer_sums_.reserve(std::max(tokens, samples) * widest / kGroup);
}

void Decoder::plan_attention(const ShoalStep& step) {
    const int group = shape_.num_heads / shape_.num_kv_heads, window = shape_.sliding_window;
    const int tokens_of_unit = std::max(1, kAttentionRows / group);
    int places = 0;
    units_.clear();
    split_.clear();
    parts_.clear();
    for (int s = 0; s < step.num_seqs; ++s) {
        const int begin = step.query_start_loc[s], end = step.query_start_loc[s + 1];
        for (int row = begin; row < end; row += tokens_of_unit) {
            const int tokens = std::min(tokens_of_unit, end - row), position = step.seq_lens[s] - (end - row);
            const int oldest = window > 0 ? std::max(0, position - window + 1) : 0, newest = position + tokens;
            const bool split = end - begin == 1 && newest - oldest > kSplitKeys;
            for (int head = 0; head < shape_.num_kv_heads; ++head) {
                AttentionUnit unit{s, head, row, tokens, position, oldest, newest, -1};
                if (!split) {
                    units_.push_back(unit);
                    continue;
                }
                const int first = places;
                for (int key = oldest; key < newest; key = unit.key_end) {
                    unit.key_begin = key;
                    unit.key_end = std::min(newest, (key / kSplitKeys + 1) * kSplitKeys);
                    unit.partial = places++;
                    if (unit.partial == first) split_.push_back(unit);
                    units_.push_back(unit);
                }
                parts_.push_back(places - first);
            }
        }
    }
    // The longest first, so that no thread is left with one when the others are done.
    std::stable_sort(units_.begin(), units_.end(), [](const AttentionUnit& a, const AttentionUnit& b) {
        return int64_t{a.tokens} * (a.key_end - a.key_begin) > int64_t{b.tokens} * (b.key_end - b.key_begin);
    });
    partials_.reserve(static_cast<int64_t>(places) * group * (shape_.head_size + 2));
}

void Decoder::normalise(Team::Member& member, const float* x, const std::vector<float>& weight, int rows) {
    const int hidden = shape_.hidden_size;
    auto* out = reinterpret_cast<char*>(normed_.data());
    const int64_t row_bytes = static_cast<int64_t>(hidden) * (4 / values_per_word(dtype_));
    const int chunk = static_cast<int>(divide_up(rows, team_.size() * 4));
    member.parallel_for(static_cast<int>(divide_up(rows, chunk)), [&](int i) {
        for (int row = i * chunk; row < std::min(rows, (i + 1) * chunk); ++row)
            kernels_.rms_norm(dtype_, x + static_cast<int64_t>(row) * hidden, weight.data(), shape_.rms_norm_eps,
                              out + row * row_bytes, hidden);
    });
}

void Decoder::multiply(Team::Member& member, const Linear& linear, const Word* x, int64_t x_values, int rows, void* out,
                       int64_t out_stride, Finish finish) {
    GemmCall call{&linear, x, {}, x_values / values_per_word(dtype_), out, out_stride, finish};
    if (linear.format != Format::Plain) {
        call.integers = {integers_.data(), integer_scales_.data(), integer_sums_.data()};
        const int chunk = static_cast<int>(divide_up(rows, team_.size() * 4));
        member.parallel_for(static_cast<int>(divide_up(rows, chunk)), [&](int i) {
            for (int row = i * chunk; row < std::min(rows, (i + 1) * chunk); ++row)
                kernels_.round_row(x + row * call.x_stride, call.integers, row, linear.inputs);
        });
        call.x = call.integers.values;
        call.x_stride = linear.inputs / 2;
    }
    const int row_chunks = static_cast<int>(divide_up(rows, kRowChunk));
    // A multiple of the threads, and not so many that taking a unit shows.
    const int threads = team_.size();
    const int parts = threads == 1 ? 1 : threads * std::clamp(linear.blocks / (8 * threads), 1, 8);
    member.parallel_for(row_chunks * parts, [&](int i) {
        const int64_t chunk = i / parts, part = i % parts;
        kernels_.gemm(call, static_cast<int>(rows * chunk / row_chunks), static_cast<int>(rows * (chunk + 1) / row_chunks),
                      static_cast<int>(linear.blocks * part / parts), static_cast<int>(linear.blocks * (part + 1) / parts));
    });
}

void Decoder::attend(Team::Member& member, const ShoalStep& step, int index) {
    const Layer& layer = layers_[static_cast<size_t>(index)];
    const int rows = step.num_tokens, chunk = static_cast<int>(divide_up(rows, team_.size() * 4));
    const auto norm = [](const std::vector<float>& w) { return w.empty() ? nullptr : w.data(); };
    const RotaryCall rotary{qkv_.data(), queries_.data(), pool_.layer(index), step.positions, step.slots, cos_sin_.data(),
                            norm(layer.query_norm), norm(layer.key_norm), shape_.rms_norm_eps, rows, shape_.num_heads,
                            shape_.num_kv_heads, shape_.head_size, shape_.block_size};
    member.parallel_for(static_cast<int>(divide_up(rows, chunk)), [&](int i) {
        kernels_.rotary(dtype_, rotary, i * chunk, std::min(rows, (i + 1) * chunk));
    });
    const AttentionCall call{queries_.data(), pool_.layer(index), step.block_tables, step.table_stride, attended_.data(),
                             partials_.data(), 1.0f / std::sqrt(static_cast<float>(shape_.head_size)), rows,
                             shape_.num_heads, shape_.num_kv_heads, shape_.head_size, shape_.block_size,
                             shape_.sliding_window};
    const int units = static_cast<int>(units_.size()), threads = team_.size();
    member.parallel_for(units, [&](int i) {
        kernels_.attention(dtype_, call, units_[i], units_[std::min(i + threads, units - 1)]);
    });
    if (split_.empty()) return;
    member.parallel_for(static_cast<int>(split_.size()), [&](int i) { kernels_.merge(dtype_, call, split_[i], parts_[i]); });
}

void Decoder::run_layer(Team::Member& member, const ShoalStep& step, int index) {
    const Layer& layer = layers_[static_cast<size_t>(index)];
    const int rows = step.num_tokens, hidden = shape_.hidden_size;
    const int queries = shape_.num_heads * shape_.head_size;
    normalise(member, residual_.data(), layer.input_norm, rows);
    multiply(member, layer.qkv, normed_.data(), hidden, rows, qkv_.data(), layer.qkv.outputs, Finish::Store);
    attend(member, step, index);
    multiply(member, layer.output, attended_.data(), queries, rows, residual_.data(), hidden, Finish::Add);
    normalise(member, residual_.data(), layer.post_norm, rows);
    multiply(member, layer.gate_up, normed_.data(), hidden, rows, gated_.data(), gated_stride_, Finish::SwiGlu);
    multiply(member, layer.down, gated_.data(), gated_stride_, rows, residual_.data(), hidden, Finish::Add);
}

void Decoder::forward(const ShoalStep& step) {
    check(step);
    if (step.num_tokens == 0) return;
    reserve(step.num_tokens, step.num_samples);
    plan_attention(step);
    const int64_t hidden = shape_.hidden_size;
    const Linear& embedding = shape_.tied_embeddings ? head_ : embedding_;
    team_.run([&](Team::Member& member) {
        member.parallel_for(step.num_tokens, [&](int i) {
            unpack_row(embedding, static_cast<int>(step.input_ids[i]), residual_.data() + i * hidden);
        });
        for (int layer = 0; layer < shape_.num_layers; ++layer) run_layer(member, step, layer);
        if (step.num_samples == 0) return;
        member.parallel_for(step.num_samples, [&](int i) {
            std::memcpy(sampled_.data() + i * hidden, residual_.data() + step.sample_rows[i] * hidden, hidden * sizeof(float));
        });
        normalise(member, sampled_.data(), final_norm_, step.num_samples);
        multiply(member, head_, normed_.data(), hidden, step.num_samples, step.logits, shape_.vocab_size, Finish::Store);
    });
}

}  // namespace shoal
