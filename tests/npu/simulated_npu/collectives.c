/* HCCL between processes of one host, over POSIX shared memory: enough for torch_npu's own ProcessGroupHCCL to run.
 *
 * Calls are complete when they return. A rank that does not come is HCCL_E_TIMEOUT after HCCL_EXEC_TIMEOUT seconds
 * (HCCL_CONNECT_TIMEOUT while a communicator is made), as on devices, only that the defaults are shorter.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

enum { SUCCESS = 0, E_PARA = 1, E_MEMORY = 3, E_NOT_SUPPORT = 5, E_SYSTEM = 8, E_TIMEOUT = 9 };
enum { SUM, PROD, MAX, MIN };
enum { MAX_RANKS = 16, CHUNK = 1 << 20, LETTER = 1 << 16 };

typedef struct { _Atomic uint32_t is_full; char data[LETTER]; } mailbox_t;
typedef struct {
  _Atomic uint32_t joined, arrived, generation;
  _Atomic int32_t device[MAX_RANKS]; /* the host's number of each rank's */
  mailbox_t mail[MAX_RANKS][MAX_RANKS]; /* [from][to] */
  char slot[MAX_RANKS][CHUNK];
} shared_t;
typedef struct { uint32_t num_ranks, rank; shared_t *shared; char name[80]; int error; } comm_t;
typedef struct { char internal[4108]; } root_info_t;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}
static double timeout_s(const char *variable) {
  const char *value = getenv(variable);
  return value && *value ? atof(value) : 60.0;
}

/* Wait until *word is (or, with `other`, is no longer) `value`. */
static int await(comm_t *c, _Atomic uint32_t *word, uint32_t value, int other, const char *variable) {
  double end = now() + timeout_s(variable);
  for (int spins = 0; (atomic_load(word) == value) == other; spins++) {
    if (spins < 500) continue;
    struct timespec pause = {0, 50000};
    nanosleep(&pause, NULL);
    if (now() > end) return c->error = E_TIMEOUT;
  }
  return SUCCESS;
}
static int barrier(comm_t *c) {
  shared_t *s = c->shared;
  uint32_t generation = atomic_load(&s->generation);
  if (atomic_fetch_add(&s->arrived, 1) + 1 == c->num_ranks) {
    atomic_store(&s->arrived, 0);
    atomic_fetch_add(&s->generation, 1);
    return SUCCESS;
  }
  return await(c, &s->generation, generation, 1, "HCCL_EXEC_TIMEOUT");
}

/* ---- communicators --------------------------------------------------------------------------------------------- */
int HcclGetRootInfo(root_info_t *info) {
  uint64_t token[2];
  memset(info, 0, sizeof *info);
  if (getrandom(token, sizeof token, 0) != sizeof token) return E_SYSTEM;
  snprintf(info->internal, 64, "simulated_hccl_%016lx%016lx", token[0], token[1]);
  return SUCCESS;
}
int HcclCommInitRootInfo(uint32_t num_ranks, const root_info_t *info, uint32_t rank, void **out) {
  if (num_ranks > MAX_RANKS || rank >= num_ranks) return E_PARA;
  comm_t *c = calloc(1, sizeof *c);
  c->num_ranks = num_ranks;
  c->rank = rank;
  snprintf(c->name, sizeof c->name, "/%.70s", info->internal);
  int file = shm_open(c->name, O_CREAT | O_RDWR, 0600);
  if (file < 0 || ftruncate(file, sizeof(shared_t))) return E_SYSTEM;
  c->shared = mmap(NULL, sizeof(shared_t), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (c->shared == MAP_FAILED) return E_MEMORY;
  uint32_t before;
  const char *visible = getenv("ASCEND_RT_VISIBLE_DEVICES");
  atomic_store(&c->shared->device[rank], visible ? atoi(visible) : 0); /* a process uses the first that it sees */
  atomic_fetch_add(&c->shared->joined, 1);
  while ((before = atomic_load(&c->shared->joined)) < num_ranks) {
    int status = await(c, &c->shared->joined, before, 1, "HCCL_CONNECT_TIMEOUT");
    if (status) { shm_unlink(c->name); return status; }
  }
  int status = barrier(c);
  for (uint32_t other = 0; other < num_ranks; other++) /* as on hosts: a device has one rank of a communicator */
    if (other != rank && atomic_load(&c->shared->device[other]) == atomic_load(&c->shared->device[rank])) status = E_PARA;
  if (rank == 0) shm_unlink(c->name); /* all have it open: nothing is left behind, however they end */
  *out = c;
  return status;
}
int HcclCommInitRootInfoConfig(uint32_t n, const root_info_t *info, uint32_t rank, void *config, void **out) {
  (void)config;
  return HcclCommInitRootInfo(n, info, rank, out);
}
int HcclCommDestroy(void *comm) {
  if (comm) { munmap(((comm_t *)comm)->shared, sizeof(shared_t)); free(comm); }
  return SUCCESS;
}
int HcclGetCommAsyncError(void *comm, int *error) { *error = ((comm_t *)comm)->error; return SUCCESS; }
int HcclGetCommName(void *comm, char *name) { strcpy(name, ((comm_t *)comm)->name + 1); return SUCCESS; }
int HcclGetRankSize(void *comm, uint32_t *n) { *n = ((comm_t *)comm)->num_ranks; return SUCCESS; }
int HcclGetRankId(void *comm, uint32_t *n) { *n = ((comm_t *)comm)->rank; return SUCCESS; }
const char *HcclGetErrorString(int code) { return code == E_TIMEOUT ? "EI0006: a rank did not come in time" : code ? "error" : "success"; }
uint32_t HcclGetCommConfigCapability(void) { return 0; }

/* ---- numbers --------------------------------------------------------------------------------------------------- */
static size_t width(int type) { /* HcclDataType */
  switch (type) {
    case 0: case 7: return 1;
    case 1: case 3: case 11: return 2;
    case 2: case 4: case 9: return 4;
    case 5: case 6: case 10: return 8;
    default: return 0;
  }
}
static float from_bf16(uint16_t v) { uint32_t u = (uint32_t)v << 16; float f; memcpy(&f, &u, 4); return f; }
static uint16_t to_bf16(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  if ((u & 0x7fffffff) > 0x7f800000) return (uint16_t)(u >> 16 | 64);
  return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
static double combine(double a, double b, int op) { return op == SUM ? a + b : op == PROD ? a * b : op == MAX ? (b > a ? b : a) : (b < a ? b : a); }
#define REDUCE(type, read, write)                                                                                     \
  for (size_t i = 0; i < count; i++) {                                                                                \
    double total = read(((type *)c->shared->slot[0])[i]);                                                             \
    for (uint32_t r = 1; r < c->num_ranks; r++) total = combine(total, read(((type *)c->shared->slot[r])[i]), op);    \
    ((type *)out)[i] = (type)write(total);                                                                            \
  }                                                                                                                   \
  return SUCCESS
static int reduce(comm_t *c, void *out, size_t count, int type, int op) {
  switch (type) {
    case 0: REDUCE(int8_t, (double), (int8_t));
    case 1: REDUCE(int16_t, (double), (int16_t));
    case 2: REDUCE(int32_t, (double), (int32_t));
    case 4: REDUCE(float, (double), (float));
    case 5: REDUCE(int64_t, (double), (int64_t));
    case 7: REDUCE(uint8_t, (double), (uint8_t));
    case 10: REDUCE(double, (double), (double));
    case 11: REDUCE(uint16_t, from_bf16, to_bf16);
    default: return E_NOT_SUPPORT;
  }
}

/* ---- collectives ----------------------------------------------------------------------------------------------- */
enum { ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST };
typedef struct { int32_t kind, type, op; uint32_t root; const void *send; void *receive; uint64_t count; void *comm; } call_t;

/* Every rank puts a piece of at most CHUNK bytes in its slot; then every rank reads what it needs of all slots. */
static int exchange(comm_t *c, const call_t *call, const char *from, char *to, size_t offset, size_t count, uint32_t owner) {
  size_t size = width(call->type), bytes = count * size;
  int status;
  if (call->kind != BROADCAST || c->rank == call->root) memcpy(c->shared->slot[c->rank], from + offset * size, bytes);
  if ((status = barrier(c))) return status;
  if (call->kind == ALL_REDUCE || (call->kind == REDUCE_SCATTER && owner == c->rank)) {
    if ((status = reduce(c, to + offset * size, count, call->type, call->op))) return status;
  } else if (call->kind == ALL_GATHER) {
    for (uint32_t r = 0; r < c->num_ranks; r++) memcpy(to + (r * call->count + offset) * size, c->shared->slot[r], bytes);
  } else if (call->kind == BROADCAST && c->rank != call->root) {
    memcpy(to + offset * size, c->shared->slot[call->root], bytes);
  }
  return barrier(c);
}
int simulated_hccl_run(const call_t *call) {
  comm_t *c = call->comm;
  size_t size = width(call->type);
  if (!size) return E_NOT_SUPPORT;
  uint32_t rounds = call->kind == REDUCE_SCATTER ? c->num_ranks : 1;
  for (uint32_t owner = 0; owner < rounds; owner++) {
    const char *from = (const char *)call->send + owner * call->count * size;
    for (uint64_t offset = 0; offset < call->count; offset += CHUNK / size) {
      uint64_t left = call->count - offset, count = left < CHUNK / size ? left : CHUNK / size;
      int status = exchange(c, call, from, call->receive, offset, count, owner);
      if (status) return status;
    }
  }
  return SUCCESS;
}

/* While a graph is captured nothing runs; the call is told to Python, which repeats it at each replay. */
int simulated_npu_is_capturing(void);
typedef void (*on_capture_t)(const call_t *call);
static on_capture_t on_capture;
void simulated_hccl_on_capture(on_capture_t callback) { on_capture = callback; }
static int submit(call_t call) {
  if (!simulated_npu_is_capturing()) return simulated_hccl_run(&call);
  if (!on_capture) return E_NOT_SUPPORT;
  on_capture(&call);
  return SUCCESS;
}
int HcclAllReduce(void *send, void *receive, uint64_t count, int type, int op, void *comm, void *stream) {
  (void)stream;
  return submit((call_t){ALL_REDUCE, type, op, 0, send, receive, count, comm});
}
int HcclAllGather(void *send, void *receive, uint64_t count, int type, void *comm, void *stream) {
  (void)stream;
  return submit((call_t){ALL_GATHER, type, 0, 0, send, receive, count, comm});
}
int HcclReduceScatter(void *send, void *receive, uint64_t count, int type, int op, void *comm, void *stream) {
  (void)stream;
  return submit((call_t){REDUCE_SCATTER, type, op, 0, send, receive, count, comm});
}
int HcclBroadcast(void *buffer, uint64_t count, int type, uint32_t root, void *comm, void *stream) {
  (void)stream;
  return submit((call_t){BROADCAST, type, 0, root, buffer, buffer, count, comm});
}
int HcclBarrier(void *comm, void *stream) { (void)stream; return barrier(comm); }

/* ---- point to point -------------------------------------------------------------------------------------------- */
static int post(comm_t *c, uint32_t to, const char *data, size_t bytes) {
  mailbox_t *box = &c->shared->mail[c->rank][to];
  int status = await(c, &box->is_full, 0, 0, "HCCL_EXEC_TIMEOUT");
  if (status) return status;
  memcpy(box->data, data, bytes);
  atomic_store(&box->is_full, 1);
  return SUCCESS;
}
static int collect(comm_t *c, uint32_t from, char *data, size_t bytes) {
  mailbox_t *box = &c->shared->mail[from][c->rank];
  int status = await(c, &box->is_full, 1, 0, "HCCL_EXEC_TIMEOUT");
  if (status) return status;
  memcpy(data, box->data, bytes);
  atomic_store(&box->is_full, 0);
  return SUCCESS;
}
static size_t letter(size_t left) { return left < LETTER ? left : LETTER; }
int HcclSend(void *data, uint64_t count, int type, uint32_t to, void *comm, void *stream) {
  (void)stream;
  size_t bytes = count * width(type);
  for (size_t at = 0; at < bytes; at += LETTER) {
    int status = post(comm, to, (char *)data + at, letter(bytes - at));
    if (status) return status;
  }
  return SUCCESS;
}
int HcclRecv(void *data, uint64_t count, int type, uint32_t from, void *comm, void *stream) {
  (void)stream;
  size_t bytes = count * width(type);
  for (size_t at = 0; at < bytes; at += LETTER) {
    int status = collect(comm, from, (char *)data + at, letter(bytes - at));
    if (status) return status;
  }
  return SUCCESS;
}
int HcclAlltoAllV(const void *send, const uint64_t *send_counts, const uint64_t *send_at, int type, void *receive,
                  const uint64_t *receive_counts, const uint64_t *receive_at, int receive_type, void *comm, void *stream) {
  (void)stream;
  if (type != receive_type) return E_PARA;
  comm_t *c = comm;
  size_t size = width(type);
  for (uint32_t d = 0; d < c->num_ranks; d++) { /* in round d everyone writes to the one d places on */
    uint32_t to = (c->rank + d) % c->num_ranks, from = (c->rank + c->num_ranks - d) % c->num_ranks;
    size_t out = send_counts[to] * size, in = receive_counts[from] * size;
    for (size_t at = 0; at < out || at < in; at += LETTER) {
      int status = SUCCESS;
      if (at < out) status = post(c, to, (const char *)send + send_at[to] * size + at, letter(out - at));
      if (!status && at < in) status = collect(c, from, (char *)receive + receive_at[from] * size + at, letter(in - at));
      if (status) return status;
    }
  }
  return barrier(c);
}
int HcclAlltoAll(const void *send, uint64_t send_count, int type, void *receive, uint64_t receive_count, int receive_type,
                 void *comm, void *stream) {
  uint64_t counts[4][MAX_RANKS];
  for (uint32_t r = 0; r < MAX_RANKS; r++) {
    counts[0][r] = send_count;
    counts[1][r] = r * send_count;
    counts[2][r] = receive_count;
    counts[3][r] = r * receive_count;
  }
  return HcclAlltoAllV(send, counts[0], counts[1], type, receive, counts[2], counts[3], receive_type, comm, stream);
}
