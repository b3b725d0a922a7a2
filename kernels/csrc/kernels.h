// The interface that every instruction set implements, and the packed data that it shares with the decoder.
//
// Words of all files here: a *block* of the KV cache is the block pool's; a *page* is 16 tokens of one KV head in it; a
// *huge page* is the system's (memory.h); a *panel* is 16 columns of a packed weight, and a weight block two of these.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "memory.h"
#include "shoal_native.h"

namespace shoal {

// Two bf16 values that are consecutive along the summed dimension, or one float32.
using Word = uint32_t;

enum class Dtype : int32_t { Bf16 = 0, Float32 = 1 };

// How a weight is stored: in the dtype; as bf16 coded in 12 bits without loss (coded.h); or as integers, of which
// kGroup inputs of an output share a scale. To be multiplied with integers, activations become integers as well, each
// group with a scale of its own: of 16 bits, which represent a group of bf16 values almost without loss, or of 8, of
// which some instruction sets multiply twice as many at a time.
enum class Format : int32_t { Plain = 0, Coded = 12, Int8 = 8, Int4 = 4 };

inline bool is_integer(Format format) { return format == Format::Int8 || format == Format::Int4; }

inline int values_per_word(Dtype dtype) { return dtype == Dtype::Bf16 ? 2 : 1; }
inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int kPanel = 16;          // columns of a weight panel; tokens of a KV page
constexpr int kBlockColumns = 32;   // columns of a weight block: two panels; word s of all its columns is contiguous
constexpr int kGroup = 32;          // inputs that share a scale in integer formats
constexpr int kMaxHeadSize = 256;
constexpr int kAttentionRows = 96;  // query rows (token, head of the group) that a unit may have with every set
constexpr int kSharedRows = 48;     // rows of units that read pages together: enough to use each page often

// y = x W^T + bias, packed for the matrix product: a block holds all inputs of 32 columns.
// Plain: words [inputs / pack][32].
// Integers: for each group, words [bits][32], then 16 words with the scales, in bf16, of columns c (lower half) and
// c + 16, and for Int4 16 more with their minimums. A word holds pairs of consecutive inputs, one in its lower and one
// in its upper 16 bits: for Int8 two pairs of signed bytes, for Int4 four pairs of nibbles.
// Coded: for each 32 inputs the tile of the first 16 columns, then that of the other 16, as in coded.h.
// A gated pair interleaves panels: block b holds 16 gate columns, then the 16 up columns of the same outputs.
struct Linear {
    Dtype dtype = Dtype::Bf16;
    Format format = Format::Plain;
    int outputs = 0;  // rows of W
    int inputs = 0;   // columns of W
    int row_bits = 16;  // of the integers that rows become; for weights that are integers
    int blocks = 0;
    bool gated = false;
    Word* words = nullptr;    // in the arena that it was packed into
    std::vector<int64_t> starts;  // Coded: the word at which each block begins, and the end of the last
    std::vector<uint8_t> tops;    // Coded: the top of each tile
    std::vector<float> bias;  // in packed column order; empty without bias

    int bits() const { return static_cast<int>(format); }
    int steps() const { return inputs / values_per_word(dtype); }  // words of a column of a plain weight
    int groups() const { return inputs / kGroup; }
    int64_t group_words() const {
        return int64_t{bits()} * kBlockColumns + (format == Format::Int4 ? 2 : 1) * kPanel;
    }
    int64_t block_words() const {  // for all formats but Coded, whose blocks differ in size
        return format == Format::Plain ? int64_t{steps()} * kBlockColumns : groups() * group_words();
    }
    int64_t start(int64_t b) const { return format == Format::Coded ? starts[b] : b * block_words(); }
    Word* block(int64_t b) const { return words + start(b); }
    const uint8_t* tops_of(int64_t b) const { return tops.data() + b * 2 * groups(); }
};

// A row as integers, to be multiplied with a weight that has integers. For each group: its values in pairs, as 16-bit
// integers, or if Linear::row_bits is 8 and the set multiplies bytes, as bytes in the order of the weight's; its scale;
// and for Int4 the sum of its values, or for bytes by Int8 what its sums start from (an integer, see kByteOffset).
constexpr int kRowScale = 0, kRowSum = 1, kRowNumbers = 2;  // words after the values
constexpr int row_group_words(bool bytes) { return (bytes ? kGroup / 4 : kGroup / 2) + kRowNumbers; }

enum class Finish {
    Store,   // out = y, float32
    Add,     // out += y, float32: the residual stream
    SwiGlu,  // out = silu(gate) * up, in the dtype of the weights
    GeGlu,   // out = gelu(gate) * up, by the tanh approximation
};
constexpr bool is_gated(Finish finish) { return finish == Finish::SwiGlu || finish == Finish::GeGlu; }

// A product, of which Kernels::gemm computes rows [row_begin, row_end) by blocks [block_begin, block_end).
struct GemmCall {
    const Linear* linear;
    const Word* x;     // rows in the dtype, or as integers if the weight has integers; in gemm() also widened to float32
    int64_t x_stride;  // in four-byte elements of x
    void* out;
    int64_t out_stride;  // in values of out
    Finish finish;
};

// Brings one step's projected queries, keys and values into the attention's own layout and the KV pages.
struct RotaryCall {
    const float* qkv;  // [tokens][(heads + 2 kv_heads) * head_size]
    Word* queries;     // [kv head][tokens][group][head_size]
    Word* pool;        // this layer's pages
    const int64_t* positions;
    const int64_t* slots;
    const float* cos_sin;       // [positions][head_size]: cosines, then sines
    const float* query_norm;    // [head_size], or [heads][head_size] if norms span all heads; or null
    const float* key_norm;      // the same, of the KV heads
    float eps;
    int tokens, heads, kv_heads, head_size, block_size;
    bool norms_span_heads;
};

// Queries [first_token, first_token + tokens) of a sequence against keys [key_begin, key_end), for one KV head.
struct AttentionUnit {
    int sequence;
    int kv_head;
    int first_row;   // row of the step's tokens at which the unit's queries begin
    int tokens;
    int position;    // of the first query
    int key_begin, key_end;
    int partial;     // index of its unnormalised result, or -1 if it covers all keys of its queries
};

struct AttentionCall {
    const Word* queries;  // [kv head][step tokens][group][head_size]
    const Word* pool;     // this layer's pages
    const int32_t* block_tables;
    int64_t table_stride;
    void* out;            // [step tokens][heads * head_size], in the dtype
    int64_t out_stride;   // values
    float* partials;      // [places][group][head_size + 2]: sums, then maximum and denominator
    float scale;
    int step_tokens, heads, kv_heads, head_size, block_size, window;  // window 0: none
};

// KV pages: [block][kv head][block_size / 16][keys, values]. Keys are [head_size / pack][16 tokens] words, values
// [16 tokens / pack][head_size] words: as stored, both can be right-hand sides of a matrix product.
inline int64_t page_words(Dtype dtype, int head_size) {
    return static_cast<int64_t>(head_size) * kPanel / values_per_word(dtype);
}

// The largest value and its first index; if there is a NaN, NaN and the index of the first one.
struct Maximum {
    float value;
    int64_t place;
};
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

struct Kernels {
    const char* name;
    void (*gemm)(const GemmCall&, int row_begin, int row_end, int block_begin, int block_end);
    void (*round_row)(const Word* x, Word* out, const Linear&);  // one row of bf16 to integers, as the weight asks
    void (*rms_norm)(Dtype, const float* x, const float* weight, float eps, void* out, int size);
    void (*add_rms_norm)(const float* x, const float* weight, float eps, float* stream, int size);  // stream += the norm
    void (*rotary)(Dtype, const RotaryCall&, int token_begin, int token_end);
    // `count` units of one KV head. If there are several, each has one query token, and all share the pages before key
    // `shared_end`. next: the unit that this thread is likely to take next, whose first pages are prefetched; or the
    // last unit again.
    void (*attention)(Dtype, const AttentionCall&, const AttentionUnit* units, int count, int shared_end,
                      const AttentionUnit& next);
    Maximum (*row_maximum)(const float* row, int64_t size);  // size: at least 1
    // Rows are finite but for -inf, and not only that. Returns the place drawn.
    int64_t (*draw)(const float* row, int64_t size, const ShoalDraw&);
    // Returns the log-probability of `place`, and writes those of the `count` likeliest; of equals, lower places first.
    float (*log_probabilities)(const float* row, int64_t size, int64_t place, int64_t count, int64_t* places,
                               float* values);
    void (*merge)(Dtype, const AttentionCall&, const AttentionUnit& first, int parts);
    void (*narrow)(Dtype, const float* x, void* out, int size);  // to the dtype
    // As a product with the gated `finish`, from the sums of a gated pair in the order of its packed columns.
    void (*gate)(Dtype, Finish finish, const float* sums, void* out, int blocks);
    int attention_rows;  // query rows that an attention unit may have
    int row_chunk;   // rows in a unit of a product: the L2 cache holds them, and they are worth reading weights for
    // Work is split by rows if each thread has at least this many rows times the number of threads. What all threads
    // together read of weights per second then does not grow with their number.
    int least_rows;
    // The most sampled rows in a step for which an 8-bit product, and computing what it leaves in question, take less
    // time than the bf16 head; 0 for none.
    int screened_rows;
    bool multiplies_bytes;  // 8-bit rows are held as bytes
    bool codes;  // bf16 weights whose inputs are whole groups are Coded

    // Words of a row as the integers that a weight asks for.
    int64_t row_words(const Linear& linear) const {
        return int64_t{linear.groups()} * row_group_words(multiplies_bytes && linear.row_bits == 8);
    }
};

// The best set that this machine supports, or the named one; null if that is not built or not supported here.
const Kernels* find_kernels(const char* name);
// Comma-separated names, best first, of the sets that this machine supports.
const char* supported_kernels();

Linear pack_linear(Arena& arena, Dtype dtype, const void* weight, int outputs, int inputs, bool gated);
// For bf16 weights whose inputs are whole groups.
Linear code_linear(Arena& arena, const void* weight, int outputs, int inputs, bool gated);
// A matrix as value * scale + minimum. Values are signed for Int8, which has no minimums, and unsigned for Int4.
struct Integers {
    Format format;
    int row_bits;              // see Linear
    const uint8_t* values;     // [outputs][inputs]
    const uint16_t* scales;    // bf16 [outputs][groups]
    const uint16_t* minimums;  // the same, or null
};
// Initially zero, to be filled by pack_output.
Linear make_integers(Arena& arena, Format format, int outputs, int inputs, bool gated);
// Packs one output into a column of a block: its values, its scales, and its minimums or null.
void pack_output(const Linear& linear, Word* block, int column, const uint8_t* values, const uint16_t* scales,
                 const uint16_t* minimums);
Linear pack_integers(Arena& arena, const Integers& integers, int outputs, int inputs, bool gated);
std::vector<float> pack_bias(const Linear& linear, Dtype dtype, const void* bias);
// Unpacks row `output` of the weight to float32: a packed head can also be the embedding.
void unpack_row(const Linear& linear, int output, float* out);

}  // namespace shoal
