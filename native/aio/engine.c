/* The calls of the asynchronous I/O engine: the request table, its lock, and completions. */
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "aio.h"

enum { DEPTH_MAX = 4096, THREADS_MAX = 64, REQUESTS_MAX = 65536, CHUNK_BYTES_MAX = 1 << 30 };

static const zn_backend *find_backend(int32_t backend) {
  switch (backend) {
    case ZN_AIO_IO_URING:
      return &zn_backend_uring;
    case ZN_AIO_LIBAIO:
      return &zn_backend_kaio;
    case ZN_AIO_THREADS:
      return &zn_backend_threads;
    default:
      return NULL;
  }
}

static bool is_valid_options(const zn_aio_options *options) {
  if (find_backend(options->backend) == NULL) return false;
  if (options->queue_depth < 1 || options->queue_depth > DEPTH_MAX) return false;
  if (options->backend == ZN_AIO_THREADS && (options->threads < 1 || options->threads > THREADS_MAX)) return false;
  if (options->requests_max < 1 || options->requests_max > REQUESTS_MAX) return false;
  if ((options->flags & ~(ZN_AIO_SINGLE_SUBMIT | ZN_AIO_IN_WAVES)) != 0) return false;
  return options->chunk_bytes >= ZN_DIRECT_BYTES && options->chunk_bytes <= CHUNK_BYTES_MAX &&
         options->chunk_bytes % ZN_DIRECT_BYTES == 0;
}

int32_t zn_aio_probe(int32_t backend) {
  const zn_backend *found = find_backend(backend);
  return found == NULL ? -EINVAL : found->probe();
}

/* ---- open and close ----------------------------------------------------------------------- */

static int32_t init_tables(zn_aio *aio) {
  const size_t requests_max = (size_t)aio->options.requests_max, depth = (size_t)aio->options.queue_depth;
  aio->requests = calloc(requests_max, sizeof *aio->requests);
  aio->completions = calloc(requests_max, sizeof *aio->completions);
  aio->chunks = calloc(depth, sizeof *aio->chunks);
  aio->events = calloc(depth, sizeof *aio->events);
  if (!aio->requests || !aio->completions || !aio->chunks || !aio->events) return -ENOMEM;
  TAILQ_INIT(&aio->free_requests);
  TAILQ_INIT(&aio->incoming);
  TAILQ_INIT(&aio->active);
  TAILQ_INIT(&aio->finished);
  TAILQ_INIT(&aio->free_chunks);
  TAILQ_INIT(&aio->ready);
  TAILQ_INIT(&aio->held);
  TAILQ_INIT(&aio->ended);
  for (size_t i = 0; i < requests_max; i++) TAILQ_INSERT_TAIL(&aio->free_requests, &aio->requests[i], link);
  for (size_t i = 0; i < depth; i++) TAILQ_INSERT_TAIL(&aio->free_chunks, &aio->chunks[i], link);
  return 0;
}

static void release(zn_aio *aio) {
  if (aio->queue != NULL) aio->backend->close(aio->queue);
  if (aio->event_fd >= 0) close(aio->event_fd);
  if (aio->wake_fd >= 0) close(aio->wake_fd);
  pthread_mutex_destroy(&aio->lock);
  free(aio->requests);
  free(aio->completions);
  free(aio->chunks);
  free(aio->events);
  free(aio);
}

/* The engine's threads block all signals: handlers must run on the program's own threads. */
static int32_t start_threads(zn_aio *aio) {
  sigset_t every, before;
  sigfillset(&every);
  pthread_sigmask(SIG_SETMASK, &every, &before);
  int32_t status = aio->backend->open(&aio->queue, aio->options.queue_depth, aio->options.threads);
  if (status == 0) status = -pthread_create(&aio->thread, NULL, zn_pump_run, aio);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  return status;
}

int32_t zn_aio_open(zn_aio **out, const zn_aio_options *options) {
  if (!is_valid_options(options)) return -EINVAL;
  zn_aio *aio = calloc(1, sizeof *aio);
  if (aio == NULL) return -ENOMEM;
  aio->options = *options;
  aio->backend = find_backend(options->backend);
  pthread_mutex_init(&aio->lock, NULL);
  aio->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  aio->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  int32_t status = aio->event_fd < 0 || aio->wake_fd < 0 ? -errno : init_tables(aio);
  if (status == 0) status = start_threads(aio);
  if (status != 0) {
    release(aio);
    return status;
  }
  *out = aio;
  return 0;
}

/* `lock` is held. */
static void wake_pump(zn_aio *aio) {
  if (!aio->is_asleep) return;
  aio->is_asleep = false;
  eventfd_write(aio->wake_fd, 1);
}

int32_t zn_aio_close(zn_aio *aio) {
  pthread_mutex_lock(&aio->lock);
  const bool is_busy = aio->accepted > aio->taken;
  if (!is_busy) {
    aio->is_stopping = true;
    wake_pump(aio);
  }
  pthread_mutex_unlock(&aio->lock);
  if (is_busy) return -EBUSY;
  pthread_join(aio->thread, NULL);
  release(aio);
  return 0;
}

/* ---- submit ------------------------------------------------------------------------------- */

static bool is_valid_request(const zn_aio_request *request) {
  if (request->fd < 0 || request->nbytes < 0) return false;
  if (request->op == ZN_AIO_SYNC) return true;
  if (request->op != ZN_AIO_READ && request->op != ZN_AIO_WRITE) return false;
  /* io_uring would take offset -1 as the file's current position. */
  return request->offset >= 0 && request->offset <= INT64_MAX - request->nbytes;
}

static void accept_locked(zn_aio *aio, const zn_aio_request *spec) {
  aio->accepted++;
  if (spec->op != ZN_AIO_SYNC && spec->nbytes == 0) {
    zn_report_locked(aio, &(zn_aio_completion){.tag = spec->tag, .fail_offset = -1});
    zn_raise_event_locked(aio);
    return;
  }
  zn_request *request = TAILQ_FIRST(&aio->free_requests);
  TAILQ_REMOVE(&aio->free_requests, request, link);
  *request = (zn_request){.spec = *spec, .fail_offset = -1};
  if (spec->op == ZN_AIO_SYNC) request->spec.offset = request->spec.nbytes = 0;
  TAILQ_INSERT_TAIL(&aio->incoming, request, link);
}

int32_t zn_aio_submit(zn_aio *aio, const zn_aio_request *requests, int32_t count) {
  if (count < 0) return -EINVAL;
  for (int32_t i = 0; i < count; i++) {
    if (!is_valid_request(&requests[i])) return -EINVAL;
  }
  pthread_mutex_lock(&aio->lock);
  const bool fits = count <= aio->options.requests_max - (aio->accepted - aio->taken);
  for (int32_t i = 0; fits && i < count; i++) accept_locked(aio, &requests[i]);
  if (!TAILQ_EMPTY(&aio->incoming)) wake_pump(aio);
  pthread_mutex_unlock(&aio->lock);
  return fits ? 0 : -EAGAIN;
}

/* ---- completions -------------------------------------------------------------------------- */

void zn_report_locked(zn_aio *aio, const zn_aio_completion *completion) {
  aio->completions[aio->reported++ % aio->options.requests_max] = *completion;
  aio->account.counts.requests++;
}

void zn_raise_event_locked(zn_aio *aio) {
  if (!aio->is_event_raised) eventfd_write(aio->event_fd, 1);
  aio->is_event_raised = true;
}

static int32_t take_locked(zn_aio *aio, zn_aio_completion *out, int32_t max) {
  int32_t count = 0;
  while (count < max && aio->taken < aio->reported) {
    out[count++] = aio->completions[aio->taken++ % aio->options.requests_max];
  }
  if (aio->taken == aio->reported && aio->is_event_raised) {
    eventfd_t ignored;
    eventfd_read(aio->event_fd, &ignored);
    aio->is_event_raised = false;
  }
  return count;
}

int32_t zn_aio_poll(zn_aio *aio, zn_aio_completion *out, int32_t max) {
  pthread_mutex_lock(&aio->lock);
  int32_t count = take_locked(aio, out, max);
  pthread_mutex_unlock(&aio->lock);
  return count;
}

int32_t zn_aio_event_fd(zn_aio *aio) { return aio->event_fd; }

/* ---- registering -------------------------------------------------------------------------- */

static zn_registry *registry_of(zn_aio *aio) {
  return aio->backend->registry == NULL ? NULL : aio->backend->registry(aio->queue);
}

int32_t zn_aio_register_memory(zn_aio *aio, void *ptr, int64_t nbytes) {
  return ptr == NULL || nbytes < 1 ? -EINVAL : zn_registry_add(registry_of(aio), ptr, nbytes);
}

int32_t zn_aio_unregister_memory(zn_aio *aio, void *ptr, int64_t nbytes) {
  return ptr == NULL || nbytes < 1 ? -EINVAL : zn_registry_remove(registry_of(aio), ptr, nbytes);
}

/* ---- statistics and faults ---------------------------------------------------------------- */

static int64_t meter_ns(const zn_meter *meter, int64_t now_ns) {
  return meter->total_ns + (meter->active > 0 ? now_ns - meter->since_ns : 0);
}

int32_t zn_aio_stats_get(zn_aio *aio, zn_aio_stats *out) {
  pthread_mutex_lock(&aio->lock);
  const zn_account account = aio->account;
  pthread_mutex_unlock(&aio->lock);
  const int64_t now_ns = zn_now_ns();
  *out = account.counts;
  out->busy_ns = meter_ns(&account.any, now_ns);
  out->read_ns = meter_ns(&account.read, now_ns);
  out->write_ns = meter_ns(&account.write, now_ns);
  return 0;
}

int32_t zn_aio_inject(zn_aio *aio, const zn_aio_fault *fault) {
  const zn_aio_fault plan = fault == NULL ? (zn_aio_fault){0} : *fault;
  if (!zn_fault_is_valid(&plan)) return -EINVAL;
  pthread_mutex_lock(&aio->lock);
  aio->new_fault = plan;
  aio->has_new_fault = true;
  wake_pump(aio);
  pthread_mutex_unlock(&aio->lock);
  return 0;
}
