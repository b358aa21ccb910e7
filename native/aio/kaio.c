/* Linux kernel AIO (which libaio wraps) by system calls: io_submit in batches, an eventfd to wait on. */
#include <errno.h>

#include "aio.h"

#if defined(__linux__) && defined(__has_include)
#if __has_include(<linux/aio_abi.h>)
#define ZN_HAS_KAIO 1
#endif
#endif

#ifdef ZN_HAS_KAIO

#include <linux/aio_abi.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { PROBE_DEPTH = 4 };

struct zn_queue {
  aio_context_t context;
  int event_fd;
  int32_t depth, enqueued, refused_count;
  struct iocb *blocks; /* one per slot */
  struct iocb **batch;
  struct io_event *arrived;
  zn_event *refused;
};

static void kaio_close(zn_queue *queue) {
  if (queue->context != 0) syscall(SYS_io_destroy, queue->context);
  if (queue->event_fd >= 0) close(queue->event_fd);
  free(queue->blocks);
  free(queue->batch);
  free(queue->arrived);
  free(queue->refused);
  free(queue);
}

static int32_t kaio_open(zn_queue **out, int32_t depth, int32_t threads) {
  (void)threads;
  zn_queue *queue = calloc(1, sizeof *queue);
  if (queue == NULL) return -ENOMEM;
  queue->depth = depth;
  queue->blocks = calloc((size_t)depth, sizeof *queue->blocks);
  queue->batch = calloc((size_t)depth, sizeof *queue->batch);
  queue->arrived = calloc((size_t)depth, sizeof *queue->arrived);
  queue->refused = calloc((size_t)depth, sizeof *queue->refused);
  queue->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  int32_t status = queue->event_fd < 0 ? -errno : 0;
  if (queue->blocks == NULL || queue->batch == NULL || queue->arrived == NULL || queue->refused == NULL) {
    status = -ENOMEM;
  }
  if (status == 0 && syscall(SYS_io_setup, (unsigned)depth, &queue->context) != 0) status = -errno;
  if (status != 0) {
    kaio_close(queue);
    return status;
  }
  *out = queue;
  return 0;
}

static int32_t kaio_probe(void) {
  zn_queue *queue;
  int32_t status = kaio_open(&queue, PROBE_DEPTH, 0);
  if (status == 0) kaio_close(queue);
  return status;
}

static int kaio_event_fd(zn_queue *queue) { return queue->event_fd; }

static bool kaio_enqueue(zn_queue *queue, const zn_transfer *transfer) {
  struct iocb *block = &queue->blocks[transfer->slot];
  memset(block, 0, sizeof *block);
  block->aio_data = (uint64_t)transfer->slot;
  block->aio_fildes = (uint32_t)transfer->fd;
  block->aio_flags = IOCB_FLAG_RESFD;
  block->aio_resfd = (uint32_t)queue->event_fd;
  if (transfer->op == ZN_AIO_SYNC) {
    block->aio_lio_opcode = IOCB_CMD_FDSYNC;
  } else {
    block->aio_lio_opcode = transfer->op == ZN_AIO_READ ? IOCB_CMD_PREAD : IOCB_CMD_PWRITE;
    block->aio_buf = (uint64_t)(uintptr_t)transfer->buffer;
    block->aio_nbytes = (uint64_t)transfer->nbytes;
    block->aio_offset = transfer->offset;
  }
  queue->batch[queue->enqueued++] = block;
  return false;
}

/* A transfer that io_submit rejects ends at once; its error is reported like any other. */
static void refuse(zn_queue *queue, const struct iocb *block, int32_t status) {
  int64_t result = status;
  /* Before 4.18 there was no asynchronous fdatasync. */
  if (block->aio_lio_opcode == IOCB_CMD_FDSYNC && status == -EINVAL) {
    result = fdatasync((int)block->aio_fildes) == 0 ? 0 : -errno;
  }
  queue->refused[queue->refused_count++] = (zn_event){.slot = (int32_t)block->aio_data, .result = result};
}

static int32_t kaio_flush(zn_queue *queue) {
  int32_t begin = 0;
  while (begin < queue->enqueued) {
    long taken = syscall(SYS_io_submit, queue->context, (long)(queue->enqueued - begin), queue->batch + begin);
    if (taken > 0) {
      begin += (int32_t)taken;
    } else {
      /* An errno concerns only the first transfer of the batch. */
      refuse(queue, queue->batch[begin++], taken == 0 ? -EAGAIN : -errno);
    }
  }
  queue->enqueued = 0;
  return queue->refused_count;
}

static int32_t kaio_reap(zn_queue *queue, zn_event *out, int32_t max) {
  int32_t count = 0;
  while (count < max && queue->refused_count > 0) out[count++] = queue->refused[--queue->refused_count];
  if (count == max) return count;
  /* Clear the event first: a completion between the two calls then raises it again, and is not missed. */
  eventfd_t ignored;
  eventfd_read(queue->event_fd, &ignored);
  struct timespec now = {0};
  long arrived = syscall(SYS_io_getevents, queue->context, 0L, (long)(max - count), queue->arrived, &now);
  for (long i = 0; i < arrived; i++) {
    out[count++] = (zn_event){.slot = (int32_t)queue->arrived[i].data, .result = queue->arrived[i].res};
  }
  return count;
}

#else /* no header to build against */

static int32_t kaio_probe(void) { return -ENOSYS; }

static int32_t kaio_open(zn_queue **out, int32_t depth, int32_t threads) {
  (void)out, (void)depth, (void)threads;
  return -ENOSYS;
}

#endif

const zn_backend zn_backend_kaio = {
    .name = "libaio",
    .probe = kaio_probe,
    .open = kaio_open,
#ifdef ZN_HAS_KAIO
    .event_fd = kaio_event_fd,
    .enqueue = kaio_enqueue,
    .flush = kaio_flush,
    .reap = kaio_reap,
    .close = kaio_close,
#endif
};
