// Mixtures of experts (Shazeer et al. 2017): a row passes through the few MLPs that its router prefers.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "decoder.h"

namespace shoal {

namespace {

constexpr int kPartsOfThread = 8;  // of a product of all experts, so that all threads finish at about the same time
constexpr float kLeastSum = 1e-20f;  // of scores that weights are divided by, as where these models come from
constexpr int64_t kReadRows = 8;   // a block of weights is read in about the time in which so many rows are computed

}  // namespace

void Decoder::reserve_experts(int64_t rows) {
    if (shape_.num_experts == 0) return;
    const int64_t slots = rows * shape_.experts_per_token, pack = values_per_word(dtype_);
    const int64_t widest = std::max(shape_.hidden_size, shape_.expert_size);
    const int64_t integers = has_integers_ ? divide_up(widest, kGroup) * row_group_words(false) : 0;
    router_logits_.reserve(rows * shape_.num_experts);
    expert_rows_.reserve(slots * std::max(normed_stride_ / pack, integers));
    expert_gated_.reserve(slots * expert_stride_ / pack);
    expert_integers_.reserve(slots * integers);
    expert_sums_.reserve(slots * shape_.hidden_size);
    if (static_cast<int64_t>(routes_.size()) < slots) routes_.resize(static_cast<size_t>(slots));
    first_slots_.resize(static_cast<size_t>(shape_.held_experts) + 1);
    expert_costs_.resize(static_cast<size_t>(shape_.held_experts) + 1);
}

// Of equally likely experts, the first. What is not finite reaches the weights.
void Decoder::choose_experts(const Layer& layer, int row) {
    const int count = shape_.num_experts, chosen = shape_.experts_per_token;
    float* const logits = router_logits_.data() + int64_t{row} * count;
    Route* const routes = &routes_[static_cast<size_t>(row) * chosen];
    if (shape_.sigmoid_router)
        for (int e = 0; e < count; ++e) logits[e] = 1.0f / (1.0f + std::exp(-logits[e]));
    const float* const bias = layer.router_bias.empty() ? nullptr : layer.router_bias.data();
    const auto likelihood = [&](int e) { return bias == nullptr ? logits[e] : logits[e] + bias[e]; };
    for (int e = 0, found = 0; e < count; ++e) {
        if (found == chosen && !(likelihood(e) > likelihood(routes[chosen - 1].expert))) continue;
        int place = found < chosen ? found++ : chosen - 1;
        for (; place > 0 && likelihood(e) > likelihood(routes[place - 1].expert); --place) routes[place] = routes[place - 1];
        routes[place] = {e, -1, 0.0f};
    }
    if (shape_.sigmoid_router)
        weigh_by_scores(logits, routes);
    else
        weigh_by_softmax(logits, routes);
    for (int i = 0; i < chosen; ++i) routes[i].weight *= shape_.expert_scale;
}

void Decoder::weigh_by_scores(const float* scores, Route* routes) const {
    const int count = shape_.num_experts, chosen = shape_.experts_per_token;
    float sum = shape_.renormalizes_experts ? kLeastSum : 1.0f;
    for (int e = 0; e < count; ++e) sum += scores[e] * 0.0f;  // a NaN among those not chosen makes it NaN
    for (int i = 0; i < chosen && shape_.renormalizes_experts; ++i) sum += scores[routes[i].expert];
    for (int i = 0; i < chosen; ++i) routes[i].weight = scores[routes[i].expert] / sum;
}

void Decoder::weigh_by_softmax(const float* logits, Route* routes) const {
    const int count = shape_.num_experts, chosen = shape_.experts_per_token;
    const float largest = logits[routes[0].expert];
    float sum = 0.0f;
    if (shape_.renormalizes_experts) {  // the others cancel out; but for a NaN among them, which makes the sum NaN
        for (int e = 0; e < count; ++e) sum += logits[e] * 0.0f;
        for (int i = 0; i < chosen; ++i) sum += std::exp(logits[routes[i].expert] - largest);
    } else {
        for (int e = 0; e < count; ++e) sum += std::exp(logits[e] - largest);
    }
    for (int i = 0; i < chosen; ++i) routes[i].weight = std::exp(logits[routes[i].expert] - largest) / sum;
}

void Decoder::group_by_expert(int rows) {
    const int64_t num_routes = int64_t{rows} * shape_.experts_per_token;
    const auto held = [&](const Route& route) {
        const int expert = route.expert - shape_.first_expert;
        return expert >= 0 && expert < shape_.held_experts ? expert : -1;
    };
    std::fill(first_slots_.begin(), first_slots_.end(), 0);
    for (int64_t i = 0; i < num_routes; ++i)
        if (const int expert = held(routes_[i]); expert >= 0) ++first_slots_[expert + 1];
    for (int e = 0; e < shape_.held_experts; ++e) {
        const int count = first_slots_[e + 1];
        expert_costs_[e + 1] = expert_costs_[e] + (count > 0 ? count + kReadRows : 0);
        first_slots_[e + 1] += first_slots_[e];
    }
    // Each expert's next slot is counted where its first one is, and then put back.
    for (int64_t i = 0; i < num_routes; ++i)
        if (const int expert = held(routes_[i]); expert >= 0) routes_[i].slot = first_slots_[expert]++;
    std::copy_backward(first_slots_.begin(), first_slots_.end() - 1, first_slots_.end());
    first_slots_[0] = 0;
}

void Decoder::hand_to_experts(int row, const Linear& linear, int64_t words) {
    const int chosen = shape_.experts_per_token;
    const Word* const normed = normed_.data() + row * (normed_stride_ / values_per_word(dtype_));
    const Word* made = nullptr;
    for (int i = 0; i < chosen; ++i) {
        const Route& route = routes_[static_cast<size_t>(row) * chosen + i];
        if (route.slot < 0) continue;
        Word* const out = expert_rows_.data() + route.slot * words;
        if (made == nullptr && is_integer(linear.format))
            kernels_.round_row(normed, out, linear);
        else
            std::memcpy(out, made != nullptr ? made : normed, static_cast<size_t>(words) * sizeof(Word));
        made = out;
    }
}

void Decoder::multiply_experts(Team::Member& member, const std::vector<Linear>& experts, const Word* x, int64_t words,
                               void* out, int64_t out_stride, Finish finish) {
    // Members that come late must find the same number of parts, so it may not depend on the routes.
    const int parts = team_.size() == 1 ? 1 : team_.size() * kPartsOfThread;
    member.parallel_for(parts, [&](int part) {
        const int64_t blocks = experts.front().blocks, all = expert_costs_.back() * blocks;
        const int64_t begin = all * part / parts, end = all * (part + 1) / parts;
        for (size_t e = 0; e < experts.size(); ++e) {
            const int64_t cost = expert_costs_[e + 1] - expert_costs_[e], before = expert_costs_[e] * blocks;
            if (cost == 0 || before + cost * blocks <= begin || before >= end) continue;
            // The blocks whose cost begins within the part.
            const auto block_at = [&](int64_t at) {
                return static_cast<int>(std::clamp<int64_t>(divide_up(at - before, cost), 0, blocks));
            };
            const GemmCall call{&experts[e], x, words, out, out_stride, finish};
            const int last = first_slots_[e + 1];
            for (int row = first_slots_[e]; row < last; row += kernels_.row_chunk)
                kernels_.gemm(call, row, std::min(row + kernels_.row_chunk, last), block_at(begin), block_at(end));
        }
    });
}

void Decoder::add_weighted(int row, float* out) const {
    const int64_t hidden = shape_.hidden_size;
    for (int i = 0; i < shape_.experts_per_token; ++i) {
        const Route& route = routes_[static_cast<size_t>(row) * shape_.experts_per_token + i];
        if (route.slot < 0) continue;
        const float* const sums = expert_sums_.data() + route.slot * hidden;
        for (int64_t j = 0; j < hidden; ++j) out[j] += route.weight * sums[j];
    }
}

void Decoder::route(Team::Member& member, const Layer& layer, int rows) {
    multiply(member, layer.router, normed_.data(), normed_stride_, rows, router_logits_.data(), shape_.num_experts,
             Finish::Store);
    for_chunks(member, rows, [&](int begin, int end) {
        for (int row = begin; row < end; ++row) choose_experts(layer, row);
    });
    member.parallel_for(1, [&](int) { group_by_expert(rows); });
}

void Decoder::run_experts(Team::Member& member, const Layer& layer, int rows) {
    const Linear &gate_up = layer.expert_gate_up.front(), &down = layer.expert_down.front();
    const int64_t pack = values_per_word(dtype_);
    int64_t words = is_integer(gate_up.format) ? kernels_.row_words(gate_up) : normed_stride_ / pack;
    for_chunks(member, rows, [&](int begin, int end) {
        for (int row = begin; row < end; ++row) hand_to_experts(row, gate_up, words);
    });
    multiply_experts(member, layer.expert_gate_up, expert_rows_.data(), words, expert_gated_.data(), expert_stride_, gates_);
    const Word* x = expert_gated_.data();
    words = expert_stride_ / pack;
    if (is_integer(down.format)) {
        const int64_t rounded_words = kernels_.row_words(down);
        for_chunks(member, rows * shape_.experts_per_token, [&](int begin, int end) {
            for (int slot = begin; slot < std::min(end, first_slots_.back()); ++slot)
                kernels_.round_row(expert_gated_.data() + slot * (expert_stride_ / pack),
                                   expert_integers_.data() + slot * rounded_words, down);
        });
        x = expert_integers_.data();
        words = rounded_words;
    }
    multiply_experts(member, layer.expert_down, x, words, expert_sums_.data(), shape_.hidden_size, Finish::Store);
}

void Decoder::add_experts(Team::Member& member, int index, float* stream, int rows) {
    const Layer& layer = layers_[static_cast<size_t>(index)];
    const int64_t hidden = shape_.hidden_size;
    route(member, layer, rows);
    run_experts(member, layer, rows);
    if (exchange_ == nullptr) {
        return for_chunks(member, rows, [&](int begin, int end) {
            for (int row = begin; row < end; ++row) add_weighted(row, stream + row * hidden);
        });
    }
    const int most = static_cast<int>(exchange_->capacity / hidden);
    for (int row = 0; row < rows; row += most) {
        const int count = std::min(most, rows - row);
        for_chunks(member, count, [&](int begin, int end) {
            std::fill(exchange_->mine() + begin * hidden, exchange_->mine() + end * hidden, 0.0f);
            for (int i = begin; i < end; ++i) add_weighted(row + i, exchange_->mine() + i * hidden);
        });
        add_parts(member, stream + row * hidden, count * hidden);
    }
}

}  // namespace shoal
