#include <algorithm>
#include <cmath>
#include <cstring>

#include "decoder.h"

namespace shoal {

namespace {

constexpr int kRowChunk = 10 * 12;    // rows of a product's unit: ten register tiles, which the second-level cache holds
constexpr int kSplitKeys = 512;       // keys of one part of a long decode; fixed, so that results do not depend on threads
constexpr int64_t kSumChunk = 4096;   // floats of a unit of a sum: the first-level cache keeps them over the ranks

}  // namespace

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

void Decoder::add_parts(Team::Member& member, float* out, int64_t count) {
    member.parallel_for(1, [&](int) { exchange_->publish(count); });
    member.parallel_for(static_cast<int>(divide_up(count, kSumChunk)), [&](int i) {
        const int64_t begin = i * kSumChunk, end = std::min(count, begin + kSumChunk);
        for (int rank = 0; rank < exchange_->size; ++rank) {
            const float* part = exchange_->part(rank);
            for (int64_t j = begin; j < end; ++j) out[j] += part[j];
        }
    });
}

void Decoder::multiply_onto_stream(Team::Member& member, const Linear& linear, const Word* x, int64_t x_values, int rows) {
    const int64_t hidden = shape_.hidden_size;
    if (exchange_ == nullptr) return multiply(member, linear, x, x_values, rows, residual_.data(), hidden, Finish::Add);
    const int most = static_cast<int>(exchange_->capacity / hidden);
    for (int row = 0; row < rows; row += most) {
        const int count = std::min(most, rows - row);
        const Word* const first = x + row * (x_values / values_per_word(dtype_));
        multiply(member, linear, first, x_values, count, exchange_->mine(), hidden, Finish::Store);
        add_parts(member, residual_.data() + row * hidden, count * hidden);
    }
}

void Decoder::run_layer(Team::Member& member, const ShoalStep& step, int index) {
    const Layer& layer = layers_[static_cast<size_t>(index)];
    const int rows = step.num_tokens, hidden = shape_.hidden_size;
    normalise(member, residual_.data(), layer.input_norm, rows);
    multiply(member, layer.qkv, normed_.data(), hidden, rows, qkv_.data(), layer.qkv.outputs, Finish::Store);
    attend(member, step, index);
    multiply_onto_stream(member, layer.output, attended_.data(), shape_.num_heads * shape_.head_size, rows);
    normalise(member, residual_.data(), layer.post_norm, rows);
    multiply(member, layer.gate_up, normed_.data(), hidden, rows, gated_.data(), gated_stride_, Finish::SwiGlu);
    multiply_onto_stream(member, layer.down, gated_.data(), gated_stride_, rows);
}

void Decoder::begin(Team::Member& member, const ShoalStep& step) {
    const int64_t hidden = shape_.hidden_size;
    const int rows = step.num_tokens;
    if (!shape_.is_first_stage) {
        member.parallel_for(1, [&](int) { std::memcpy(residual_.data(), step.hidden, rows * hidden * sizeof(float)); });
        return;
    }
    const Linear& embedding = shape_.tied_embeddings ? head_ : embedding_;
    const auto embed = [&](int row, float* out) {
        const int64_t place = step.input_ids[row] - shape_.vocab_begin;
        if (place >= 0 && place < shape_.vocab_rows) return unpack_row(embedding, static_cast<int>(place), out);
        std::fill(out, out + hidden, 0.0f);  // another rank has it
    };
    if (exchange_ == nullptr) {
        member.parallel_for(rows, [&](int i) { embed(i, residual_.data() + i * hidden); });
        return;
    }
    member.parallel_for(1, [&](int) { std::fill(residual_.data(), residual_.data() + rows * hidden, 0.0f); });
    const int most = static_cast<int>(exchange_->capacity / hidden);
    for (int row = 0; row < rows; row += most) {
        const int count = std::min(most, rows - row);
        member.parallel_for(count, [&](int i) { embed(row + i, exchange_->mine() + i * hidden); });
        add_parts(member, residual_.data() + row * hidden, count * hidden);
    }
}

void Decoder::compute_logits(Team::Member& member, const ShoalStep& step) {
    const int64_t hidden = shape_.hidden_size, vocab = shape_.vocab_size, share = vocab_share();
    if (exchange_ == nullptr) {
        multiply(member, head_, normed_.data(), hidden, step.num_samples, step.logits, vocab, Finish::Store);
        return;
    }
    const int most = static_cast<int>(exchange_->capacity / share);
    for (int row = 0; row < step.num_samples; row += most) {
        const int count = std::min(most, step.num_samples - row);
        const Word* const first = normed_.data() + row * (hidden / values_per_word(dtype_));
        multiply(member, head_, first, hidden, count, exchange_->mine(), share, Finish::Store);
        member.parallel_for(1, [&](int) { exchange_->publish(count * share); });
        if (step.logits == nullptr) continue;
        member.parallel_for(count, [&](int i) {
            for (int rank = 0; rank < exchange_->size && rank * share < vocab; ++rank)
                std::memcpy(step.logits + (row + i) * vocab + rank * share, exchange_->part(rank) + i * share,
                            std::min(share, vocab - rank * share) * sizeof(float));
        });
    }
}

void Decoder::finish(Team::Member& member, const ShoalStep& step) {
    const int64_t hidden = shape_.hidden_size;
    if (!shape_.is_last_stage) {
        const size_t bytes = step.num_tokens * hidden * sizeof(float);
        member.parallel_for(1, [&](int) { std::memcpy(step.hidden, residual_.data(), bytes); });
        return;
    }
    if (step.num_samples == 0) return;
    member.parallel_for(step.num_samples, [&](int i) {
        std::memcpy(sampled_.data() + i * hidden, residual_.data() + step.sample_rows[i] * hidden, hidden * sizeof(float));
    });
    normalise(member, sampled_.data(), final_norm_, step.num_samples);
    compute_logits(member, step);
}

void Decoder::forward(const ShoalStep& step) {
    check(step);
    if (step.num_tokens == 0) return;
    reserve(step.num_tokens, step.num_samples);
    plan_attention(step);
    team_.run([&](Team::Member& member) {
        begin(member, step);
        for (int layer = 0; layer < shape_.num_layers; ++layer) run_layer(member, step, layer);
        finish(member, step);
    });
    if (exchange_ != nullptr && exchange_->has_failed()) throw LostRank("exchange: another rank did not come");
}

}  // namespace shoal
