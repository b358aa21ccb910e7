/* io_uring by system calls: one ring, batched submission, completions read from shared memory. */
#include <errno.h>

#include "aio.h"

#if defined(__linux__) && defined(__has_include)
#if __has_include(<linux/io_uring.h>)
#define ZN_HAS_URING 1
#endif
#endif

#ifdef ZN_HAS_URING

#include <linux/io_uring.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

/* The numbers are the same on every architecture. */
#ifndef SYS_io_uring_setup
#define SYS_io_uring_setup 425
#define SYS_io_uring_enter 426
#define SYS_io_uring_register 427
#endif

enum { PROBE_DEPTH = 4, PROBE_OPS = 256 };

struct zn_queue {
  int fd;
  char *rings;
  struct io_uring_sqe *sqes;
  size_t rings_bytes, sqes_bytes;
  unsigned *sq_tail, *sq_array, *cq_head, *cq_tail;
  unsigned sq_mask, cq_mask, tail;
  unsigned enqueued; /* the last entries before `tail`, which the kernel has not taken yet */
  struct io_uring_cqe *cqes;
  zn_event *refused;
  int32_t refused_count;
  zn_registry *registry;
};

static void uring_close(zn_queue *queue) {
  zn_registry_close(queue->registry);
  if (queue->sqes != NULL) munmap(queue->sqes, queue->sqes_bytes);
  if (queue->rings != NULL) munmap(queue->rings, queue->rings_bytes);
  if (queue->fd >= 0) close(queue->fd);
  free(queue->refused);
  free(queue);
}

static int32_t map_rings(zn_queue *queue, const struct io_uring_params *params) {
  size_t sq_bytes = params->sq_off.array + params->sq_entries * sizeof(unsigned);
  size_t cq_bytes = params->cq_off.cqes + params->cq_entries * sizeof(struct io_uring_cqe);
  queue->rings_bytes = sq_bytes > cq_bytes ? sq_bytes : cq_bytes;
  queue->sqes_bytes = params->sq_entries * sizeof(struct io_uring_sqe);
  const int protection = PROT_READ | PROT_WRITE, flags = MAP_SHARED | MAP_POPULATE;
  void *rings = mmap(NULL, queue->rings_bytes, protection, flags, queue->fd, IORING_OFF_SQ_RING);
  if (rings == MAP_FAILED) return -errno;
  queue->rings = rings;
  void *sqes = mmap(NULL, queue->sqes_bytes, protection, flags, queue->fd, IORING_OFF_SQES);
  if (sqes == MAP_FAILED) return -errno;
  queue->sqes = sqes;
  queue->sq_tail = (unsigned *)(queue->rings + params->sq_off.tail);
  queue->sq_array = (unsigned *)(queue->rings + params->sq_off.array);
  queue->sq_mask = *(unsigned *)(queue->rings + params->sq_off.ring_mask);
  queue->cq_head = (unsigned *)(queue->rings + params->cq_off.head);
  queue->cq_tail = (unsigned *)(queue->rings + params->cq_off.tail);
  queue->cq_mask = *(unsigned *)(queue->rings + params->cq_off.ring_mask);
  queue->cqes = (struct io_uring_cqe *)(queue->rings + params->cq_off.cqes);
  return 0;
}

/* READ and WRITE exist since Linux 5.6, and so does IORING_REGISTER_PROBE. */
static int32_t check_operations(int fd) {
  const uint8_t needed[] = {IORING_OP_READ, IORING_OP_WRITE, IORING_OP_FSYNC};
  struct io_uring_probe *known = calloc(1, sizeof *known + PROBE_OPS * sizeof(struct io_uring_probe_op));
  if (known == NULL) return -ENOMEM;
  int32_t status = 0;
  if (syscall(SYS_io_uring_register, fd, IORING_REGISTER_PROBE, known, PROBE_OPS) != 0) status = -ENOSYS;
  for (size_t i = 0; i < sizeof needed && status == 0; i++) {
    if ((known->ops[needed[i]].flags & IO_URING_OP_SUPPORTED) == 0) status = -ENOSYS;
  }
  free(known);
  return status;
}

static int32_t uring_open(zn_queue **out, int32_t depth, int32_t threads) {
  (void)threads;
  zn_queue *queue = calloc(1, sizeof *queue);
  if (queue == NULL) return -ENOMEM;
  struct io_uring_params params = {0};
  queue->fd = (int)syscall(SYS_io_uring_setup, (unsigned)depth, &params);
  int32_t status = queue->fd < 0 ? -errno : 0;
  queue->refused = calloc((size_t)depth, sizeof *queue->refused);
  if (status == 0 && queue->refused == NULL) status = -ENOMEM;
  if (status == 0 && (params.features & IORING_FEAT_SINGLE_MMAP) == 0) status = -ENOSYS;
  if (status == 0) status = check_operations(queue->fd);
  if (status == 0) status = map_rings(queue, &params);
  if (status != 0) {
    uring_close(queue);
    return status;
  }
  queue->tail = *queue->sq_tail;
  queue->registry = zn_registry_open(queue->fd);
  *out = queue;
  return 0;
}

static int32_t uring_probe(void) {
  zn_queue *queue;
  int32_t status = uring_open(&queue, PROBE_DEPTH, 0);
  if (status == 0) uring_close(queue);
  return status;
}

static int uring_event_fd(zn_queue *queue) { return queue->fd; }

static zn_registry *uring_registry(zn_queue *queue) { return queue->registry; }

static bool uring_enqueue(zn_queue *queue, const zn_transfer *transfer) {
  const bool is_read = transfer->op == ZN_AIO_READ;
  int32_t memory = -1;
  const unsigned index = queue->tail++ & queue->sq_mask;
  struct io_uring_sqe *sqe = &queue->sqes[index];
  *sqe = (struct io_uring_sqe){.fd = transfer->fd, .user_data = (uint64_t)transfer->slot};
  if (transfer->op == ZN_AIO_SYNC) {
    sqe->opcode = IORING_OP_FSYNC;
    sqe->fsync_flags = IORING_FSYNC_DATASYNC;
  } else {
    memory = zn_registry_find(queue->registry, transfer->buffer, transfer->nbytes);
    if (memory >= 0) {
      sqe->opcode = is_read ? IORING_OP_READ_FIXED : IORING_OP_WRITE_FIXED;
      sqe->buf_index = (uint16_t)memory;
    } else {
      sqe->opcode = is_read ? IORING_OP_READ : IORING_OP_WRITE;
    }
    sqe->off = (uint64_t)transfer->offset;
    sqe->addr = (uint64_t)(uintptr_t)transfer->buffer;
    sqe->len = (uint32_t)transfer->nbytes;
  }
  queue->sq_array[index] = index;
  queue->enqueued++;
  return memory >= 0;
}

/* The kernel reads the ring only during io_uring_enter: entries that it did not take can be taken back. */
static void take_back(zn_queue *queue, int32_t status) {
  for (; queue->enqueued > 0; queue->enqueued--) {
    const unsigned index = (queue->tail - queue->enqueued) & queue->sq_mask;
    queue->refused[queue->refused_count++] =
        (zn_event){.slot = (int32_t)queue->sqes[index].user_data, .result = status};
  }
}

static int32_t uring_flush(zn_queue *queue) {
  __atomic_store_n(queue->sq_tail, queue->tail, __ATOMIC_RELEASE);
  while (queue->enqueued > 0) {
    long taken = syscall(SYS_io_uring_enter, queue->fd, queue->enqueued, 0, 0, NULL, 0);
    if (taken > 0) {
      queue->enqueued -= (unsigned)taken;
    } else if (taken == 0 || errno != EINTR) {
      const unsigned left = queue->enqueued;
      take_back(queue, taken == 0 || errno == EBUSY ? -EAGAIN : -errno);
      queue->tail -= left;
      __atomic_store_n(queue->sq_tail, queue->tail, __ATOMIC_RELEASE);
    }
  }
  return queue->refused_count;
}

static int32_t uring_reap(zn_queue *queue, zn_event *out, int32_t max) {
  int32_t count = 0;
  while (count < max && queue->refused_count > 0) out[count++] = queue->refused[--queue->refused_count];
  unsigned head = *queue->cq_head;
  const unsigned tail = __atomic_load_n(queue->cq_tail, __ATOMIC_ACQUIRE);
  for (; count < max && head != tail; head++) {
    const struct io_uring_cqe *cqe = &queue->cqes[head & queue->cq_mask];
    out[count++] = (zn_event){.slot = (int32_t)cqe->user_data, .result = cqe->res};
  }
  __atomic_store_n(queue->cq_head, head, __ATOMIC_RELEASE);
  return count;
}

#else /* no header to build against */

static int32_t uring_probe(void) { return -ENOSYS; }

static int32_t uring_open(zn_queue **out, int32_t depth, int32_t threads) {
  (void)out, (void)depth, (void)threads;
  return -ENOSYS;
}

#endif

const zn_backend zn_backend_uring = {
    .name = "io_uring",
    .probe = uring_probe,
    .open = uring_open,
#ifdef ZN_HAS_URING
    .event_fd = uring_event_fd,
    .enqueue = uring_enqueue,
    .flush = uring_flush,
    .reap = uring_reap,
    .registry = uring_registry,
    .close = uring_close,
#endif
};
