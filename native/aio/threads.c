/* The backend that always works: a pool of workers that call pread, pwrite and fdatasync. */
#include <errno.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "aio.h"

/* Both rings hold `depth` entries, because at most so many transfers are in flight. */
struct zn_queue {
  pthread_mutex_t lock;
  pthread_cond_t work;
  zn_transfer *todo;
  zn_event *done;
  int32_t depth, threads;
  int64_t enqueued; /* used by the I/O thread only: written to `todo`, perhaps not yet visible to the workers */
  int64_t posted, started, ended, reaped;
  int event_fd;
  bool is_stopping;
  pthread_t workers[];
};

static int64_t move(const zn_transfer *transfer) {
  ssize_t moved;
  if (transfer->op == ZN_AIO_READ) {
    moved = pread(transfer->fd, transfer->buffer, (size_t)transfer->nbytes, transfer->offset);
  } else if (transfer->op == ZN_AIO_WRITE) {
    moved = pwrite(transfer->fd, transfer->buffer, (size_t)transfer->nbytes, transfer->offset);
  } else {
    moved = fdatasync(transfer->fd);
  }
  return moved < 0 ? -errno : moved;
}

static void *work(void *argument) {
  zn_queue *queue = argument;
  pthread_mutex_lock(&queue->lock);
  for (;;) {
    while (queue->started == queue->posted && !queue->is_stopping) pthread_cond_wait(&queue->work, &queue->lock);
    if (queue->started == queue->posted) break;
    zn_transfer transfer = queue->todo[queue->started++ % queue->depth];
    pthread_mutex_unlock(&queue->lock);
    zn_event event = {.slot = transfer.slot, .result = move(&transfer)};
    pthread_mutex_lock(&queue->lock);
    queue->done[queue->ended % queue->depth] = event;
    if (queue->ended++ == queue->reaped) eventfd_write(queue->event_fd, 1);
  }
  pthread_mutex_unlock(&queue->lock);
  return NULL;
}

static void threads_close(zn_queue *queue) {
  pthread_mutex_lock(&queue->lock);
  queue->is_stopping = true;
  pthread_cond_broadcast(&queue->work);
  pthread_mutex_unlock(&queue->lock);
  for (int32_t i = 0; i < queue->threads; i++) pthread_join(queue->workers[i], NULL);
  pthread_cond_destroy(&queue->work);
  pthread_mutex_destroy(&queue->lock);
  if (queue->event_fd >= 0) close(queue->event_fd);
  free(queue->todo);
  free(queue->done);
  free(queue);
}

static int32_t start_workers(zn_queue *queue, int32_t threads) {
  while (queue->threads < threads) {
    int error = pthread_create(&queue->workers[queue->threads], NULL, work, queue);
    if (error != 0) return -error;
    queue->threads++;
  }
  return 0;
}

static int32_t threads_open(zn_queue **out, int32_t depth, int32_t threads) {
  zn_queue *queue = calloc(1, sizeof *queue + (size_t)threads * sizeof(pthread_t));
  if (queue == NULL) return -ENOMEM;
  queue->depth = depth;
  pthread_mutex_init(&queue->lock, NULL);
  pthread_cond_init(&queue->work, NULL);
  queue->todo = calloc((size_t)depth, sizeof *queue->todo);
  queue->done = calloc((size_t)depth, sizeof *queue->done);
  queue->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  int32_t status = queue->event_fd < 0 ? -errno : 0;
  if (queue->todo == NULL || queue->done == NULL) status = -ENOMEM;
  if (status == 0) status = start_workers(queue, threads);
  if (status != 0) {
    threads_close(queue);
    return status;
  }
  *out = queue;
  return 0;
}

static int32_t threads_probe(void) { return 0; }

static int threads_event_fd(zn_queue *queue) { return queue->event_fd; }

static bool threads_enqueue(zn_queue *queue, const zn_transfer *transfer) {
  /* The entry is free: at most `depth` transfers are in flight, and workers copy their entry first. */
  queue->todo[queue->enqueued++ % queue->depth] = *transfer;
  return false;
}

static int32_t threads_flush(zn_queue *queue) {
  pthread_mutex_lock(&queue->lock);
  int64_t fresh = queue->enqueued - queue->posted;
  queue->posted = queue->enqueued;
  for (int64_t i = 0; i < fresh && i < queue->threads; i++) pthread_cond_signal(&queue->work);
  pthread_mutex_unlock(&queue->lock);
  return 0;
}

static int32_t threads_reap(zn_queue *queue, zn_event *out, int32_t max) {
  pthread_mutex_lock(&queue->lock);
  int32_t count = 0;
  while (count < max && queue->reaped < queue->ended) out[count++] = queue->done[queue->reaped++ % queue->depth];
  eventfd_t ignored;
  if (queue->reaped == queue->ended) eventfd_read(queue->event_fd, &ignored);
  pthread_mutex_unlock(&queue->lock);
  return count;
}

const zn_backend zn_backend_threads = {
    .name = "threads",
    .probe = threads_probe,
    .open = threads_open,
    .event_fd = threads_event_fd,
    .enqueue = threads_enqueue,
    .flush = threads_flush,
    .reap = threads_reap,
    .close = threads_close,
};
