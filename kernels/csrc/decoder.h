// A Llama-family decoder with its packed weights, its KV pages and its threads.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "attention_plan.h"
#include "exchange.h"
#include "kernels.h"
#include "prefault.h"
#include "screen.h"
#include "shoal_native.h"
#include "threads.h"

namespace shoal {

// KV pages of all layers, zeroed.
class Pool {
public:
    Pool(int64_t layers, int64_t blocks, int64_t block_words);

    Word* layer(int layer) const { return static_cast<Word*>(pages_.data()) + layer * blocks_ * block_words_; }
    // Every destination becomes what its source was before the call.
    void copy(const int64_t* pairs, int count);
    // To be held while blocks up to this number are written.
    Prefault::Use use(int64_t last_block) {
        return {prefault_, (last_block + 1) * block_words_ * static_cast<int64_t>(sizeof(Word))};
    }

private:
    int64_t layers_, blocks_, block_words_;
    Pages pages_;
    Prefault prefault_;
};

struct Layer {
    std::vector<float> input_norm, post_norm, query_norm, key_norm;
    Linear qkv, output, gate_up, down;
};

// Another rank did not come to an exchange: the step has no result.
struct LostRank : std::runtime_error {
    using std::runtime_error::runtime_error;
};

class Decoder {
public:
    // Throws std::invalid_argument for a shape that the kernels do not cover. `exchange`: null for one rank alone.
    Decoder(const ShoalShape& shape, std::unique_ptr<Exchange> exchange);

    // Throws std::invalid_argument when `count`, the values of data, is not what the shape asks for.
    void set_parameter(ShoalParameter parameter, int layer, const void* data, int64_t count);
    // The same of a matrix as integers, in a bf16 decoder.
    void set_integers(ShoalParameter parameter, int layer, const Integers& integers, int64_t count);
    void set_rotary(const float* cos_sin);
    // Throws std::out_of_range, before anything is computed, for a token, position or slot that does not exist; LostRank.
    void forward(const ShoalStep& step);
    // Of the step that forward() has just computed: of each row of logits the largest and its first place, NaN where a row
    // has one. Nothing where it has given none.
    void take_maxima(const ShoalStep& step, float* values, int64_t* places) const;
    void copy_blocks(const int64_t* pairs, int count) { pool_.copy(pairs, count); }
    const char* kernels_name() const { return kernels_.name; }
    uint64_t progress() const { return team_.progress(); }  // differs once a step has gone on; any thread may ask

private:
    struct Matrix {  // where a parameter lies and what its shape is
        Linear* linear;
        int outputs, inputs;
        bool gated;
    };
    // Columns of the logits that a rank computes, the last one fewer.
    int64_t vocab_share() const { return exchange_ ? divide_up(shape_.vocab_size, exchange_->size) : shape_.vocab_size; }
    Matrix matrix(ShoalParameter parameter, int layer);  // a null linear when the parameter is a vector
    void check(const ShoalStep& step) const;
    void reserve(int64_t tokens, int64_t samples);
    void list_first_read();
    void begin(Team::Member& member, const ShoalStep& step);   // the stream at this stage's first layer
    void finish(Team::Member& member, const ShoalStep& step);  // what leaves the stage after its last
    void run_layers(Team::Member& member, const ShoalStep& step);
    // A layer, before its attention and after it. By columns: all threads share out each product, and wait for one another
    // before the next. By rows: a thread takes some rows from one attention to the next and waits for nobody; but each
    // thread reads all weights, which pays where several threads have many rows. What comes before the attention needs
    // few weights: a single thread does that by rows too, and finds what it has just written in a near cache.
    bool goes_by_rows(int rows) const;
    void project(Team::Member& member, const ShoalStep& step, int index);
    void complete(Team::Member& member, int index, float* stream, const Word* attended, int rows);
    void project_rows(const ShoalStep& step, int index, int begin, int end);
    void complete_rows(int index, int begin, int end);
    RotaryCall rotary_call(const ShoalStep& step, int index) const;
    void attend(Team::Member& member, const ShoalStep& step, int index, const std::vector<AttentionTask>& tasks);
    // The sampled rows of the stream and of what was attended, one after the other.
    void gather_sampled(Team::Member& member, const ShoalStep& step);
    // work(begin, end) for a few pieces of the rows a thread, or for such as a product likes.
    template <class Work>
    void for_chunks(Team::Member& member, int rows, const Work& work, int multiple = 1);
    template <class Work>
    void for_row_chunks(Team::Member& member, int rows, const Work& work);
    void normalise(Team::Member& member, const float* x, const std::vector<float>& weight, int rows);
    void normalise_rows(const float* x, const std::vector<float>& weight, int begin, int end);
    // What a member reads while it waits for others, where a step waits for weights: its own part of the next product.
    void read_ahead(Team::Member& member, const Linear& linear, int rows);
    int64_t widest_inputs() const;  // of a product within a layer, in whole groups
    // Of rows from `first_row` on; where the weight is of integers, of those that round_rows() makes of x.
    GemmCall product(const Linear& linear, const Word* x, int64_t x_values, int first_row, void* out, int64_t out_stride,
                     Finish finish) const;
    void round_rows(const GemmCall& call, const Word* x, int64_t x_values, int begin, int end);
    void multiply(Team::Member& member, const Linear& linear, const Word* x, int64_t x_values, int rows, void* out,
                  int64_t out_stride, Finish finish);
    void multiply_rows(const Linear& linear, const Word* x, int64_t x_values, int begin, int end, void* out,
                       int64_t out_stride, Finish finish);
    // Adds a product whose inputs are spread over the ranks to the stream's rows.
    void multiply_onto(Team::Member& member, float* stream, const Linear& linear, const Word* x, int64_t x_values, int rows);
    void compute_logits(Team::Member& member, const ShoalStep& step);
    bool has_maxima(const ShoalStep& step) const { return shape_.is_last_stage && step.logits != nullptr; }
    bool screens(const ShoalStep& step) const;
    // Block of the head where a thread's part of each row of logits begins.
    int64_t part_begin(int part) const {
        return divide_up(shape_.vocab_size, kBlockColumns) * part / team_.size();
    }
    void find_maxima(Team::Member& member, const ShoalStep& step);
    // The same without the logits: those that the 8-bit head leaves in question are computed. Same bits, same places.
    void screen_maxima(Team::Member& member, const ShoalStep& step);
    // Adds all ranks' parts of the exchange to `out`.
    void add_parts(Team::Member& member, float* out, int64_t count);

    const ShoalShape shape_;
    const Dtype dtype_;
    const Kernels& kernels_;
    const std::unique_ptr<Exchange> exchange_;
    Pool pool_;
    Arena arena_;
    std::vector<Layer> layers_;
    std::vector<float> final_norm_, cos_sin_;
    Linear head_, embedding_;  // a tied model has no embedding_ of its own: the head is unpacked a row at a time
    Screen screen_;
    int unscreened_steps_ = 0;  // so many that could be screened are not, for the last one's screen was of little use
    // Values of a row of normed_, attended_ and gated_: an odd number of cache lines, for rows an even number apart meet in
    // the caches when a product reads the same place of all of them.
    const int64_t normed_stride_, attended_stride_, gated_stride_;
    bool has_integers_ = false;

    // Buffers of a step, grown to the largest one seen.
    bool screens_ = false;  // of the step that runs: whether it goes by screen_maxima()
    Buffer<float> residual_, qkv_, sampled_, partials_, exact_logits_;
    Buffer<Word> normed_, queries_, attended_, gated_, integers_, sampled_attended_;
    Buffer<float> integer_scales_, integer_sums_;
    std::vector<Maximum> maxima_;  // [num_samples][threads], each of its part of the columns; then what a screen has seen of each
    std::vector<int> looked_at_;   // [threads]: blocks of the head that a screen has left in question
    AttentionPlan plan_;
    std::vector<Span> first_read_;  // the weights that a step begins with

    Team team_;  // the last: until it has ended, helpers may read the rest
};

}  // namespace shoal
