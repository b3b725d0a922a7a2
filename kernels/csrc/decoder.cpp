#include "decoder.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace shoal {

namespace {

// Bytes that helper threads read ahead between steps: half of a shared cache of usual size, and more than they have
// time to read between two steps of one sequence.
constexpr int64_t kFirstRead = 16 << 20;

const Kernels& choose_kernels(const ShoalShape& shape) {
    const Kernels* kernels = find_kernels(shape.kernels);
    if (kernels == nullptr) throw std::invalid_argument(std::string("kernels: this machine does not run ") + shape.kernels);
    return *kernels;
}

const ShoalShape& checked(const ShoalShape& s) {
    if (s.num_layers < 1) throw std::invalid_argument("num_layers: must be at least 1");
    if (s.num_threads < 1) throw std::invalid_argument("num_threads: must be at least 1");
    const int group = s.num_kv_heads > 0 ? s.num_heads / s.num_kv_heads : 0;
    if (group < 1 || s.num_heads % s.num_kv_heads != 0 || group > kAttentionRows)
        throw std::invalid_argument("num_heads: must be a multiple of num_kv_heads, at most 96 to one");
    if (s.head_size % 16 != 0 || s.head_size < 16 || s.head_size > kMaxHeadSize)
        throw std::invalid_argument("head_size: must be a multiple of 16, at most 256");
    if (s.block_size % kPanel != 0 || s.block_size < kPanel)
        throw std::invalid_argument("block_size: must be a multiple of 16");
    if (s.hidden_size % 2 != 0 || s.intermediate_size % 2 != 0 || s.expert_size % 2 != 0 || s.shared_size % 2 != 0)
        throw std::invalid_argument("hidden_size, intermediate_size, expert_size, shared_size: must be even");
    if (s.experts_per_token < 0 || s.experts_per_token > s.num_experts)
        throw std::invalid_argument("experts_per_token: must be at most num_experts");
    if (s.first_expert < 0 || s.held_experts < (s.num_experts > 0) || s.first_expert > s.num_experts - s.held_experts)
        throw std::invalid_argument("held_experts: must be some of num_experts");
    return s;
}

int64_t in_odd_lines(Dtype dtype, int64_t values) {
    const int64_t values_of_line = kPanel * values_per_word(dtype);
    return (divide_up(values, values_of_line) | 1) * values_of_line;
}

void expect(int64_t count, int64_t size) {
    if (count != size) throw std::invalid_argument("parameter: " + std::to_string(count) + " values, not " + std::to_string(size));
}

}  // namespace

Decoder::Decoder(const ShoalShape& shape, std::unique_ptr<Exchange> exchange)
    : shape_(checked(shape)),
      dtype_(static_cast<Dtype>(shape.dtype)),
      kernels_(choose_kernels(shape)),
      exchange_(std::move(exchange)),
      pool_(shape.num_layers, shape.num_blocks,
            int64_t{2} * shape.num_kv_heads * (shape.block_size / kPanel) * page_words(dtype_, shape.head_size)),
      layers_(static_cast<size_t>(shape.num_layers)),
      normed_stride_(in_odd_lines(dtype_, shape.hidden_size)),
      attended_stride_(in_odd_lines(dtype_, shape.num_heads * shape.head_size)),
      gated_stride_(in_odd_lines(dtype_, mlp_size())),
      expert_stride_(in_odd_lines(dtype_, shape.expert_size)),
      gates_(shape.gelu ? Finish::GeGlu : Finish::SwiGlu),
      team_(shape.num_threads) {
    if (exchange_ != nullptr && exchange_->capacity < std::max<int64_t>(shape.hidden_size, vocab_share()))
        throw std::invalid_argument("exchange: capacity: a row does not fit");
    for (Layer& layer : layers_) {
        layer.expert_gate_up.resize(static_cast<size_t>(shape.held_experts));
        layer.expert_down.resize(static_cast<size_t>(shape.held_experts));
    }
}

Decoder::Matrix Decoder::matrix(ShoalParameter parameter, int layer) {
    if (layer < 0 || layer >= shape_.num_layers) throw std::out_of_range("layer");
    const int hidden = shape_.hidden_size, intermediate = shape_.intermediate_size;
    const int queries = shape_.num_heads * shape_.head_size, kv = shape_.num_kv_heads * shape_.head_size;
    Layer& l = layers_[static_cast<size_t>(layer)];
    switch (parameter) {
        case SHOAL_EMBEDDING: return {&embedding_, shape_.vocab_rows, hidden, false};
        case SHOAL_HEAD: return {&head_, shape_.vocab_rows, hidden, false};
        case SHOAL_QKV: return {&l.qkv, queries + 2 * kv, hidden, false};
        case SHOAL_OUTPUT: return {&l.output, hidden, queries, false};
        case SHOAL_GATE_UP: return {&l.gate_up, 2 * intermediate, hidden, true};
        case SHOAL_DOWN: return {&l.down, hidden, intermediate, false};
        case SHOAL_SHARED_GATE_UP: return {&l.gate_up, 2 * shape_.shared_size, hidden, true};
        case SHOAL_SHARED_DOWN: return {&l.down, hidden, shape_.shared_size, false};
        case SHOAL_ROUTER: return {&l.router, shape_.num_experts, hidden, false};
        case SHOAL_EXPERT_GATE_UP:
            return {l.expert_gate_up.data(), 2 * shape_.expert_size, hidden, true, shape_.held_experts};
        case SHOAL_EXPERT_DOWN: return {l.expert_down.data(), hidden, shape_.expert_size, false, shape_.held_experts};
        default: return {nullptr, 0, 0, false};
    }
}

Linear Decoder::pack(Arena& arena, const void* weight, int outputs, int inputs, bool gated) const {
    const bool codes = kernels_.codes && dtype_ == Dtype::Bf16 && inputs % kGroup == 0;
    return codes ? code_linear(arena, weight, outputs, inputs, gated)
                 : pack_linear(arena, dtype_, weight, outputs, inputs, gated);
}

void Decoder::set_parameter(ShoalParameter parameter, int layer, const void* data, int64_t count) {
    if (const Matrix m = matrix(parameter, layer); m.linear != nullptr) {
        expect(count, m.count * m.values());
        const int64_t bytes = m.values() * int64_t{sizeof(Word)} / values_per_word(dtype_);
        for (int i = 0; i < m.count; ++i)
            m.linear[i] = pack(arena_, static_cast<const char*>(data) + i * bytes, m.outputs, m.inputs, m.gated);
        if (parameter == SHOAL_HEAD && shape_.is_last_stage && exchange_ == nullptr && dtype_ == Dtype::Bf16 &&
            kernels_.screened_rows > 0)
            screen_ = make_screen(arena_, data, m.outputs, m.inputs);
        return;
    }
    Layer& l = layers_[static_cast<size_t>(layer)];
    const auto vector = [&](std::vector<float>& weight, int size) {
        expect(count, size);
        const auto* const values = static_cast<const float*>(data);
        weight.assign(values, values + size);
    };
    const auto post_norm = [&](std::vector<float>& weight) {
        vector(weight, shape_.hidden_size);
        has_post_norms_ = true;
    };
    const auto head_norm = [&](std::vector<float>& weight, int heads) {
        vector(weight, shape_.norms_span_heads ? heads * shape_.head_size : shape_.head_size);
    };
    // A bias must be set after its weight, whose packed layout it follows.
    const auto bias = [&](Linear& linear) {
        expect(count, linear.outputs);
        linear.bias = pack_bias(linear, dtype_, data);
    };
    switch (parameter) {
        case SHOAL_FINAL_NORM: return vector(final_norm_, shape_.hidden_size);
        case SHOAL_ATTENTION_NORM: return vector(l.attention_norm, shape_.hidden_size);
        case SHOAL_MLP_NORM: return vector(l.mlp_norm, shape_.hidden_size);
        case SHOAL_ATTENTION_POST_NORM: return post_norm(l.attention_post_norm);
        case SHOAL_MLP_POST_NORM: return post_norm(l.mlp_post_norm);
        case SHOAL_QUERY_NORM: return head_norm(l.query_norm, shape_.num_heads);
        case SHOAL_KEY_NORM: return head_norm(l.key_norm, shape_.num_kv_heads);
        case SHOAL_ROUTER_BIAS: return vector(l.router_bias, shape_.num_experts);
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
    if (integers.row_bits != 16 && integers.row_bits != 8)
        throw std::invalid_argument("activation_bits: must be 16 or 8");
    if ((integers.format == Format::Int4) != (integers.minimums != nullptr))
        throw std::invalid_argument("minimums: 4 bits need them, 8 bits have none");
    if (m.inputs % kGroup != 0) throw std::invalid_argument("inputs: must be a multiple of 32");
    expect(count, m.count * m.values());
    has_integers_ = true;
    if (parameter == SHOAL_HEAD) screen_ = {};
    const int64_t groups = m.values() / kGroup;
    for (int i = 0; i < m.count; ++i) {
        const uint16_t* const minimums = integers.minimums != nullptr ? integers.minimums + i * groups : nullptr;
        const Integers mine{integers.format, integers.row_bits, integers.values + i * m.values(),
                            integers.scales + i * groups, minimums};
        m.linear[i] = pack_integers(arena_, mine, m.outputs, m.inputs, m.gated);
    }
}

void Decoder::set_rotary(ShoalRotary table, const float* cos_sin) {
    if (table != SHOAL_ROTARY_FULL && table != SHOAL_ROTARY_WINDOW) throw std::invalid_argument("table");
    cos_sin_[table].assign(cos_sin, cos_sin + static_cast<int64_t>(shape_.max_positions) * shape_.head_size);
}

void Decoder::set_layer(int layer, bool has_window, ShoalRotary rotary) {
    if (layer < 0 || layer >= shape_.num_layers) throw std::invalid_argument("layer");
    if (rotary < SHOAL_ROTARY_FULL || rotary > SHOAL_UNROTATED) throw std::invalid_argument("rotary");
    layers_[static_cast<size_t>(layer)].has_window = has_window;
    layers_[static_cast<size_t>(layer)].rotary = rotary;
    if (rotary != SHOAL_UNROTATED) return;
    std::vector<float>& none = cos_sin_[SHOAL_UNROTATED];
    none.assign(static_cast<size_t>(shape_.head_size), 0.0f);
    std::fill_n(none.begin(), shape_.head_size / 2, 1.0f);
}

void Decoder::list_first_read() {
    int64_t left = kFirstRead;
    for (const Layer& layer : layers_)
        for (const Linear* linear : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down}) {
            if (linear->words == nullptr) continue;  // of a layer with experts alone, which are not known beforehand
            const int64_t bytes = std::min(left, linear->start(linear->blocks) * int64_t{sizeof(Word)});
            first_read_.push_back({reinterpret_cast<const char*>(linear->words), bytes});
            left -= bytes;
        }
}

void Decoder::check(const ShoalStep& step) const {
    const int64_t slots = static_cast<int64_t>(shape_.num_blocks) * shape_.block_size;
    for (int i = 0; i < step.num_tokens; ++i) {
        if (step.input_ids[i] < 0 || step.input_ids[i] >= shape_.vocab_size) throw std::out_of_range("token id");
        if (step.positions[i] < 0 || step.positions[i] >= shape_.max_positions) throw std::out_of_range("position");
        if (step.slots[i] < 0 || step.slots[i] >= slots) throw std::out_of_range("slot");
    }
    if (step.query_start_loc[0] != 0 || step.query_start_loc[step.num_seqs] != step.num_tokens)
        throw std::out_of_range("query_start_loc");
    for (int s = 0; s < step.num_seqs; ++s) {
        const int num_queries = step.query_start_loc[s + 1] - step.query_start_loc[s];
        if (num_queries < 0 || step.seq_lens[s] < num_queries) throw std::out_of_range("seq_lens");
        if (divide_up(step.seq_lens[s], shape_.block_size) > step.table_stride) throw std::out_of_range("block_tables");
        for (int b = 0; b < divide_up(step.seq_lens[s], shape_.block_size); ++b) {
            const int32_t block = step.block_tables[s * step.table_stride + b];
            if (block < 0 || block >= shape_.num_blocks) throw std::out_of_range("block id");
        }
    }
    for (int s = 0; step.adapters != nullptr && s < step.num_seqs; ++s)
        if (step.adapters[s] >= 0) adapter(step.adapters[s]);
    for (int i = 0; i < step.num_samples; ++i)
        if (step.sample_rows[i] < 0 || step.sample_rows[i] >= step.num_tokens) throw std::out_of_range("sample row");
}

}  // namespace shoal
