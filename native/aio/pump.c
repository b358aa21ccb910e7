/* The I/O thread. Only this thread accesses chunks and the backend, so only `exchange` takes a lock.
 *
 * Each round: exchange requests and completions with the callers, start chunks while slots are free,
 * submit them to the kernel in one batch, sleep until an event arrives, settle the transfers that ended.
 * Requests are served in the order of their arrival, chunk after chunk: so the first of several requests
 * is complete first, and its update can begin while the others are still being read. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <time.h>

#include "aio.h"

enum { TRIES_MAX = 100, AGAIN_PAUSE_NS = 50 * 1000 };

int64_t zn_now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* ---- accounting --------------------------------------------------------------------------- */

static void meter_begin(zn_meter *meter) {
  if (meter->active++ == 0) meter->since_ns = zn_now_ns();
}

static void meter_end(zn_meter *meter) {
  if (--meter->active == 0) meter->total_ns += zn_now_ns() - meter->since_ns;
}

static zn_meter *meter_of(zn_account *account, int32_t op) {
  if (op == ZN_AIO_READ) return &account->read;
  return op == ZN_AIO_WRITE ? &account->write : NULL;
}

static void account_begin(zn_account *account, int32_t op) {
  zn_meter *meter = meter_of(account, op);
  if (meter != NULL) meter_begin(meter);
  meter_begin(&account->any);
}

static void account_end(zn_account *account, int32_t op, int64_t moved_bytes) {
  zn_meter *meter = meter_of(account, op);
  if (meter != NULL) meter_end(meter);
  meter_end(&account->any);
  if (op == ZN_AIO_READ) account->counts.read_bytes += moved_bytes;
  if (op == ZN_AIO_WRITE) account->counts.write_bytes += moved_bytes;
  account->counts.chunks++;
}

/* ---- the end of a chunk ------------------------------------------------------------------- */

static bool is_direct(int fd) {
  int flags = fcntl(fd, F_GETFL);
  return flags >= 0 && (flags & O_DIRECT) != 0;
}

/* Remove the request from `active`: no further chunk of it starts. */
static void stop_cutting(zn_aio *aio, zn_request *request) {
  if (request->is_cut) return;
  request->is_cut = true;
  TAILQ_REMOVE(&aio->active, request, link);
}

/* The chunk has ended. The request completes with its last chunk, never before. */
static void retire(zn_aio *aio, zn_chunk *chunk, int32_t status, int64_t fail_offset) {
  zn_request *request = chunk->request;
  account_end(&aio->live, request->spec.op, chunk->reached_bytes);
  request->moved_bytes += chunk->reached_bytes;
  /* Of several failures, report the one with the lowest file offset: chunks below it continue, so the
   * result does not depend on the order in which transfers end. */
  if (status != 0 && (request->status == 0 || fail_offset < request->fail_offset)) {
    request->status = status;
    request->fail_offset = fail_offset;
    stop_cutting(aio, request);
  }
  TAILQ_INSERT_HEAD(&aio->free_chunks, chunk, link);
  if (--request->chunks_in_flight == 0 && request->is_cut) TAILQ_INSERT_TAIL(&aio->finished, request, link);
}

/* The request has failed at or before the chunk's next byte, so the chunk need not be moved. */
static bool is_moot(const zn_chunk *chunk) {
  return chunk->request->status != 0 && chunk->offset + chunk->done_bytes >= chunk->request->fail_offset;
}

static void hold(zn_aio *aio, zn_chunk *chunk, int64_t pause_ns) {
  chunk->due_ns = zn_now_ns() + pause_ns;
  TAILQ_INSERT_TAIL(&aio->held, chunk, link);
}

/* Try the same bytes again; after TRIES_MAX tries the chunk fails with `status`. */
static void retry(zn_aio *aio, zn_chunk *chunk, int32_t status) {
  if (++chunk->tries > TRIES_MAX) {
    retire(aio, chunk, status, chunk->offset + chunk->done_bytes);
    return;
  }
  aio->live.counts.retried++;
  if (status == -EINTR) {
    TAILQ_INSERT_TAIL(&aio->ready, chunk, link);
  } else {
    hold(aio, chunk, (int64_t)chunk->tries * AGAIN_PAUSE_NS);
  }
}

/* Part of the chunk was moved: continue after that part. */
static void resume(zn_aio *aio, zn_chunk *chunk, int64_t moved_bytes, int64_t reached_bytes) {
  const bool is_read = chunk->request->spec.op == ZN_AIO_READ;
  if (reached_bytes <= chunk->reached_bytes && moved_bytes < chunk->asked_bytes) {
    /* No new byte although more were requested. A read that stops at the same byte twice is at the end
     * of the file (an O_DIRECT read starts below that byte, so it may return more than 0). */
    if (!is_read) {
      retry(aio, chunk, -EIO);
    } else {
      retire(aio, chunk, -ENODATA, chunk->offset + chunk->reached_bytes);
    }
    return;
  }
  aio->live.counts.resumed++;
  chunk->tries = 0;
  chunk->reached_bytes = reached_bytes;
  chunk->done_bytes = reached_bytes;
  if (is_direct(chunk->request->spec.fd)) chunk->done_bytes -= reached_bytes % ZN_DIRECT_BYTES;
  TAILQ_INSERT_TAIL(&aio->ready, chunk, link);
}

/* A transfer has ended with `result`: bytes moved, or -errno. */
static void settle(zn_aio *aio, zn_chunk *chunk, int64_t result) {
  /* If the kernel itself moved fewer bytes, its count is used without a change. */
  const int64_t hidden_bytes = result == chunk->asked_bytes ? chunk->hidden_bytes : 0;
  const int64_t reached_bytes = chunk->done_bytes + result - hidden_bytes;
  if (result == -EINTR || result == -EAGAIN) {
    retry(aio, chunk, (int32_t)result);
  } else if (result < 0) {
    retire(aio, chunk, (int32_t)result, chunk->offset + chunk->done_bytes);
  } else if (chunk->request->spec.op == ZN_AIO_SYNC) {
    retire(aio, chunk, 0, -1);
  } else if (reached_bytes == chunk->nbytes) {
    chunk->reached_bytes = reached_bytes;
    retire(aio, chunk, 0, -1);
  } else {
    resume(aio, chunk, result, reached_bytes);
  }
}

/* ---- the start of a chunk ----------------------------------------------------------------- */

static zn_chunk *cut_chunk(zn_aio *aio) {
  zn_request *request = TAILQ_FIRST(&aio->active);
  zn_chunk *chunk = TAILQ_FIRST(&aio->free_chunks);
  if (request == NULL || chunk == NULL) return NULL;
  const int64_t left_bytes = request->spec.nbytes - request->cut_bytes;
  const int64_t limit_bytes = aio->options.chunk_bytes;
  TAILQ_REMOVE(&aio->free_chunks, chunk, link);
  *chunk = (zn_chunk){
      .request = request,
      .buffer = (char *)request->spec.buffer + request->cut_bytes,
      .offset = request->spec.offset + request->cut_bytes,
      .nbytes = left_bytes < limit_bytes ? left_bytes : limit_bytes,
  };
  request->cut_bytes += chunk->nbytes;
  request->chunks_in_flight++;
  if (request->cut_bytes == request->spec.nbytes) stop_cutting(aio, request);
  account_begin(&aio->live, request->spec.op);
  return chunk;
}

static zn_chunk *next_chunk(zn_aio *aio, bool may_cut) {
  zn_chunk *chunk = TAILQ_FIRST(&aio->ready);
  if (chunk == NULL) return may_cut ? cut_chunk(aio) : NULL;
  TAILQ_REMOVE(&aio->ready, chunk, link);
  return chunk;
}

static zn_fault_kind draw_fault(zn_aio *aio, zn_chunk *chunk) {
  const zn_aio_fault *plan = &aio->fault.plan;
  if (chunk->is_exempt || plan->fail_rate + plan->short_rate + plan->delay_rate == 0) {
    chunk->is_exempt = false;
    return ZN_FAULT_NONE;
  }
  const zn_aio_request *spec = &chunk->request->spec;
  return zn_fault_draw(&aio->fault, spec->op, chunk->offset + chunk->done_bytes, chunk->asked_bytes,
                       is_direct(spec->fd), &chunk->asked_bytes, &chunk->hidden_bytes);
}

static void start(zn_aio *aio, zn_chunk *chunk) {
  const zn_aio_request *spec = &chunk->request->spec;
  if (is_moot(chunk)) {
    retire(aio, chunk, 0, -1);
    return;
  }
  chunk->asked_bytes = chunk->nbytes - chunk->done_bytes;
  chunk->hidden_bytes = 0;
  switch (draw_fault(aio, chunk)) {
    case ZN_FAULT_FAIL:
      chunk->result = aio->fault.plan.status;
      TAILQ_INSERT_TAIL(&aio->ended, chunk, link);
      return;
    case ZN_FAULT_DELAY:
      chunk->is_exempt = true;
      hold(aio, chunk, (int64_t)aio->fault.plan.delay_us * 1000);
      if (aio->fault.plan.delay_us == ZN_FAULT_HELD) chunk->due_ns = INT64_MAX;
      return;
    default:
      break;
  }
  const zn_transfer transfer = {
      .slot = (int32_t)(chunk - aio->chunks),
      .op = spec->op,
      .fd = spec->fd,
      .offset = chunk->offset + chunk->done_bytes,
      .nbytes = chunk->asked_bytes,
      .buffer = chunk->buffer + chunk->done_bytes,
  };
  if (aio->backend->enqueue(aio->queue, &transfer)) aio->live.counts.registered++;
}

/* Held chunks that are due become ready; chunks that are moot after a failure do so at once. */
static void release_held(zn_aio *aio) {
  if (TAILQ_EMPTY(&aio->held)) return;
  const int64_t now_ns = zn_now_ns();
  zn_chunk *next;
  for (zn_chunk *chunk = TAILQ_FIRST(&aio->held); chunk != NULL; chunk = next) {
    next = TAILQ_NEXT(chunk, link);
    if (chunk->due_ns > now_ns && !is_moot(chunk)) continue;
    TAILQ_REMOVE(&aio->held, chunk, link);
    TAILQ_INSERT_TAIL(&aio->ready, chunk, link);
  }
}

/* ---- the rounds --------------------------------------------------------------------------- */

static zn_aio_completion completion_of(const zn_request *request) {
  return (zn_aio_completion){
      .tag = request->spec.tag,
      .status = request->status,
      .nbytes = request->moved_bytes,
      .fail_offset = request->status == 0 ? -1 : request->fail_offset,
  };
}

/* Report finished requests, and take new ones. False: the engine closes. */
static bool exchange(zn_aio *aio) {
  pthread_mutex_lock(&aio->lock);
  /* Requests of 0 bytes were counted when they were accepted, so keep that count. */
  aio->live.counts.requests = aio->account.counts.requests;
  aio->account = aio->live;
  const bool has_news = !TAILQ_EMPTY(&aio->finished);
  zn_request *request;
  while ((request = TAILQ_FIRST(&aio->finished)) != NULL) {
    const zn_aio_completion completion = completion_of(request);
    TAILQ_REMOVE(&aio->finished, request, link);
    TAILQ_INSERT_HEAD(&aio->free_requests, request, link);
    zn_report_locked(aio, &completion);
  }
  if (has_news) zn_raise_event_locked(aio);
  TAILQ_CONCAT(&aio->active, &aio->incoming, link);
  if (aio->has_new_fault) {
    zn_fault_reset(&aio->fault, &aio->new_fault);
    zn_chunk *chunk;
    TAILQ_FOREACH(chunk, &aio->held, link) if (chunk->due_ns == INT64_MAX) chunk->due_ns = 0;
  }
  aio->has_new_fault = false;
  aio->is_asleep = true;
  const bool goes_on = !aio->is_stopping;
  pthread_mutex_unlock(&aio->lock);
  return goes_on;
}

static struct timespec *held_timeout(const zn_aio *aio, struct timespec *timeout) {
  int64_t due_ns = INT64_MAX;
  const zn_chunk *chunk;
  TAILQ_FOREACH(chunk, &aio->held, link) {
    if (chunk->due_ns < due_ns) due_ns = chunk->due_ns;
  }
  if (due_ns == INT64_MAX) return NULL;
  int64_t left_ns = due_ns - zn_now_ns();
  if (left_ns < 0) left_ns = 0;
  *timeout = (struct timespec){.tv_sec = left_ns / 1000000000, .tv_nsec = left_ns % 1000000000};
  return timeout;
}

/* Sleep until the backend has events, callers have new requests or a held chunk is due. True: events. */
static bool sleep_for_events(zn_aio *aio) {
  struct timespec timeout;
  struct pollfd fds[2] = {
      {.fd = aio->backend->event_fd(aio->queue), .events = POLLIN},
      {.fd = aio->wake_fd, .events = POLLIN},
  };
  if (ppoll(fds, 2, held_timeout(aio, &timeout), NULL) <= 0) return false;
  eventfd_t ignored;
  if (fds[1].revents != 0) eventfd_read(aio->wake_fd, &ignored);
  return fds[0].revents != 0;
}

static void settle_events(zn_aio *aio) {
  /* `events` has room for all transfers in flight, so one call takes all events. */
  const int32_t count = aio->backend->reap(aio->queue, aio->events, aio->options.queue_depth);
  for (int32_t i = 0; i < count; i++) settle(aio, &aio->chunks[aio->events[i].slot], aio->events[i].result);
}

/* Settle only the chunks that had ended before this call: a settled chunk may be retried and end again. */
static void settle_ended(zn_aio *aio) {
  struct zn_chunk_list ended = TAILQ_HEAD_INITIALIZER(ended);
  TAILQ_CONCAT(&ended, &aio->ended, link);
  zn_chunk *chunk;
  while ((chunk = TAILQ_FIRST(&ended)) != NULL) {
    TAILQ_REMOVE(&ended, chunk, link);
    settle(aio, chunk, chunk->result);
  }
}

/* Submit chunks to the kernel while slots are free. Returns how many it refused. */
static int32_t start_chunks(zn_aio *aio) {
  const bool one_by_one = (aio->options.flags & ZN_AIO_SINGLE_SUBMIT) != 0;
  const bool may_cut = (aio->options.flags & ZN_AIO_IN_WAVES) == 0 || aio->live.any.active == 0;
  int32_t refused = 0;
  zn_chunk *chunk;
  while ((chunk = next_chunk(aio, may_cut)) != NULL) {
    start(aio, chunk);
    if (one_by_one) refused += aio->backend->flush(aio->queue);
  }
  return refused + aio->backend->flush(aio->queue);
}

void *zn_pump_run(void *argument) {
  zn_aio *aio = argument;
  while (exchange(aio)) {
    release_held(aio);
    const int32_t refused = start_chunks(aio);
    const bool must_hurry = refused > 0 || !TAILQ_EMPTY(&aio->ended) || !TAILQ_EMPTY(&aio->finished);
    if (must_hurry || sleep_for_events(aio)) settle_events(aio);
    settle_ended(aio);
  }
  return NULL;
}
