// Adapters of a decoder: which rows have which, and what they add to the products of a step.
#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "decoder.h"

namespace shoal {

namespace {

constexpr int kAllBlocks = std::numeric_limits<int>::max();

Projection projection_of(ShoalParameter parameter) {
    switch (parameter) {
        case SHOAL_QKV: return Projection::Qkv;
        case SHOAL_OUTPUT: return Projection::Output;
        case SHOAL_GATE_UP: return Projection::GateUp;
        case SHOAL_DOWN: return Projection::Down;
        default: throw std::invalid_argument("parameter: only projections can be adapted");
    }
}

void add_rows(LoraRuns& runs, const LoraAdapter* adapter, int begin, int end) {
    if (adapter == nullptr) return;
    if (!runs.empty() && runs.back().adapter == adapter && runs.back().end == begin)
        runs.back().end = end;
    else
        runs.push_back({adapter, begin, end});
}

// A copy of rows of `from` values as rows of `to` values, with zeros after them, and `more` rows of zeros.
std::vector<char> padded(const void* rows, int64_t count, int64_t from, int64_t to, int64_t more, int64_t value_bytes) {
    std::vector<char> out(static_cast<size_t>((count + more) * to * value_bytes), 0);
    for (int64_t i = 0; i < count; ++i)
        std::memcpy(out.data() + i * to * value_bytes, static_cast<const char*>(rows) + i * from * value_bytes,
                    static_cast<size_t>(from * value_bytes));
    return out;
}

}  // namespace

int Decoder::add_adapter() {
    auto adapter = std::make_unique<LoraAdapter>();
    adapter->layers.resize(static_cast<size_t>(shape_.num_layers));
    const auto free = std::find(adapters_.begin(), adapters_.end(), nullptr);
    const auto slot = free - adapters_.begin();
    if (free == adapters_.end()) adapters_.emplace_back();
    adapters_[static_cast<size_t>(slot)] = std::move(adapter);
    return static_cast<int>(slot);
}

LoraAdapter& Decoder::adapter(int slot) const {
    if (slot < 0 || slot >= static_cast<int>(adapters_.size()) || adapters_[static_cast<size_t>(slot)] == nullptr)
        throw std::out_of_range("adapter");
    return *adapters_[static_cast<size_t>(slot)];
}

void Decoder::remove_adapter(int slot) {
    adapter(slot);
    adapters_[static_cast<size_t>(slot)].reset();
}

void Decoder::set_factors(int slot, ShoalParameter parameter, int layer, int rank, const void* down, const void* up) {
    const auto projection = static_cast<size_t>(projection_of(parameter));
    const Matrix m = matrix(parameter, layer);
    LoraAdapter& adapter = this->adapter(slot);
    if (rank < 1) throw std::invalid_argument("rank: must be at least 1");
    // Whole words of inputs for `up`; whole groups where that lets it be coded.
    const int64_t held = divide_up(rank, kernels_.codes ? kGroup : 2) * (kernels_.codes ? kGroup : 2);
    const int64_t value_bytes = sizeof(Word) / values_per_word(dtype_);
    const auto first = padded(down, rank, m.inputs, m.inputs, held - rank, value_bytes);
    const auto second = padded(up, m.outputs, rank, held, 0, value_bytes);
    adapter.layers[static_cast<size_t>(layer)][projection] = {
        pack(adapter.arena, first.data(), static_cast<int>(held), m.inputs, false),
        pack(adapter.arena, second.data(), m.outputs, static_cast<int>(held), m.gated)};
    rank_stride_ = std::max(rank_stride_, divide_up(held, kBlockColumns) * kBlockColumns);
}

void Decoder::list_runs(const ShoalStep& step) {
    token_runs_.clear();
    sampled_runs_.clear();
    if (step.adapters == nullptr) return;
    const auto adapter_of = [&](int sequence) {
        return step.adapters[sequence] < 0 ? nullptr : &adapter(step.adapters[sequence]);
    };
    for (int s = 0; s < step.num_seqs; ++s)
        add_rows(token_runs_, adapter_of(s), step.query_start_loc[s], step.query_start_loc[s + 1]);
    for (int i = 0; i < step.num_samples; ++i) {
        const int32_t* const end = step.query_start_loc + step.num_seqs + 1;
        const auto sequence = std::upper_bound(step.query_start_loc, end, step.sample_rows[i]) - step.query_start_loc - 1;
        add_rows(sampled_runs_, adapter_of(static_cast<int>(sequence)), i, i + 1);
    }
}

bool Decoder::adapts(int layer, Projection projection, const LoraRuns& runs, int begin, int end) const {
    return std::any_of(runs.begin(), runs.end(), [&](const LoraRun& run) {
        return run.begin < end && begin < run.end && !run.adapter->factors(layer, projection).is_empty();
    });
}

template <class Work>
void Decoder::for_runs(const LoraRows& rows, int begin, int end, const Work& work) const {
    for (const LoraRun& run : rows.runs) {
        const int from = std::max(begin, run.begin - rows.first), to = std::min(end, run.end - rows.first);
        if (from >= to) continue;
        const LoraFactors& factors = run.adapter->factors(rows.layer, rows.projection);
        if (!factors.is_empty()) work(factors, from, to);
    }
}

void Decoder::lower_rows(const LoraRows& rows, int begin, int end) {
    const int64_t words = rank_stride_ / values_per_word(dtype_), x_stride = rows.x_values / values_per_word(dtype_);
    float* const sums = lowered_.data() + rows.first * rank_stride_;
    Word* const narrowed = narrowed_.data() + rows.first * words;
    for_runs(rows, begin, end, [&](const LoraFactors& factors, int from, int to) {
        const int rank = static_cast<int>(divide_up(factors.up.inputs, kPanel)) * kPanel;
        kernels_.gemm({&factors.down, rows.x, x_stride, sums, rank_stride_, Finish::Store}, from, to, 0,
                      factors.down.blocks);
        for (int row = from; row < to; ++row)
            kernels_.narrow(dtype_, sums + row * rank_stride_, narrowed + row * words, rank);
    });
}

void Decoder::raise_rows(const LoraRows& rows, int begin, int end, int block_begin, int block_end) {
    const int64_t words = rank_stride_ / values_per_word(dtype_);
    const Word* const narrowed = narrowed_.data() + rows.first * words;
    for_runs(rows, begin, end, [&](const LoraFactors& factors, int from, int to) {
        kernels_.gemm({&factors.up, narrowed, words, rows.out, rows.out_stride, Finish::Add}, from, to, block_begin,
                      std::min(block_end, factors.up.blocks));
    });
}

void Decoder::adapt_rows(const LoraRows& rows, int begin, int end) {
    if (rows.runs.empty()) return;
    lower_rows(rows, begin, end);
    raise_rows(rows, begin, end, 0, kAllBlocks);
}

void Decoder::lower(Team::Member& member, const LoraRows& rows, int count) {
    if (!adapts(rows.layer, rows.projection, rows.runs, 0, count)) return;
    for_chunks(member, count, [&](int begin, int end) { lower_rows(rows, begin, end); });
}

void Decoder::reserve_adapted(int64_t tokens, int64_t samples) {
    if (token_runs_.empty()) return;
    const int64_t rows = std::max(tokens, samples);
    lowered_.reserve(rows * rank_stride_);
    narrowed_.reserve(rows * rank_stride_ / values_per_word(dtype_));
    gate_sums_.reserve(int64_t{kernels_.row_chunk} * team_.size() * gate_sums_stride());
}

int64_t Decoder::gate_sums_stride() const { return divide_up(shape_.intermediate_size, kPanel) * kBlockColumns; }

void Decoder::gate_row(const float* sums, int row) {
    kernels_.gate(dtype_, gates_, sums, gated_.data() + row * (gated_stride_ / values_per_word(dtype_)),
                  static_cast<int>(gate_sums_stride() / kBlockColumns));
}

// An adapted row's sums are needed before they are gated, so a chunk of rows with such a row keeps all of its sums.
void Decoder::multiply_gates(Team::Member& member, const LoraRows& down, int rows) {
    const int index = down.layer;
    const Linear& linear = layers_[static_cast<size_t>(index)].gate_up;
    const int64_t stride = gate_sums_stride(), words = normed_stride_ / values_per_word(dtype_);
    if (!adapts(index, Projection::GateUp, down.runs, 0, rows)) {
        multiply(member, linear, normed_.data(), normed_stride_, rows, gated_.data(), gated_stride_, gates_);
        return lower(member, down, rows);
    }
    const int most = kernels_.row_chunk * team_.size();
    for (int row = 0; row < rows; row += most) {
        const int count = std::min(most, rows - row);
        const Word* const x = normed_.data() + row * words;
        const LoraRows sums{index, Projection::GateUp, down.runs, x, normed_stride_, gate_sums_.data(), stride, row};
        multiply(member, linear, x, normed_stride_, count, gate_sums_.data(), stride, Finish::Store, &sums);
        for_chunks(member, count, [&](int begin, int end) {
            for (int i = begin; i < end; ++i) gate_row(gate_sums_.data() + i * stride, row + i);
            lower_rows(down, row + begin, row + end);
        });
    }
}

void Decoder::multiply_gate_rows(int index, int begin, int end, int thread) {
    const Linear& linear = layers_[static_cast<size_t>(index)].gate_up;
    if (!adapts(index, Projection::GateUp, token_runs_, begin, end))
        return multiply_rows(linear, normed_.data(), normed_stride_, begin, end, gated_.data(), gated_stride_, gates_);
    const int64_t stride = gate_sums_stride();
    float* const sums = gate_sums_.data() + (int64_t{thread} * kernels_.row_chunk - begin) * stride;
    multiply_rows(linear, normed_.data(), normed_stride_, begin, end, sums, stride, Finish::Store);
    adapt_rows({index, Projection::GateUp, token_runs_, normed_.data(), normed_stride_, sums, stride}, begin, end);
    for (int row = begin; row < end; ++row) gate_row(sums + row * stride, row);
}

}  // namespace shoal
