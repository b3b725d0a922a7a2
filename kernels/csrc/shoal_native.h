/* The plain C interface of the native decoder: raw pointers in, status out. */
#ifndef SHOAL_NATIVE_H
#define SHOAL_NATIVE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The library is built with hidden symbols: these are the only ones that it exports. */
#define SHOAL_API __attribute__((visibility("default")))

typedef struct ShoalDecoder ShoalDecoder;

/* A decoder, or one rank's shard of it: its layers, and of each layer its heads and MLP columns.
   dtype: 0 bfloat16, 1 float32; of weights, activations between products, and KV. sliding_window: of the layers that
   have one, 0 if none has. vocab_begin, vocab_rows: the rows of embedding and head that are here. The first stage
   embeds, the last one has the head. norms_span_heads: whether queries, and keys, are normed all heads together.
   gelu: whether MLPs are gated by it (its tanh approximation) and not by SiLU. num_experts: of each layer that has a
   mixture of them in place of its MLP, 0 if none has; of these, held_experts from first_expert on are here. shared_size:
   of the MLP that all tokens pass through beside the experts, 0 if there is none. */
typedef struct ShoalShape {
    int32_t dtype, vocab_size, hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_size;
    int32_t block_size, num_blocks, num_threads, sliding_window, max_positions, tied_embeddings;
    int32_t vocab_begin, vocab_rows, is_first_stage, is_last_stage, norms_span_heads, gelu;
    int32_t num_experts, first_expert, held_experts, experts_per_token, expert_size, shared_size;
    int32_t renormalizes_experts; /* the weights of a token's experts add up to 1, before they are scaled */
    int32_t sigmoid_router;       /* scores are sigmoids of the router's products, not a softmax over all */
    float rms_norm_eps, embedding_scale, attention_scale, expert_scale;
    char kernels[16]; /* name of an instruction set, or empty for the best */
} ShoalShape;

#define SHOAL_EXCHANGE_LINE 64

/* How the ranks that share each layer exchange their parts of `capacity` floats: at least a row of the hidden size or
   of a rank's vocabulary. Either through memory that all have mapped, zeroed before the first rank uses it:
   SHOAL_EXCHANGE_LINE bytes per rank, then two parts per rank. Or by a function that fills parts [size][count] and
   returns 0. The other one is NULL. */
typedef struct ShoalExchange {
    int32_t rank, size;
    int64_t capacity;
    void* memory;
    int (*gather)(const float* part, int64_t count, float* parts);
    double timeout_s; /* longest wait for a rank, through memory */
} ShoalExchange;

/* Row-major, in the decoder's dtype; norms float32. QKV is [query; key; value] rows, GATE_UP is [gate; up] rows, and
   EXPERT_ parameters are those of one held expert after the other. A layer has experts if its ROUTER is set; its
   ROUTER_BIAS, float32, counts for the choice of a sigmoid router's experts, not for their weights.
   ATTENTION_NORM and MLP_NORM come before attention and MLP, POST_NORMs after them, before their output is added to the
   residual stream; a layer has those that are set. */
typedef enum ShoalParameter {
    SHOAL_EMBEDDING = 0, SHOAL_HEAD = 1, SHOAL_FINAL_NORM = 2,
    SHOAL_ATTENTION_NORM = 3, SHOAL_MLP_NORM = 4, SHOAL_QUERY_NORM = 5, SHOAL_KEY_NORM = 6,
    SHOAL_QKV = 7, SHOAL_QKV_BIAS = 8, SHOAL_OUTPUT = 9, SHOAL_OUTPUT_BIAS = 10,
    SHOAL_GATE_UP = 11, SHOAL_GATE_UP_BIAS = 12, SHOAL_DOWN = 13, SHOAL_DOWN_BIAS = 14,
    SHOAL_ATTENTION_POST_NORM = 15, SHOAL_MLP_POST_NORM = 16,
    SHOAL_ROUTER = 17, SHOAL_EXPERT_GATE_UP = 18, SHOAL_EXPERT_DOWN = 19,
    SHOAL_ROUTER_BIAS = 20, SHOAL_SHARED_GATE_UP = 21, SHOAL_SHARED_DOWN = 22
} ShoalParameter;

/* How a layer rotates queries and keys: by the table of all layers, by that of layers with a window, or not at all. */
typedef enum ShoalRotary { SHOAL_ROTARY_FULL = 0, SHOAL_ROTARY_WINDOW = 1, SHOAL_UNROTATED = 2 } ShoalRotary;

/* One step: the tokens of num_seqs sequences, one after the other. */
typedef struct ShoalStep {
    int32_t num_tokens, num_seqs, num_samples;
    const int64_t* input_ids;       /* [num_tokens] */
    const int64_t* positions;       /* [num_tokens] */
    const int64_t* slots;           /* [num_tokens]: block * block_size + offset */
    const int32_t* query_start_loc; /* [num_seqs + 1] */
    const int32_t* seq_lens;        /* [num_seqs], including this step's tokens */
    const int32_t* block_tables;    /* [num_seqs][table_stride] */
    int64_t table_stride;
    const int64_t* sample_rows;     /* [num_samples] */
    float* logits;                  /* [num_samples][vocab_size]; NULL if another rank of the exchange takes them */
    float* hidden;                  /* [num_tokens][hidden_size]: read on all stages but the first, written on all but
                                       the last, which alone has logits */
    int32_t maxima_alone;           /* whether only the maxima are wanted: the contents of logits are then undefined */
    const int32_t* adapters;        /* [num_seqs]: slot of each sequence's adapter, -1 for none; NULL if none has one */
} ShoalStep;

/* Functions that return int return 0 on success, or -1 with a message in shoal_error() of the calling thread. */
/* exchange: NULL for a rank that does not share its layers. Returns NULL on error. */
SHOAL_API ShoalDecoder* shoal_decoder_create(const ShoalShape* shape, const ShoalExchange* exchange);
SHOAL_API void shoal_decoder_destroy(ShoalDecoder* decoder);
SHOAL_API int shoal_decoder_set(ShoalDecoder* decoder, int32_t parameter, int32_t layer, const void* data,
                                int64_t count); /* count: number of values in data */
/* A matrix as value * scale + minimum: values [outputs][inputs], one byte each: int8, without minimums (NULL), or
   unsigned with 4 bits; scales and minimums bfloat16 [outputs][inputs / 32]. activation_bits: 16 or 8, of the integers
   that its rows are rounded to. count: number of values. */
SHOAL_API int shoal_decoder_set_integers(ShoalDecoder* decoder, int32_t parameter, int32_t layer, int32_t bits,
                                         int32_t activation_bits, const uint8_t* values, const uint16_t* scales,
                                         const uint16_t* minimums, int64_t count);
/* table: SHOAL_ROTARY_FULL or SHOAL_ROTARY_WINDOW; cos_sin [max_positions][head_size]. */
SHOAL_API int shoal_decoder_set_rotary(ShoalDecoder* decoder, int32_t table, const float* cos_sin);
/* Without it, a layer has the window and the first table. */
SHOAL_API int shoal_decoder_set_layer(ShoalDecoder* decoder, int32_t layer, int32_t has_window, int32_t rotary);
/* A new adapter, which adds to nothing yet. Returns its slot. */
SHOAL_API int shoal_decoder_add_adapter(ShoalDecoder* decoder);
/* What an adapter adds to a projection (QKV, OUTPUT, GATE_UP or DOWN) of a layer: to y = x W^T it adds
   (x down^T) up^T. Both in the decoder's dtype: down [rank][inputs], up [outputs][rank]. */
SHOAL_API int shoal_decoder_set_factors(ShoalDecoder* decoder, int32_t slot, int32_t parameter, int32_t layer, int32_t rank,
                                        const void* down, const void* up);
SHOAL_API int shoal_decoder_remove_adapter(ShoalDecoder* decoder, int32_t slot);
/* Computes a step, and for each row of logits the largest value (NaN if the row has one) and its first index. Neither is
   written if another rank takes the logits or the stage is not the last. Returns -2 if another rank did not come. */
SHOAL_API int shoal_decoder_step(ShoalDecoder* decoder, const ShoalStep* step, float* values, int64_t* places);
SHOAL_API int shoal_decoder_copy_blocks(ShoalDecoder* decoder, const int64_t* pairs, int32_t count);
/* The contents of blocks, for a decoder of the same shape and instruction set: block_bytes for each. */
SHOAL_API int64_t shoal_decoder_block_bytes(const ShoalDecoder* decoder);
SHOAL_API void shoal_decoder_read_blocks(const ShoalDecoder* decoder, const int64_t* blocks, int32_t count,
                                         void* contents);
SHOAL_API void shoal_decoder_write_blocks(ShoalDecoder* decoder, const int64_t* blocks, int32_t count,
                                          const void* contents);
/* A number that changes as a step progresses; any thread may call it. */
SHOAL_API uint64_t shoal_decoder_progress(const ShoalDecoder* decoder);
/* The largest value of each row (NaN if the row has one) and its first index. */
SHOAL_API void shoal_row_maxima(const float* rows, int64_t num_rows, int64_t size, float* values, int64_t* places);
/* How a place is drawn from a row of logits: by softmax((x - largest) / temperature), of which stay scores of at least
   `least_score`, then the top_k largest and their equals (0 for all), then the likeliest that reach top_p; the first
   place at which the running sum of their probabilities exceeds `uniform`, in [0, 1). */
typedef struct ShoalDraw {
    float temperature, least_score;
    int64_t top_k;
    double top_p, uniform;
} ShoalDraw;
/* Draws from rows numbers[i] of logits [..][size], which are finite but for -inf: by all threads of the decoder, or
   without one (NULL) by the caller. */
SHOAL_API int shoal_draw(ShoalDecoder* decoder, const float* logits, int64_t size, const int64_t* numbers, int64_t count,
                         const ShoalDraw* draws, int64_t* places);
/* Of the same rows the log-probability of one place, values [count], and the likeliest num_top[i] places with theirs,
   [count][stride], likeliest first, of equals the lower places. */
SHOAL_API int shoal_log_probabilities(ShoalDecoder* decoder, const float* logits, int64_t size, const int64_t* numbers,
                                      int64_t count, const int64_t* places, const int64_t* num_top, int64_t stride,
                                      float* values, int64_t* top_places, float* top_values);
SHOAL_API const char* shoal_decoder_kernels(const ShoalDecoder* decoder);
SHOAL_API const char* shoal_supported_kernels(void);
SHOAL_API const char* shoal_error(void);
/* Bytes of ShoalShape, ShoalStep and ShoalExchange here, for callers that declare them anew. */
SHOAL_API const int64_t* shoal_struct_bytes(void);

#ifdef __cplusplus
}
#endif

#endif
