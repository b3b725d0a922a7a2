/* The plain C interface of native placement: what the gateway does for every request and every step of a replica. Each
   part has a twin in Python (policies/holder_table.py, policies/routing.py) that answers the same and is used where
   the library was not built. Nothing here blocks or starts threads. */
#ifndef SHOAL_PLACEMENT_H
#define SHOAL_PLACEMENT_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The library is built with hidden symbols; only these are exported. */
#define SHOAL_API __attribute__((visibility("default")))

/* Blocks and the slots that hold them. `digests` are `count` block hashes of `digest_bytes` each, one after another. */
typedef struct ShoalTable ShoalTable;

typedef struct ShoalCounts {
    int64_t num_entries, num_evicted;
} ShoalCounts;

/* Returns NULL if out of memory. max_entries: the hard cap, 32 times a power of two. */
SHOAL_API ShoalTable* shoal_table_create(int64_t max_entries, int64_t digest_bytes);
SHOAL_API void shoal_table_destroy(ShoalTable* table);

/* The number of entries, and of entries evicted to make room: kept up to date as long as the table exists. */
SHOAL_API const ShoalCounts* shoal_table_counts(const ShoalTable* table);
SHOAL_API int64_t shoal_table_num_bytes(const ShoalTable* table);
SHOAL_API int64_t shoal_table_num_slots(const ShoalTable* table);
SHOAL_API int64_t shoal_table_num_held(const ShoalTable* table, int64_t slot);

/* Doubles the slots. This, hold and release return 0, or -1 if out of memory: the table must not be used then. */
SHOAL_API int shoal_table_add_slots(ShoalTable* table);
SHOAL_API int shoal_table_hold(ShoalTable* table, int64_t slot, const char* digests, int64_t count);
SHOAL_API int shoal_table_release(ShoalTable* table, int64_t slot, const char* digests, int64_t count);
SHOAL_API int shoal_table_release_all(ShoalTable* table, int64_t slot);
SHOAL_API void shoal_table_use(ShoalTable* table, const char* digests, int64_t count);

/* counts [slots]: leading digests that each slot holds. also: NULL, or further holders of each digest, as bits
   [count][slots / 64]. */
SHOAL_API int shoal_table_lengths(const ShoalTable* table, const char* digests, int64_t count, const uint64_t* also,
                                   int64_t* counts);
/* is_held [count]: whether the slot holds each digest. */
SHOAL_API void shoal_table_is_held(const ShoalTable* table, int64_t slot, const char* digests, int64_t count,
                                   uint8_t* is_held);
/* What is wrong with the table, NULL if nothing: one pass over it. */
SHOAL_API const char* shoal_table_fault(const ShoalTable* table);

/* The replica of least cost by policies/routing.py, for a request that passes no others and excludes no replicas.
   columns [rows][num_replicas] as in policies/columns.py; matched [num_replicas]: blocks of the prompt that are cached.
   num_eligible: how many replicas take such requests. Returns the replica's place, or -1 if that does not decide it: it
   takes no such requests, has no room now, costs the same as another one, or there are none. */
SHOAL_API int64_t shoal_least_cost(const int64_t* columns, int64_t num_replicas, const int64_t* matched,
                                   int64_t num_tokens, int64_t block_size, int64_t num_blocks_needed,
                                   double prefill_price, double sequence_price, int64_t* num_eligible);

#ifdef __cplusplus
}
#endif
#endif
