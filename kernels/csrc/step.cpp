#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "decoder.h"

namespace shoal {

namespace {

// A screen that leaves more than a quarter of the head in question is of no use; the next kUnscreenedSteps steps go
// without.
constexpr int kUsefulQuarter = 4;
constexpr int kUnscreenedSteps = 64;
constexpr int kStreamedRows = 16;     // up to this many rows, a step is bound by reading weights, not by arithmetic
// Bytes that a thread reads ahead of a product: what its own near cache holds.
constexpr int64_t kMostAhead = 128 << 10;

}  // namespace

bool Decoder::streams_on(int64_t rows) const {
    return shape_.is_first_stage && shape_.is_last_stage && rows <= kStreamedRows;
}

bool Decoder::goes_by_rows(int rows) const {
    return exchange_ == nullptr && team_.size() > 1 && rows >= kernels_.least_rows * team_.size() * team_.size();
}

void Decoder::reserve(int64_t tokens, int64_t samples) {
    const int64_t pack = values_per_word(dtype_), heads = shape_.num_heads, size = shape_.head_size;
    residual_.reserve(tokens * shape_.hidden_size);
    normed_.reserve(std::max(tokens, samples) * normed_stride_ / pack);
    qkv_.reserve(tokens * (heads + 2 * shape_.num_kv_heads) * size);
    queries_.reserve(tokens * heads * size / pack);
    attended_.reserve(tokens * attended_stride_ / pack);
    gated_.reserve(std::max(tokens, samples) * gated_stride_ / pack);
    sampled_.reserve(samples * shape_.hidden_size);
    sampled_attended_.reserve(samples * attended_stride_ / pack);
    const int64_t partials = std::max(plans_[0].num_partials(), plans_[1].num_partials());
    partials_.reserve(partials * (heads / shape_.num_kv_heads) * (size + 2));
    if (has_post_norms_) products_.reserve(std::max(tokens, samples) * shape_.hidden_size);
    if (!cos_sin_[SHOAL_UNROTATED].empty() && static_cast<int64_t>(no_positions_.size()) < tokens)
        no_positions_.resize(static_cast<size_t>(tokens));
    if (static_cast<int64_t>(maxima_.size()) < 2 * samples * team_.size()) maxima_.resize(2 * samples * team_.size());
    const int64_t integers = has_integers_ ? std::max(tokens, samples) : screens_ ? samples : 0;
    integers_.reserve(integers * widest_integers());
    reserve_adapted(tokens, samples);
    reserve_experts(std::max(tokens, samples));
    if (!screens_) return;
    exact_logits_.reserve(samples * shape_.vocab_size);
    looked_at_.assign(static_cast<size_t>(team_.size()), 0);
}

void Decoder::normalise_rows(const float* x, const std::vector<float>& weight, int begin, int end) {
    const int64_t hidden = shape_.hidden_size, row_bytes = normed_stride_ * (4 / values_per_word(dtype_));
    auto* out = reinterpret_cast<char*>(normed_.data());
    for (int row = begin; row < end; ++row) {
        if (weight.empty())
            kernels_.narrow(dtype_, x + row * hidden, out + row * row_bytes, shape_.hidden_size);
        else
            kernels_.rms_norm(dtype_, x + row * hidden, weight.data(), shape_.rms_norm_eps, out + row * row_bytes,
                              shape_.hidden_size);
    }
}

void Decoder::normalise(Team::Member& member, const float* x, const std::vector<float>& weight, int rows,
                        const LoraRows* next) {
    for_chunks(member, rows, [&](int begin, int end) {
        normalise_rows(x, weight, begin, end);
        if (next != nullptr) lower_rows(*next, begin, end);
    });
}

void Decoder::read_ahead(Team::Member& member, const Linear& linear, int rows) {
    if (rows > kStreamedRows) return;
    const int64_t first = int64_t{linear.blocks} * member.number() / team_.size();
    const int64_t end = int64_t{linear.blocks} * (member.number() + 1) / team_.size();
    const int64_t bytes = (linear.start(end) - linear.start(first)) * int64_t{sizeof(Word)};
    member.read_ahead({reinterpret_cast<const char*>(linear.block(first)), std::min(kMostAhead, bytes)});
}

RotaryCall Decoder::rotary_call(const ShoalStep& step, int index) const {
    const Layer& layer = layers_[static_cast<size_t>(index)];
    const auto norm = [](const std::vector<float>& w) { return w.empty() ? nullptr : w.data(); };
    const auto* positions = layer.rotary == SHOAL_UNROTATED ? no_positions_.data() : step.positions;
    return {qkv_.data(), queries_.data(), pool_.layer(index), positions, step.slots, cos_sin_[layer.rotary].data(),
            norm(layer.query_norm), norm(layer.key_norm), shape_.rms_norm_eps, step.num_tokens, shape_.num_heads,
            shape_.num_kv_heads, shape_.head_size, shape_.block_size, shape_.norms_span_heads != 0};
}

void Decoder::attend(Team::Member& member, const ShoalStep& step, int index, bool sampled) {
    const Layer& layer = layers_[static_cast<size_t>(index)];
    const AttentionCall call{queries_.data(), pool_.layer(index), step.block_tables, step.table_stride, attended_.data(),
                             attended_stride_, partials_.data(), shape_.attention_scale, step.num_tokens,
                             shape_.num_heads, shape_.num_kv_heads, shape_.head_size, shape_.block_size, window(layer)};
    const AttentionPlan& plan = this->plan(layer);
    const std::vector<AttentionTask>& tasks = sampled ? plan.sampled_tasks() : plan.tasks();
    const int count = static_cast<int>(tasks.size()), threads = team_.size();
    member.parallel_for(count, [&](int i) {
        const AttentionTask &task = tasks[i], &next = tasks[std::min(i + threads, count - 1)];
        kernels_.attention(dtype_, call, plan.units(task), task.count, task.shared_end, *plan.units(next));
    });
    member.parallel_for(static_cast<int>(plan.split().size()), [&](int i) {
        kernels_.merge(dtype_, call, plan.split()[i], plan.parts()[i]);
    });
}

void Decoder::gather_sampled(Team::Member& member, const ShoalStep& step) {
    const int64_t hidden = shape_.hidden_size, words = attended_stride_ / values_per_word(dtype_);
    member.parallel_for(step.num_samples, [&](int i) {
        const int64_t row = step.sample_rows[i];
        std::copy_n(residual_.data() + row * hidden, hidden, sampled_.data() + i * hidden);
        std::copy_n(attended_.data() + row * words, words, sampled_attended_.data() + i * words);
    });
}

void Decoder::run_layers(Team::Member& member, const ShoalStep& step) {
    bool is_projected = false;
    for (int index = 0; index < shape_.num_layers; ++index) {
        const bool is_last = shape_.is_last_stage && index + 1 == shape_.num_layers;
        const bool whole_rows = goes_by_rows(step.num_tokens) && !layers_[static_cast<size_t>(index)].has_experts();
        if (!is_projected) project(member, step, index);
        is_projected = whole_rows;
        attend(member, step, index, is_last);
        if (is_last) {
            // The last layer needs the keys and values of all tokens, but everything else only of those that are
            // sampled.
            gather_sampled(member, step);
            complete(member, index, sampled_.data(), sampled_attended_.data(), sampled_runs_, step.num_samples);
        } else if (whole_rows) {
            for_row_chunks(member, step.num_tokens, [&](int begin, int end) {
                complete_rows(index, begin, end, member.number());
                if (index + 1 < shape_.num_layers) project_rows(step, index + 1, begin, end);
            });
        } else {
            complete(member, index, residual_.data(), attended_.data(), token_runs_, step.num_tokens);
        }
    }
}

void Decoder::project(Team::Member& member, const ShoalStep& step, int index) {
    const Layer& layer = layers_[static_cast<size_t>(index)];
    const int rows = step.num_tokens;
    if (team_.size() == 1 || goes_by_rows(rows))
        return for_row_chunks(member, rows, [&](int begin, int end) { project_rows(step, index, begin, end); });
    const LoraRows adapted = qkv_rows(index);
    normalise(member, residual_.data(), layer.attention_norm, rows, &adapted);
    read_ahead(member, layer.output, rows);
    multiply(member, layer.qkv, normed_.data(), normed_stride_, rows, qkv_.data(), layer.qkv.outputs, Finish::Store,
             &adapted);
    const RotaryCall rotary = rotary_call(step, index);
    const int together = rows < 4 * kPanel * team_.size() ? 1 : kPanel;  // faster for whole pages
    for_chunks(member, rows, [&](int begin, int end) { kernels_.rotary(dtype_, rotary, begin, end); }, together);
}

LoraRows Decoder::qkv_rows(int index) const {
    const int64_t outputs = layers_[static_cast<size_t>(index)].qkv.outputs;
    return {index, Projection::Qkv, token_runs_, normed_.data(), normed_stride_, qkv_.data(), outputs};
}

void Decoder::complete(Team::Member& member, int index, float* stream, const Word* attended, const LoraRuns& runs,
                       int rows) {
    if (rows == 0) return;
    const Layer& layer = layers_[static_cast<size_t>(index)];
    const int64_t hidden = shape_.hidden_size;
    const LoraRows output{index, Projection::Output, runs, attended, attended_stride_, stream, hidden};
    const LoraRows gates{index, Projection::GateUp, runs, normed_.data(), normed_stride_, nullptr, 0};
    const LoraRows down{index, Projection::Down, runs, gated_.data(), gated_stride_, stream, hidden};
    if (layer.has_mlp()) read_ahead(member, layer.gate_up, rows);
    lower(member, output, rows);
    multiply_onto(member, layer.output, layer.attention_post_norm, output, rows);
    normalise(member, stream, layer.mlp_norm, rows, &gates);
    if (layer.has_mlp()) {
        read_ahead(member, layer.down, rows);
        multiply_gates(member, down, rows);
    }
    if (layer.has_experts()) {
        if (layer.has_mlp()) multiply_onto(member, layer.down, layer.mlp_post_norm, down, rows);
        return add_experts(member, index, stream, rows);
    }
    if (index + 1 < shape_.num_layers) {
        read_ahead(member, layers_[static_cast<size_t>(index) + 1].qkv, rows);
    } else if (shape_.is_last_stage) {
        read_ahead(member, screens_ ? screen_.head : head_, rows);
    }
    multiply_onto(member, layer.down, layer.mlp_post_norm, down, rows);
}

void Decoder::project_rows(const ShoalStep& step, int index, int begin, int end) {
    const Layer& layer = layers_[static_cast<size_t>(index)];
    normalise_rows(residual_.data(), layer.attention_norm, begin, end);
    multiply_rows(layer.qkv, normed_.data(), normed_stride_, begin, end, qkv_.data(), layer.qkv.outputs, Finish::Store);
    adapt_rows(qkv_rows(index), begin, end);
    kernels_.rotary(dtype_, rotary_call(step, index), begin, end);
}

void Decoder::complete_rows(int index, int begin, int end, int thread) {
    const Layer& layer = layers_[static_cast<size_t>(index)];
    const int64_t hidden = shape_.hidden_size;
    const auto add = [&](Projection projection, const Linear& linear, const std::vector<float>& norm, const Word* x,
                         int64_t x_values) {
        float* const out = norm.empty() ? residual_.data() : products_.data();
        multiply_rows(linear, x, x_values, begin, end, out, hidden, norm.empty() ? Finish::Add : Finish::Store);
        adapt_rows({index, projection, token_runs_, x, x_values, out, hidden}, begin, end);
        if (!norm.empty()) add_normed(norm, residual_.data(), begin, end);
    };
    add(Projection::Output, layer.output, layer.attention_post_norm, attended_.data(), attended_stride_);
    normalise_rows(residual_.data(), layer.mlp_norm, begin, end);
    multiply_gate_rows(index, begin, end, thread);
    add(Projection::Down, layer.down, layer.mlp_post_norm, gated_.data(), gated_stride_);
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
        if (place < 0 || place >= shape_.vocab_rows) {
            std::fill(out, out + hidden, 0.0f);  // another rank has it
            return;
        }
        unpack_row(embedding, static_cast<int>(place), out);
        if (shape_.embedding_scale != 1.0f)
            for (int64_t i = 0; i < hidden; ++i) out[i] *= shape_.embedding_scale;
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
    const int64_t vocab = shape_.vocab_size, share = vocab_share();
    if (exchange_ == nullptr) {
        multiply(member, head_, normed_.data(), normed_stride_, step.num_samples, step.logits, vocab, Finish::Store);
        return;
    }
    const int most = static_cast<int>(exchange_->capacity / share);
    for (int row = 0; row < step.num_samples; row += most) {
        const int count = std::min(most, step.num_samples - row);
        const Word* const first = normed_.data() + row * (normed_stride_ / values_per_word(dtype_));
        multiply(member, head_, first, normed_stride_, count, exchange_->mine(), share, Finish::Store);
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
    normalise(member, sampled_.data(), final_norm_, step.num_samples);
    if (screens_) return screen_maxima(member, step);
    compute_logits(member, step);
    if (has_maxima(step)) find_maxima(member, step);
}

void Decoder::for_each_row(int64_t num_rows, const std::function<void(int)>& work) {
    if (num_rows == 1) return work(0);  // to wake a helper would take longer
    const bool goes_on = streams_on(num_rows) && !first_read_.empty();
    team_.run([&](Team::Member& member) { member.parallel_for(static_cast<int>(num_rows), work); },
              goes_on ? &first_read_ : nullptr);
}

void Decoder::forward(const ShoalStep& step) {
    check(step);
    if (step.num_tokens == 0) return;
    const Prefault::Use use = pool_.use(*std::max_element(step.slots, step.slots + step.num_tokens) / shape_.block_size);
    for (AttentionPlan& plan : plans_) {
        const auto user = std::find_if(layers_.begin(), layers_.end(), [&](const Layer& l) { return &this->plan(l) == &plan; });
        if (user != layers_.end()) plan.build(shape_, step, window(*user), kernels_.attention_rows);
    }
    if (shape_.is_last_stage) plan(layers_.back()).choose_sampled(step);
    screens_ = screens(step) && --unscreened_steps_ < 0;
    list_runs(step);
    reserve(step.num_tokens, step.num_samples);
    if (first_read_.empty()) list_first_read();
    const auto body = [&](Team::Member& member) {
        begin(member, step);
        run_layers(member, step);
        finish(member, step);
    };
    team_.run(body, streams_on(step.num_tokens) ? &first_read_ : nullptr);
    if (screens_) {
        const int looked_at = std::accumulate(looked_at_.begin(), looked_at_.end(), 0);
        unscreened_steps_ = looked_at * kUsefulQuarter > head_.blocks ? kUnscreenedSteps : 0;
    }
    if (exchange_ != nullptr && exchange_->has_failed()) throw LostRank("exchange: another rank did not come");
}

}  // namespace shoal
