/* The part of the ACL runtime that torch_npu links against or looks up by name, on host memory.
 *
 * A "device" pointer is an ordinary one, so what torch keeps on npu:0 can be read by the CPU. Every call is complete
 * when it returns; the order that streams and events promise is told to an observer, which checks that callers rely on
 * no more than that. There are no operators here: Python supplies them. A symbol that the wheel needs and this file
 * does not define is made to return 0 (ACL_SUCCESS) when the library is built.
 */
#define _GNU_SOURCE
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { SUCCESS = 0, INVALID_PARAM = 100000, NO_CONTEXT = 107002, OUT_OF_MEMORY = 207001, NO_OPERATOR = 500001 };
enum { MAX_DEVICES = 16, HEADER = 512, POISON = 0xff };

static _Thread_local int32_t current_device = -1;
static _Thread_local char last_error[512];
static int64_t used_bytes[MAX_DEVICES];

static long setting(const char *name, long fallback) {
  const char *value = getenv(name);
  return value && *value ? atol(value) : fallback;
}
static int32_t device(void) { return current_device < 0 ? 0 : current_device; }
static int64_t memory_bytes(void) { return (int64_t)setting("SIMULATED_NPU_MEMORY_MB", 1024) << 20; }

/* ---- the observer ---------------------------------------------------------------------------------------------- */
enum {
  CAPTURE_BEGIN = 1, CAPTURE_END, REPLAY, GRAPH_DESTROY, GROUP_BEGIN, GROUP_END, UPDATE_BEGIN, UPDATE_END,
  EVENT_RECORD, EVENT_WAIT, EVENT_SYNC, STREAM_SYNC, DEVICE_SYNC,
};
typedef int32_t (*observer_t)(int32_t what, uint64_t a, uint64_t b); /* 0, or what the call is to return */
static observer_t observer;
void simulated_npu_observe(observer_t callback) { observer = callback; }
void simulated_npu_set_error(const char *message) { snprintf(last_error, sizeof last_error, "%s", message); }
static int tell(int32_t what, const void *a, const void *b) {
  return observer ? observer(what, (uint64_t)(uintptr_t)a, (uint64_t)(uintptr_t)b) : SUCCESS;
}

/* ---- process and device ---------------------------------------------------------------------------------------- */
int aclInit(const char *path) { (void)path; return SUCCESS; }
int aclFinalize(void) { return SUCCESS; }
const char *aclGetRecentErrMsg(void) { return last_error; }
/* An operator that nobody supplied fails here; success would leave its output unwritten. */
int aclopCompileAndExecute(const char *name) {
  snprintf(last_error, sizeof last_error, "simulated NPU: no kernel for %s", name);
  return NO_OPERATOR;
}
int aclopCompileAndExecuteV2(const char *name) { return aclopCompileAndExecute(name); }
const char *aclrtGetSocName(void) { return "Ascend910B3"; }
/* As on a machine with devices: what Ray puts here for an actor that asks for {"NPU": k} is all that it sees. */
int aclrtGetDeviceCount(uint32_t *count) {
  const char *visible = getenv("ASCEND_RT_VISIBLE_DEVICES");
  if (!visible) { *count = (uint32_t)setting("SIMULATED_NPU_DEVICES", 1); return SUCCESS; }
  *count = *visible ? 1 : 0;
  for (; *visible; visible++) *count += *visible == ',';
  return SUCCESS;
}
int aclrtSetDevice(int32_t id) {
  uint32_t count;
  aclrtGetDeviceCount(&count);
  if (id < 0 || id >= (int32_t)count || id >= MAX_DEVICES) {
    snprintf(last_error, sizeof last_error, "invalid device ID %d of %u", id, count);
    return 107001;
  }
  current_device = id;
  return SUCCESS;
}
int aclrtGetDevice(int32_t *id) { *id = device(); return current_device < 0 ? NO_CONTEXT : SUCCESS; }
int aclrtResetDevice(int32_t id) { (void)id; return SUCCESS; }
int aclrtGetPrimaryCtxState(int32_t id, uint32_t *flags, int32_t *active) {
  (void)id; if (flags) *flags = 0; *active = 1; return SUCCESS;
}
enum { CONTEXT = 0x1000 };
int aclrtGetCurrentContext(void **context) { *context = (void *)(uintptr_t)(CONTEXT + device()); return SUCCESS; }
int aclrtSetCurrentContext(void *context) {
  uintptr_t value = (uintptr_t)context;
  if (value >= CONTEXT && value < CONTEXT + MAX_DEVICES) current_device = (int32_t)(value - CONTEXT);
  return SUCCESS;
}
int aclrtDeviceCanAccessPeer(int32_t *can, int32_t a, int32_t b) { (void)a; (void)b; *can = 1; return SUCCESS; }
int aclrtGetMemInfo(int kind, size_t *free_bytes, size_t *total) {
  (void)kind;
  *total = (size_t)memory_bytes();
  *free_bytes = (size_t)(memory_bytes() - used_bytes[device()]);
  return SUCCESS;
}
size_t aclGetCompileoptSize(int option) { (void)option; return 256; }
int aclGetCompileopt(int option, char *value, size_t size) { (void)option; if (size) strcpy(value, "1"); return SUCCESS; }
int aclrtGetSysParamOpt(int option, int64_t *value) { (void)option; *value = 0; return SUCCESS; }
int aclrtSetSysParamOpt(int option, int64_t value) { (void)option; (void)value; return SUCCESS; }
int aclGetDeviceCapability(uint32_t id, int info, int64_t *value) { (void)id; (void)info; *value = 20; return SUCCESS; }
int aclrtGetDeviceInfo(uint32_t id, int info, int64_t *value) { (void)id; (void)info; *value = 20; return SUCCESS; }
int aclsysGetVersionStr(char *package, char *version) { (void)package; strcpy(version, "9.0.0"); return SUCCESS; }
int aclsysGetVersionNum(char *package, int32_t *version) { (void)package; *version = 90000000; return SUCCESS; }
void aclAppLog(int level, const char *function, const char *file, uint32_t line, const char *format, ...) {
  if (level < setting("SIMULATED_NPU_LOG_LEVEL", 99)) return; /* 0 debug … 3 error */
  va_list arguments;
  va_start(arguments, format);
  fprintf(stderr, "[acl %d] %s %s:%u ", level, function, file, line);
  vfprintf(stderr, format, arguments);
  fputc('\n', stderr);
  va_end(arguments);
}

/* Looked up by name when torch_npu starts; settings that change nothing here. */
#define ACCEPTS(name) int name(void); int name(void) { return SUCCESS; }
ACCEPTS(aclSetCompileopt) ACCEPTS(aclrtCtxSetSysParamOpt) ACCEPTS(aclrtSetDeviceSatMode) ACCEPTS(aclrtSetOpExecuteTimeOut)
ACCEPTS(aclrtSetOpWaitTimeout) ACCEPTS(aclrtSetStreamFailureMode) ACCEPTS(aclrtSetStreamOverflowSwitch)

/* ---- memory ---------------------------------------------------------------------------------------------------- */
struct header { int64_t bytes; int32_t device; };
int aclrtMalloc(void **pointer, size_t bytes, int policy) {
  (void)policy;
  *pointer = NULL;
  if (bytes == 0) return INVALID_PARAM;
  if (used_bytes[device()] + (int64_t)bytes > memory_bytes()) return OUT_OF_MEMORY;
  char *base;
  if (posix_memalign((void **)&base, HEADER, bytes + HEADER)) return OUT_OF_MEMORY;
  *(struct header *)base = (struct header){(int64_t)bytes, device()};
  memset(base + HEADER, POISON, bytes); /* unwritten floats read as NaN */
  used_bytes[device()] += (int64_t)bytes;
  *pointer = base + HEADER;
  return SUCCESS;
}
int aclrtMallocAlign32(void **pointer, size_t bytes, int policy) { return aclrtMalloc(pointer, bytes, policy); }
int aclrtFree(void *pointer) {
  if (!pointer) return INVALID_PARAM;
  struct header *header = (struct header *)((char *)pointer - HEADER);
  used_bytes[header->device] -= header->bytes;
  free(header);
  return SUCCESS;
}
int aclrtMallocHost(void **pointer, size_t bytes) {
  return posix_memalign(pointer, 4096, bytes ? bytes : 1) ? OUT_OF_MEMORY : SUCCESS;
}
int aclrtMallocHostWithCfg(void **pointer, uint64_t bytes, void *config) { (void)config; return aclrtMallocHost(pointer, bytes); }
int aclrtFreeHost(void *pointer) { free(pointer); return SUCCESS; }

int aclrtMemcpy(void *to, size_t room, const void *from, size_t bytes, int kind) {
  (void)kind;
  if (bytes > room) return INVALID_PARAM;
  memmove(to, from, bytes);
  return SUCCESS;
}
int aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t bytes, int kind, void *stream) {
  (void)stream;
  return aclrtMemcpy(to, room, from, bytes, kind);
}
int aclrtMemset(void *to, size_t room, int32_t value, size_t bytes) {
  if (bytes > room) return INVALID_PARAM;
  memset(to, value, bytes);
  return SUCCESS;
}
int aclrtMemsetAsync(void *to, size_t room, int32_t value, size_t bytes, void *stream) {
  (void)stream;
  return aclrtMemset(to, room, value, bytes);
}

/* ---- streams and events ---------------------------------------------------------------------------------------- */
struct handle { int32_t id; double time_ms; };
static int32_t last_id;
static int make(void **handle) {
  struct handle *made = calloc(1, sizeof *made);
  made->id = ++last_id;
  *handle = made;
  return SUCCESS;
}
/* Handles are never freed: a late use of a destroyed one must not meet another's. */
int aclrtCreateStream(void **stream) { return make(stream); }
int aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flags) { (void)priority; (void)flags; return make(stream); }
int aclrtDestroyStream(void *stream) { (void)stream; return SUCCESS; }
int aclrtDestroyStreamForce(void *stream) { (void)stream; return SUCCESS; }
int aclrtSynchronizeStream(void *stream) { tell(STREAM_SYNC, stream, NULL); return SUCCESS; }
int aclrtSynchronizeStreamWithTimeout(void *stream, int32_t ms) { (void)ms; return aclrtSynchronizeStream(stream); }
int aclrtSynchronizeDevice(void) { tell(DEVICE_SYNC, NULL, NULL); return SUCCESS; }
int aclrtSynchronizeDeviceWithTimeout(int32_t ms) { (void)ms; return aclrtSynchronizeDevice(); }
int aclrtStreamQuery(void *stream, int *status) { (void)stream; *status = 0; return SUCCESS; }
int aclrtStreamGetId(void *stream, int32_t *id) { *id = stream ? ((struct handle *)stream)->id : 0; return SUCCESS; }
int aclrtGetStreamOverflowSwitch(void *stream, uint32_t *flag) { (void)stream; *flag = 0; return SUCCESS; }
int aclrtCreateEventWithFlag(void **event, uint32_t flag) { (void)flag; return make(event); }
int aclrtCreateEventExWithFlag(void **event, uint32_t flag) { (void)flag; return make(event); }
int aclrtDestroyEvent(void *event) { (void)event; return SUCCESS; }
int aclrtRecordEvent(void *event, void *stream) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  ((struct handle *)event)->time_ms = (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
  tell(EVENT_RECORD, event, stream);
  return SUCCESS;
}
int aclrtStreamWaitEvent(void *stream, void *event) { tell(EVENT_WAIT, event, stream); return SUCCESS; }
int aclrtResetEvent(void *event, void *stream) { (void)event; (void)stream; return SUCCESS; }
int aclrtSynchronizeEvent(void *event) { tell(EVENT_SYNC, event, NULL); return SUCCESS; }
int aclrtQueryEventStatus(void *event, int *status) { (void)event; *status = 1; return SUCCESS; }
int aclrtQueryEventWaitStatus(void *event, int *status) { (void)event; *status = 0; return SUCCESS; }
int aclrtEventElapsedTime(float *ms, void *start, void *end) {
  *ms = (float)(((struct handle *)end)->time_ms - ((struct handle *)start)->time_ms);
  return SUCCESS;
}
int aclrtEventGetTimestamp(void *event, uint64_t *us) { *us = (uint64_t)(((struct handle *)event)->time_ms * 1e3); return SUCCESS; }

/* ---- graphs ---------------------------------------------------------------------------------------------------- */
static void *captured_stream;
static uintptr_t last_graph = 0x7000, last_group = 0x9000;
int simulated_npu_is_capturing(void) { return captured_stream != NULL; }
int aclmdlRICaptureBegin(void *stream, int mode) {
  (void)mode;
  if (captured_stream) return INVALID_PARAM;
  captured_stream = stream;
  tell(CAPTURE_BEGIN, stream, (void *)++last_graph);
  return SUCCESS;
}
int aclmdlRICaptureGetInfo(void *stream, int *status, void **graph) {
  int on = captured_stream && stream == captured_stream;
  *status = on;
  if (graph) *graph = on ? (void *)last_graph : NULL;
  return SUCCESS;
}
int aclmdlRIGetId(void *graph, uint32_t *id) { *id = (uint32_t)(uintptr_t)graph; return SUCCESS; }
int aclmdlRICaptureEnd(void *stream, void **graph) {
  if (!captured_stream || stream != captured_stream) return INVALID_PARAM;
  captured_stream = NULL;
  *graph = (void *)last_graph;
  tell(CAPTURE_END, stream, *graph);
  return SUCCESS;
}
int aclmdlRIExecuteAsync(void *graph, void *stream) { return tell(REPLAY, graph, stream); }
int aclmdlRIDestroy(void *graph) { tell(GRAPH_DESTROY, graph, NULL); return SUCCESS; }
int aclmdlRICaptureThreadExchangeMode(int *mode) { (void)mode; return SUCCESS; }
int aclmdlRICaptureTaskGrpBegin(void *stream) { tell(GROUP_BEGIN, stream, (void *)++last_group); return SUCCESS; }
int aclmdlRICaptureTaskGrpEnd(void *stream, void **group) { *group = (void *)last_group; tell(GROUP_END, stream, *group); return SUCCESS; }
int aclmdlRICaptureTaskUpdateBegin(void *stream, void *group) { tell(UPDATE_BEGIN, stream, group); return SUCCESS; }
int aclmdlRICaptureTaskUpdateEnd(void *stream) { tell(UPDATE_END, stream, NULL); return SUCCESS; }
