// A Llama-family decoder with its packed weights, its KV pages and its threads.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "attention_plan.h"
#include "exchange.h"
#include "kernels.h"
#include "lora.h"
#include "prefault.h"
#include "screen.h"
#include "shoal_native.h"
#include "threads.h"

namespace shoal {

// The KV pages of all layers, initially zero.
class Pool {
public:
    Pool(int64_t layers, int64_t blocks, int64_t block_words);

    Word* layer(int layer) const { return static_cast<Word*>(pages_.data()) + layer * blocks_ * block_words_; }
    // Copies blocks, as pairs of (source, destination); every source is read as it was before the call.
    void copy(const int64_t* pairs, int count);
    // Copies the contents of blocks to `words` [layers][count][block_words], or from there.
    void read(const int64_t* blocks, int count, Word* words) const;
    void write(const int64_t* blocks, int count, const Word* words);
    int64_t block_bytes() const { return layers_ * block_words_ * static_cast<int64_t>(sizeof(Word)); }
    // To be held while blocks up to `last_block` are written.
    Prefault::Use use(int64_t last_block) {
        return {prefault_, (last_block + 1) * block_words_ * static_cast<int64_t>(sizeof(Word))};
    }

private:
    int64_t layers_, blocks_, block_words_;
    Pages pages_;
    Prefault prefault_;
};

struct Layer {
    std::vector<float> attention_norm, mlp_norm, attention_post_norm, mlp_post_norm, query_norm, key_norm;  // or empty
    Linear qkv, output;
    Linear gate_up, down;  // the MLP; in a layer with experts, the one that all rows pass through, if there is one
    Linear router;
    std::vector<float> router_bias;  // or empty
    std::vector<Linear> expert_gate_up, expert_down;
    bool has_experts() const { return router.blocks > 0; }
    bool has_mlp() const { return gate_up.blocks > 0; }
    bool has_window = true;
    ShoalRotary rotary = SHOAL_ROTARY_FULL;
};

// Another rank did not take part in an exchange: the step has no result.
struct LostRank : std::runtime_error {
    using std::runtime_error::runtime_error;
};

class Decoder {
public:
    // Throws std::invalid_argument for a shape that the kernels do not support. `exchange`: null for a single rank.
    Decoder(const ShoalShape& shape, std::unique_ptr<Exchange> exchange);

    // Throws std::invalid_argument if `count`, the number of values in `data`, does not match the shape.
    void set_parameter(ShoalParameter parameter, int layer, const void* data, int64_t count);
    // The same for a matrix of integers, in a bf16 decoder.
    void set_integers(ShoalParameter parameter, int layer, const Integers& integers, int64_t count);
    void set_rotary(ShoalRotary table, const float* cos_sin);
    // Throws std::invalid_argument if there is no such layer.
    void set_layer(int layer, bool has_window, ShoalRotary rotary);
    // A new adapter, which adds to nothing yet. Returns its slot, which is that of a removed one if there is any.
    int add_adapter();
    // What an adapter adds to a projection, as factors in the decoder's dtype: down [rank][inputs], up [outputs][rank].
    void set_factors(int slot, ShoalParameter parameter, int layer, int rank, const void* down, const void* up);
    void remove_adapter(int slot);
    // Throws std::out_of_range, before anything is computed, if a token, position, slot, block, sample row or adapter
    // does not exist; LostRank if another rank does not take part.
    void forward(const ShoalStep& step);
    // For the step that forward() has just computed: the largest value of each row of logits (NaN if the row has one)
    // and its first index. Writes nothing if the step had no logits.
    void take_maxima(const ShoalStep& step, float* values, int64_t* places) const;
    // Calls work(row) for each of a step's rows, by all threads.
    void for_each_row(int64_t num_rows, const std::function<void(int)>& work);
    const Kernels& kernels() const { return kernels_; }
    void copy_blocks(const int64_t* pairs, int count) { pool_.copy(pairs, count); }
    void read_blocks(const int64_t* blocks, int count, Word* words) const { pool_.read(blocks, count, words); }
    void write_blocks(const int64_t* blocks, int count, const Word* words) { pool_.write(blocks, count, words); }
    int64_t block_bytes() const { return pool_.block_bytes(); }
    const char* kernels_name() const { return kernels_.name; }
    uint64_t progress() const { return team_.progress(); }  // changes as a step progresses; any thread may call it

private:
    // One of a row's experts, with its weight and the slot in which it finds the row. The slots of an expert are adjacent.
    struct Route {
        int expert, slot;  // slot: -1 if another rank has the expert
        float weight;
    };
    struct Matrix {  // where a parameter is stored, and its shape; or `count` of the same shape, one after the other
        Linear* linear;
        int outputs, inputs;
        bool gated;
        int count = 1;
        int64_t values() const { return int64_t{outputs} * inputs; }
    };
    // Columns of the logits that each rank computes; the last ranks may have fewer.
    int64_t vocab_share() const { return exchange_ ? divide_up(shape_.vocab_size, exchange_->size) : shape_.vocab_size; }
    int64_t mlp_size() const { return std::max(shape_.intermediate_size, shape_.shared_size); }  // of the larger kind
    Matrix matrix(ShoalParameter parameter, int layer);  // a null linear if the parameter is a vector
    Linear pack(Arena& arena, const void* weight, int outputs, int inputs, bool gated) const;
    void check(const ShoalStep& step) const;
    void reserve(int64_t tokens, int64_t samples);
    void list_first_read();
    void begin(Team::Member& member, const ShoalStep& step);   // makes the residual stream for this stage's first layer
    void finish(Team::Member& member, const ShoalStep& step);  // makes the stage's output after its last layer
    void run_layers(Team::Member& member, const ShoalStep& step);
    // A layer before its attention (project) and after it (complete). By columns: all threads share each product, and
    // wait for one another before the next. By rows: a thread takes some rows from one attention to the next without
    // waiting for others; but each thread reads all weights, which pays off if several threads have many rows. The part
    // before the attention needs few weights: a single thread also does it by rows, and finds what it has just written
    // in a near cache.
    bool goes_by_rows(int rows) const;
    // Whether helpers read the next step's first weights after a step of so many rows. With several stages, others
    // compute between two steps of this one, and need the memory bandwidth.
    bool streams_on(int64_t rows) const;
    void project(Team::Member& member, const ShoalStep& step, int index);
    void complete(Team::Member& member, int index, float* stream, const Word* attended, const LoraRuns& runs, int rows);
    void project_rows(const ShoalStep& step, int index, int begin, int end);
    void complete_rows(int index, int begin, int end, int thread);
    RotaryCall rotary_call(const ShoalStep& step, int index) const;
    int window(const Layer& layer) const { return layer.has_window ? shape_.sliding_window : 0; }
    AttentionPlan& plan(const Layer& layer) { return plans_[window(layer) > 0]; }
    // Of all tokens, or of those that contribute to sampled rows alone.
    void attend(Team::Member& member, const ShoalStep& step, int index, bool sampled);
    // Gathers the sampled rows of the residual stream and of the attention's output.
    void gather_sampled(Team::Member& member, const ShoalStep& step);
    // Calls work(begin, end) for chunks of the rows: a few per thread, of a multiple of `multiple` rows; or of a size
    // that suits products.
    template <class Work>
    void for_chunks(Team::Member& member, int rows, const Work& work, int multiple = 1);
    template <class Work>
    void for_row_chunks(Team::Member& member, int rows, const Work& work);
    // Rows of the stream in the dtype, normed unless the weight is empty. `next`: rows that are lowered as soon as they
    // are normalised.
    void normalise(Team::Member& member, const float* x, const std::vector<float>& weight, int rows,
                   const LoraRows* next = nullptr);
    void normalise_rows(const float* x, const std::vector<float>& weight, int begin, int end);
    // In steps that are bound by reading weights: while a member waits for others, it reads its own part of the next
    // product.
    void read_ahead(Team::Member& member, const Linear& linear, int rows);
    int64_t widest_integers() const;  // the most words of a row as integers, in a layer or before the head
    // The product of rows from `first_row` on. If the weight has integers, the rows are those that round_rows() makes
    // of x.
    GemmCall product(const Linear& linear, const Word* x, int64_t x_values, int first_row, void* out, int64_t out_stride,
                     Finish finish) const;
    void round_rows(const GemmCall& call, const Word* x, int64_t x_values, int begin, int end);
    // `lowered`: what is added to the product.
    void multiply(Team::Member& member, const Linear& linear, const Word* x, int64_t x_values, int rows, void* out,
                  int64_t out_stride, Finish finish, const LoraRows* lowered = nullptr);
    void multiply_rows(const Linear& linear, const Word* x, int64_t x_values, int begin, int end, void* out,
                       int64_t out_stride, Finish finish);
    // Adds a product whose inputs are spread over the ranks, and what is lowered for it, to the rows of the stream;
    // normed first, unless the weight is empty.
    void multiply_onto(Team::Member& member, const Linear& linear, const std::vector<float>& norm, const LoraRows& adapted,
                       int rows);
    void add_product(Team::Member& member, const Linear& linear, const LoraRows& adapted, int rows);
    void add_normed(const std::vector<float>& norm, float* stream, int begin, int end);  // rows of products_
    LoraAdapter& adapter(int slot) const;
    void list_runs(const ShoalStep& step);
    void reserve_adapted(int64_t tokens, int64_t samples);
    LoraRows qkv_rows(int index) const;
    // Whether some of the rows [begin, end) are adapted.
    bool adapts(int layer, Projection projection, const LoraRuns& runs, int begin, int end) const;
    // The two products of an adaptation, for those of the rows [begin, end) that are adapted: by their factors `down`,
    // and by a range of the blocks of their factors `up`, onto the outputs. Lowered rows are kept until they are raised,
    // or others of the same numbers are lowered.
    void lower_rows(const LoraRows& rows, int begin, int end);
    void raise_rows(const LoraRows& rows, int begin, int end, int block_begin, int block_end);
    void adapt_rows(const LoraRows& rows, int begin, int end);
    void lower(Team::Member& member, const LoraRows& rows, int count);  // rows [0, count) by all threads
    template <class Work>
    void for_runs(const LoraRows& rows, int begin, int end, const Work& work) const;
    // gated_ = the gated product of normed_, whose rows are lowered; these are then lowered for the next product.
    void multiply_gates(Team::Member& member, const LoraRows& down, int rows);
    void multiply_gate_rows(int index, int begin, int end, int thread);
    // Adds what the mixture of experts makes of the rows of normed_ to the stream.
    void add_experts(Team::Member& member, int index, float* stream, int rows);
    void reserve_experts(int64_t rows);
    void route(Team::Member& member, const Layer& layer, int rows);
    void run_experts(Team::Member& member, const Layer& layer, int rows);
    void choose_experts(const Layer& layer, int row);
    void weigh_by_scores(const float* scores, Route* routes) const;
    void weigh_by_softmax(const float* logits, Route* routes) const;
    void group_by_expert(int rows);
    // Copies a row of normed_, as `linear` takes it, to the slots of its experts.
    void hand_to_experts(int row, const Linear& linear, int64_t words);
    // The product of each expert's slots of x.
    void multiply_experts(Team::Member& member, const std::vector<Linear>& experts, const Word* x, int64_t words, void* out,
                          int64_t out_stride, Finish finish);
    void add_weighted(int row, float* out) const;  // what its experts made of it
    int64_t gate_sums_stride() const;
    void gate_row(const float* sums, int row);
    void compute_logits(Team::Member& member, const ShoalStep& step);
    bool has_maxima(const ShoalStep& step) const { return shape_.is_last_stage && step.logits != nullptr; }
    bool screens(const ShoalStep& step) const;
    // The block of the head at which a thread's part of each row of logits begins.
    int64_t part_begin(int part) const {
        return divide_up(shape_.vocab_size, kBlockColumns) * part / team_.size();
    }
    void find_maxima(Team::Member& member, const ShoalStep& step);
    // The same without all logits: only those that the 8-bit head leaves in question are computed. Same bits, same
    // places.
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
    std::vector<float> final_norm_;
    std::vector<float> cos_sin_[3];      // by ShoalRotary; if a layer is unrotated, the last is a row for angles of 0
    std::vector<int64_t> no_positions_;  // zeros, one for each of a step's tokens
    Linear head_, embedding_;  // a tied model has no embedding_ of its own: the head is unpacked a row at a time
    Screen screen_;
    int unscreened_steps_ = 0;  // steps still to run without a screen, because the last screen was of little use
    // Values per row of normed_, attended_, gated_ and expert_gated_: an odd number of cache lines. Rows an even number
    // of lines apart would conflict in the caches when a product reads the same place of all of them.
    const int64_t normed_stride_, attended_stride_, gated_stride_, expert_stride_;
    const Finish gates_;
    bool has_integers_ = false, has_post_norms_ = false;
    std::vector<std::unique_ptr<LoraAdapter>> adapters_;  // by slot; null where one was removed
    int64_t rank_stride_ = 0;  // values per row of lowered_ and narrowed_: the largest rank so far, in whole blocks

    // Buffers of a step, grown to the largest step seen.
    bool screens_ = false;  // whether the present step uses screen_maxima()
    Buffer<float> residual_, qkv_, sampled_, partials_, exact_logits_;
    Buffer<float> products_;  // of attention or MLP, before they are normed
    Buffer<Word> normed_, queries_, attended_, gated_, integers_, sampled_attended_;
    // [num_samples][threads]: the maximum of each thread's part of the columns; then as many that a screen has seen.
    std::vector<Maximum> maxima_;
    std::vector<int> looked_at_;   // [threads]: number of blocks of the head that a screen has left in question
    std::vector<Route> routes_;             // [rows][experts_per_token], the likeliest expert first
    std::vector<int> first_slots_;          // of each held expert, and the end of the last
    std::vector<int64_t> expert_costs_;     // what a block of columns costs with all experts before this one
    Buffer<float> router_logits_, expert_sums_;
    Buffer<Word> expert_rows_, expert_gated_, expert_integers_;
    LoraRuns token_runs_, sampled_runs_;  // of the step's tokens, and of its sampled rows
    Buffer<float> lowered_, gate_sums_;
    Buffer<Word> narrowed_;
    AttentionPlan plans_[2];  // without and with the window
    std::vector<Span> first_read_;  // the weights that a step reads first

    Team team_;  // last, so that it is destroyed first: until then, helpers may read the other members
};

template <class Work>
void Decoder::for_chunks(Team::Member& member, int rows, const Work& work, int multiple) {
    const int chunk = static_cast<int>(divide_up(divide_up(rows, team_.size() * 4), multiple)) * multiple;
    member.parallel_for(static_cast<int>(divide_up(rows, chunk)),
                        [&](int i) { work(i * chunk, std::min(rows, (i + 1) * chunk)); });
}

template <class Work>
void Decoder::for_row_chunks(Team::Member& member, int rows, const Work& work) {
    const int threads = team_.size(), chunks = static_cast<int>(divide_up(divide_up(rows, kernels_.row_chunk), threads)) * threads;
    member.parallel_for(chunks, [&](int i) {
        work(static_cast<int>(int64_t{rows} * i / chunks), static_cast<int>(int64_t{rows} * (i + 1) / chunks));
    });
}

}  // namespace shoal
