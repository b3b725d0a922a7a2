/* The plain C interface of native placement: what the gateway does for every request and every step of a replica. Each
   part has a twin in Python (policies/holder_table.py, routing.py, plan.py, outlook.py) that answers the same and is
   used where the library was not built. Nothing here blocks or starts threads. */
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
/* What is wrong with the table, NULL if nothing: one pass over it. */
SHOAL_API const char* shoal_table_fault(const ShoalTable* table);

/* The replica of least cost by policies/routing.py, for a request that passes no others and excludes no replicas.
   columns [rows][num_replicas] as in policies/columns.py; matched [num_replicas]: blocks of the prompt that are cached.
   num_known_blocks, spared: blocks that some replica has cached, and the part of them that other requests pay.
   num_eligible: how many replicas take such requests. Returns the replica's place, or -1 if that does not decide it: it
   takes no such requests, has no room now, costs the same as another one, or there are none. */
SHOAL_API int64_t shoal_least_cost(const int64_t* columns, int64_t num_replicas, const int64_t* matched,
                                   int64_t num_tokens, int64_t block_size, int64_t num_blocks_needed,
                                   int64_t num_known_blocks, double spared, double prefill_price,
                                   double sequence_price, int64_t* num_eligible);

/* Where the fields of a row of `Candidates.told` are (TOLD in policies/columns.py), in bytes; due_within_s [num_dues] is
   DUE_WITHIN_S. */
typedef struct ShoalTold {
    int64_t row_bytes, known, num_running, step_s, step_tokens, by_due, dues, num_dues;
    const double* due_within_s;
} ShoalTold;

/* The cluster at one moment: told [num_replicas], and the weights and limits that plans go by. patience: prompt tokens
   that a request waits for, for each second left to its objective, while a replica is idle; 0: all. */
typedef struct ShoalCluster {
    int64_t num_replicas, priced_steps;
    double now, prefill_price, decode_price, max_steps_ahead, patience;
    const char* told;
    const ShoalTold* layout;
} ShoalCluster;

/* Another gateway's request, as in policies/wishes.py. */
typedef struct ShoalWish {
    int64_t place, num_blocks, num_tokens, num_cached_blocks, decode_steps;
} ShoalWish;

/* A held request. due_s: the date that it is sent with; objective_s: that of its objective. num_known_blocks, spared: as
   in shoal_least_cost. matched [num_replicas]: blocks of the prompt that are cached. passed [num_replicas]: waiting
   tokens that it goes before, or NULL. excluded [num_replicas]: replicas that must not have it, or NULL. before
   [num_before]: other gateways' requests between it and the one before. */
typedef struct ShoalHeld {
    double due_s, objective_s, spared;
    int64_t num_tokens, num_blocks_needed, num_known_blocks, block_size, decode_steps, num_replicas, num_before;
    const int64_t *matched, *passed;
    const uint8_t* excluded;
    const ShoalWish* before;
} ShoalHeld;

/* As in policies/outlook.py. */
typedef struct ShoalOutlook {
    int64_t num_startable, num_idle, least_capacity, most_room;
    double wait_s;
} ShoalOutlook;

/* The outlook by these columns [rows][num_replicas], as in policies/columns.py, if a prompt token takes token_s. */
SHOAL_API void shoal_outlook(const ShoalCluster* cluster, const int64_t* columns, double token_s,
                             ShoalOutlook* outlook);

/* Plans requests [count] in order, up to one that may start, then *may_start is 1; or, unless plans_all, until no
   replica may start anything more. What is promised to them is counted into columns. decided [count][2]: the place
   where each is to wait, -1 if no replica takes it, and its blocks cached there. Returns how many were planned; -1 if
   out of memory, -2 if a request speaks of other replicas. */
SHOAL_API int64_t shoal_plan(const ShoalCluster* cluster, int64_t* columns, const ShoalHeld* requests, int64_t count,
                             int plans_all, int64_t* decided, int* may_start);

/* Bytes of ShoalTold, ShoalCluster, ShoalOutlook, ShoalWish and ShoalHeld here, for callers that declare them anew. */
SHOAL_API const int64_t* shoal_struct_bytes(void);

#ifdef __cplusplus
}
#endif
#endif
