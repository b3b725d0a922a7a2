// Products of a step: by all threads together, or by one thread for its own rows; of a shard's weights, with the sum over
// the ranks.
#include <algorithm>

#include "decoder.h"

namespace shoal {

namespace {

constexpr int64_t kSumChunk = 4096;  // floats in a unit of a sum: they stay in the L1 cache while all parts are added

}  // namespace

int64_t Decoder::widest_integers() const {
    const int64_t queries = int64_t{shape_.num_heads} * shape_.head_size;
    const int64_t inputs = std::max({int64_t{shape_.hidden_size}, queries, mlp_size()});
    return divide_up(inputs, kGroup) * row_group_words(false);
}

GemmCall Decoder::product(const Linear& linear, const Word* x, int64_t x_values, int first_row, void* out,
                          int64_t out_stride, Finish finish) const {
    if (!is_integer(linear.format))
        return {&linear, x, x_values / values_per_word(dtype_), out, out_stride, finish};
    // Other threads may be at another product, whose rows have another length: rows begin where the longest ones would.
    const int64_t stride = kernels_.row_words(linear);
    return {&linear, integers_.data() + first_row * (widest_integers() - stride), stride, out, out_stride, finish};
}

void Decoder::round_rows(const GemmCall& call, const Word* x, int64_t x_values, int begin, int end) {
    if (!is_integer(call.linear->format)) return;
    Word* const rounded = integers_.data() + (call.x - integers_.data());  // the call may only read them
    for (int row = begin; row < end; ++row)
        kernels_.round_row(x + row * (x_values / values_per_word(dtype_)), rounded + row * call.x_stride, *call.linear);
}

void Decoder::multiply_rows(const Linear& linear, const Word* x, int64_t x_values, int begin, int end, void* out,
                            int64_t out_stride, Finish finish) {
    const GemmCall call = product(linear, x, x_values, begin, out, out_stride, finish);
    round_rows(call, x, x_values, begin, end);
    kernels_.gemm(call, begin, end, 0, linear.blocks);
}

void Decoder::multiply(Team::Member& member, const Linear& linear, const Word* x, int64_t x_values, int rows, void* out,
                       int64_t out_stride, Finish finish, const LoraRows* lowered) {
    const GemmCall call = product(linear, x, x_values, 0, out, out_stride, finish);
    if (is_integer(linear.format))
        for_chunks(member, rows, [&](int begin, int end) { round_rows(call, x, x_values, begin, end); });
    const int row_chunks = static_cast<int>(divide_up(rows, kernels_.row_chunk));
    // A multiple of the number of threads, and not so many that claiming units shows.
    const int threads = team_.size();
    const int parts = threads == 1 ? 1 : threads * std::clamp(linear.blocks / (8 * threads), 1, 8);
    member.parallel_for(row_chunks * parts, [&](int i) {
        // The parts of each thread are adjacent.
        const int64_t chunk = i / parts, part = i % threads * (parts / threads) + i % parts / threads;
        const int begin = static_cast<int>(rows * chunk / row_chunks), end = static_cast<int>(rows * (chunk + 1) / row_chunks);
        const int first = static_cast<int>(linear.blocks * part / parts);
        const int last = static_cast<int>(linear.blocks * (part + 1) / parts);
        kernels_.gemm(call, begin, end, first, last);
        if (lowered != nullptr) raise_rows(*lowered, begin, end, first, last);
    });
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

void Decoder::multiply_onto(Team::Member& member, const Linear& linear, const std::vector<float>& norm,
                            const LoraRows& adapted, int rows) {
    if (norm.empty()) return add_product(member, linear, adapted, rows);
    const int64_t hidden = shape_.hidden_size;
    float* const products = products_.data();
    LoraRows unnormed = adapted;
    unnormed.out = products;
    if (exchange_ == nullptr) {
        multiply(member, linear, adapted.x, adapted.x_values, rows, products, hidden, Finish::Store, &unnormed);
    } else {
        for_chunks(member, rows, [&](int begin, int end) {
            std::fill(products + begin * hidden, products + end * hidden, 0.0f);
        });
        add_product(member, linear, unnormed, rows);
    }
    for_chunks(member, rows, [&](int begin, int end) { add_normed(norm, adapted.out, begin, end); });
}

void Decoder::add_normed(const std::vector<float>& norm, float* stream, int begin, int end) {
    const int64_t hidden = shape_.hidden_size;
    for (int row = begin; row < end; ++row)
        kernels_.add_rms_norm(products_.data() + row * hidden, norm.data(), shape_.rms_norm_eps, stream + row * hidden,
                              shape_.hidden_size);
}

void Decoder::add_product(Team::Member& member, const Linear& linear, const LoraRows& adapted, int rows) {
    const int64_t hidden = shape_.hidden_size, x_values = adapted.x_values;
    const Word* const x = adapted.x;
    float* const stream = adapted.out;
    if (exchange_ == nullptr) return multiply(member, linear, x, x_values, rows, stream, hidden, Finish::Add, &adapted);
    const int most = static_cast<int>(exchange_->capacity / hidden);
    for (int row = 0; row < rows; row += most) {
        const int count = std::min(most, rows - row);
        const Word* const first = x + row * (x_values / values_per_word(dtype_));
        LoraRows mine = adapted;  // each rank has the factor A of its own inputs, and so adds its part of the sum
        mine.out = exchange_->mine();
        mine.first = row;
        multiply(member, linear, first, x_values, count, exchange_->mine(), hidden, Finish::Store, &mine);
        add_parts(member, stream + row * hidden, count * hidden);
    }
}

}  // namespace shoal
