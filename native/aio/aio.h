/* Common declarations of the asynchronous I/O engine.
 *
 *   engine.c   the calls of zn_abi.h: the request table, its lock, completions
 *   pump.c     the I/O thread: cuts requests into chunks, resumes, retries, completes
 *   fault.c    injected faults, between the pump and the backend
 *   uring.c kaio.c threads.c   backends: each defines one table of functions at its end
 *   registry.c   memory that is registered with io_uring
 *
 * A request is cut into chunks; a chunk is moved by one transfer, or by several when the kernel moves
 * fewer bytes than requested. Only the I/O thread accesses chunks and the backend. */
#ifndef ZN_AIO_H
#define ZN_AIO_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/queue.h>

#include "registry.h"
#include "zn_abi.h"

/* Offsets and lengths of O_DIRECT transfers are multiples of this on every device we know. */
enum { ZN_DIRECT_BYTES = 4096 };

/* ---- backends ----------------------------------------------------------------------------- */

typedef struct {
  int32_t slot; /* identifies the transfer in its event */
  int32_t op;
  int32_t fd;
  int64_t offset, nbytes;
  void *buffer;
} zn_transfer;

typedef struct {
  int32_t slot;
  int64_t result; /* bytes moved, or -errno */
} zn_event;

typedef struct zn_queue zn_queue; /* each backend defines its own */

typedef struct {
  const char *name;
  int32_t (*probe)(void);
  /* At most `depth` transfers are in flight, with slots 0..depth-1. */
  int32_t (*open)(zn_queue **out, int32_t depth, int32_t threads);
  int (*event_fd)(zn_queue *queue); /* readable while `reap` has events to report */
  /* Returns true if the transfer uses registered memory. */
  bool (*enqueue)(zn_queue *queue, const zn_transfer *transfer);
  /* Submit all enqueued transfers to the kernel, in one batch. Returns how many could not be started:
   * `reap` reports those with the reason. */
  int32_t (*flush)(zn_queue *queue);
  int32_t (*reap)(zn_queue *queue, zn_event *out, int32_t max); /* never blocks */
  zn_registry *(*registry)(zn_queue *queue);                    /* NULL: the backend has none */
  void (*close)(zn_queue *queue);
} zn_backend;

extern const zn_backend zn_backend_uring, zn_backend_kaio, zn_backend_threads;

/* ---- faults ------------------------------------------------------------------------------- */

typedef struct {
  zn_aio_fault plan;
  uint64_t random;
  int64_t seen, hits;
} zn_fault_state;

typedef enum { ZN_FAULT_NONE, ZN_FAULT_FAIL, ZN_FAULT_SHORT, ZN_FAULT_DELAY } zn_fault_kind;

bool zn_fault_is_valid(const zn_aio_fault *plan);
void zn_fault_reset(zn_fault_state *state, const zn_aio_fault *plan);

/* Decides what happens to the next transfer of `nbytes` at `offset`. A short transfer moves only `*asked_bytes`, and
 * the caller subtracts `*hidden_bytes` from the count that the kernel reports. `is_direct`: the file was
 * opened with O_DIRECT. */
zn_fault_kind zn_fault_draw(zn_fault_state *state, int32_t op, int64_t offset, int64_t nbytes, bool is_direct,
                            int64_t *asked_bytes, int64_t *hidden_bytes);

/* ---- the engine --------------------------------------------------------------------------- */

typedef struct zn_request {
  TAILQ_ENTRY(zn_request) link;
  zn_aio_request spec;
  int64_t cut_bytes; /* assigned to chunks so far */
  int64_t moved_bytes;
  int64_t fail_offset;
  int32_t status;
  int32_t chunks_in_flight;
  bool is_cut; /* no further chunk will be started: all have been, or the request has failed */
} zn_request;

typedef struct zn_chunk {
  TAILQ_ENTRY(zn_chunk) link;
  zn_request *request;
  char *buffer;
  int64_t offset, nbytes;
  int64_t done_bytes;    /* where the next transfer begins */
  int64_t reached_bytes; /* moved so far; O_DIRECT resumes below it, on an aligned byte */
  int64_t asked_bytes, hidden_bytes; /* of the transfer in flight */
  int64_t due_ns;                    /* a held chunk starts at this time; INT64_MAX: with the next fault plan */
  int64_t result;                    /* of a transfer that was not passed to the backend */
  int32_t tries;                     /* since the last byte moved */
  bool is_exempt;                    /* was delayed by a fault: the transfer itself gets no further fault */
} zn_chunk;

TAILQ_HEAD(zn_request_list, zn_request);
TAILQ_HEAD(zn_chunk_list, zn_chunk);

/* Time during which at least one chunk was in flight. */
typedef struct {
  int64_t total_ns, since_ns;
  int32_t active;
} zn_meter;

typedef struct {
  zn_aio_stats counts; /* its times stay 0; the meters hold the times */
  zn_meter any, read, write;
} zn_account;

struct zn_aio {
  zn_aio_options options;
  const zn_backend *backend;
  zn_queue *queue;
  zn_request *requests;
  zn_chunk *chunks;
  zn_event *events; /* filled by reap */
  pthread_t thread;
  int event_fd, wake_fd;

  /* Shared, under `lock`. */
  pthread_mutex_t lock;
  struct zn_request_list free_requests, incoming;
  zn_aio_completion *completions; /* ring of requests_max */
  int64_t taken, reported;        /* completions taken and reported since open */
  int64_t accepted;
  bool is_event_raised; /* event_fd is readable */
  bool is_asleep;       /* the I/O thread notices changes only through wake_fd */
  bool is_stopping;
  bool has_new_fault;
  zn_aio_fault new_fault;
  zn_account account;

  /* Used by the I/O thread only. */
  struct zn_request_list active, finished;
  struct zn_chunk_list free_chunks, ready, held, ended;
  zn_account live;
  zn_fault_state fault;
};

/* The I/O thread: runs until is_stopping. */
void *zn_pump_run(void *aio);

/* Nanoseconds of CLOCK_MONOTONIC. */
int64_t zn_now_ns(void);

/* Report one completion; `lock` is held. The caller raises the event after its last report. */
void zn_report_locked(zn_aio *aio, const zn_aio_completion *completion);
void zn_raise_event_locked(zn_aio *aio);

#endif /* ZN_AIO_H */
