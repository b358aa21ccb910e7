/* Drives the I/O engine from several threads under faults; built with sanitizers by test_aio_sanitizers.py.
 * Usage: aio_stress FILE. Exit status 0: every request completed once and moved the right bytes. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "zn_abi.h"

enum { SUBMITTERS = 2, REQUESTS = 600, SLOT_BYTES = 5 * 4096 + 100, BATCH = 4, RATE_ONE = 1 << 16 };

typedef struct {
  zn_aio *aio;
  int fd;
  zn_aio_request requests[REQUESTS]; /* tag = index */
  atomic_int done[REQUESTS];
  atomic_int taken, failed;
  unsigned char *pool; /* a slot per request; every other request's buffer is there */
} stress;

typedef struct {
  stress *all;
  int32_t first;
} submitter;

#define CHECK(condition)                                                     \
  do {                                                                       \
    if (!(condition)) {                                                      \
      fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
      exit(1);                                                               \
    }                                                                        \
  } while (0)

static unsigned char byte_at(int64_t offset) { return (unsigned char)(offset * 2654435761u >> 13); }

static void fill(unsigned char *bytes, int64_t offset, int64_t nbytes) {
  for (int64_t i = 0; i < nbytes; i++) bytes[i] = byte_at(offset + i);
}

static void *submit(void *argument) {
  submitter *self = argument;
  stress *all = self->all;
  for (int32_t i = self->first; i < REQUESTS; i += SUBMITTERS * BATCH) {
    int32_t status;
    while ((status = zn_aio_submit(all->aio, &all->requests[i], BATCH)) == -EAGAIN) usleep(100);
    CHECK(status == 0);
  }
  return NULL;
}

static int is_pooled(uint64_t tag) { return tag % 2 == 0; }

static void check(stress *all, const zn_aio_completion *completion) {
  const zn_aio_request *request = &all->requests[completion->tag];
  CHECK(atomic_fetch_add(&all->done[completion->tag], 1) == 0);
  if (completion->status == 0) {
    CHECK(completion->fail_offset == -1);
    CHECK(completion->nbytes == request->nbytes);
    const unsigned char *bytes = request->buffer;
    for (int64_t i = 0; i < request->nbytes; i++) CHECK(bytes[i] == byte_at(request->offset + i));
  } else {
    CHECK(completion->status == -EIO);
    CHECK(completion->fail_offset >= request->offset);
    atomic_fetch_add(&all->failed, 1);
  }
  if (!is_pooled(completion->tag)) free(request->buffer);
  atomic_fetch_add(&all->taken, 1);
}

static void *take(void *argument) {
  stress *all = argument;
  zn_aio_completion out[16];
  while (atomic_load(&all->taken) < REQUESTS) {
    struct pollfd arrived = {.fd = zn_aio_event_fd(all->aio), .events = POLLIN};
    CHECK(poll(&arrived, 1, 1) >= 0);
    int32_t count = zn_aio_poll(all->aio, out, 16);
    CHECK(count >= 0);
    for (int32_t i = 0; i < count; i++) check(all, &out[i]);
  }
  return NULL;
}

static void *meddle(void *argument) {
  stress *all = argument;
  zn_aio_fault fault = {
      .fail_rate = RATE_ONE / 50,
      .short_rate = RATE_ONE / 4,
      .delay_rate = RATE_ONE / 8,
      .delay_us = 200,
      .op_mask = 7,
  };
  zn_aio_stats stats;
  /* The table changes while the I/O thread looks things up in it. */
  void *spare = malloc(SLOT_BYTES);
  CHECK(spare != NULL);
  const int32_t registering = zn_aio_register_memory(all->aio, spare, SLOT_BYTES);
  while (atomic_load(&all->taken) < REQUESTS) {
    fault.seed++;
    fault.status = fault.seed % 3 == 0 ? -EIO : fault.seed % 3 == 1 ? -EINTR : -EAGAIN;
    CHECK(zn_aio_inject(all->aio, &fault) == 0);
    CHECK(zn_aio_register_memory(all->aio, spare, SLOT_BYTES) == registering);
    CHECK(zn_aio_stats_get(all->aio, &stats) == 0);
    CHECK(stats.requests <= REQUESTS);
    usleep(300);
    CHECK(zn_aio_unregister_memory(all->aio, spare, SLOT_BYTES) == registering);
  }
  free(spare);
  return NULL;
}

/* Writes and reads of bytes that the file already holds, so that order does not matter. */
static void prepare(stress *all) {
  const int64_t file_bytes = (int64_t)REQUESTS * SLOT_BYTES;
  unsigned char *content = malloc((size_t)file_bytes);
  CHECK(content != NULL);
  fill(content, 0, file_bytes);
  CHECK(pwrite(all->fd, content, (size_t)file_bytes, 0) == file_bytes);
  free(content);
  for (int32_t i = 0; i < REQUESTS; i++) {
    zn_aio_request *request = &all->requests[i];
    const int64_t nbytes = i % 20 == 0 ? 0 : (int64_t)i * 7919 % SLOT_BYTES + 1;
    *request = (zn_aio_request){
        .tag = (uint64_t)i, .op = i % 3, .fd = all->fd, .offset = (int64_t)i * SLOT_BYTES, .nbytes = nbytes};
    if (request->op == ZN_AIO_SYNC) request->offset = request->nbytes = 0;
    request->buffer = is_pooled(request->tag) ? all->pool + (size_t)i * SLOT_BYTES
                                              : calloc(1, (size_t)request->nbytes + 1);
    CHECK(request->buffer != NULL);
    if (request->op == ZN_AIO_WRITE) fill(request->buffer, request->offset, request->nbytes);
  }
}

static void run(int32_t backend, int fd) {
  static stress all;
  memset(&all, 0, sizeof all);
  all.fd = fd;
  void *pool;
  CHECK(zn_mem_alloc(&pool, (int64_t)REQUESTS * SLOT_BYTES, ZN_MEM_HUGE | ZN_MEM_TOUCH) == 0);
  all.pool = pool;
  prepare(&all);
  const zn_aio_options options = {
      .backend = backend, .queue_depth = 8, .threads = 3, .requests_max = 64, .chunk_bytes = 4096};
  CHECK(zn_aio_open(&all.aio, &options) == 0);
  int32_t registered = zn_aio_register_memory(all.aio, pool, (int64_t)REQUESTS * SLOT_BYTES);
  CHECK(registered == 0 || backend != ZN_AIO_IO_URING || registered == -ENOTSUP || registered == -ENOMEM);
  pthread_t threads[SUBMITTERS + 3];
  submitter submitters[SUBMITTERS];
  for (int32_t i = 0; i < SUBMITTERS; i++) {
    submitters[i] = (submitter){&all, i * BATCH};
    CHECK(pthread_create(&threads[i], NULL, submit, &submitters[i]) == 0);
  }
  CHECK(pthread_create(&threads[SUBMITTERS], NULL, take, &all) == 0);
  CHECK(pthread_create(&threads[SUBMITTERS + 1], NULL, take, &all) == 0);
  CHECK(pthread_create(&threads[SUBMITTERS + 2], NULL, meddle, &all) == 0);
  for (int32_t i = 0; i < SUBMITTERS + 3; i++) pthread_join(threads[i], NULL);
  zn_aio_stats stats;
  CHECK(zn_aio_stats_get(all.aio, &stats) == 0);
  CHECK((stats.registered > 0) == (registered == 0));
  CHECK(zn_aio_close(all.aio) == 0);
  CHECK(zn_mem_free(pool, (int64_t)REQUESTS * SLOT_BYTES) == 0);
  for (int32_t i = 0; i < REQUESTS; i++) CHECK(atomic_load(&all.done[i]) == 1);
  printf("backend %d: %d requests, %d failed as injected, %d transfers through registered memory\n", (int)backend,
         (int)REQUESTS, (int)all.failed, (int)stats.registered);
}

static void check_memory(void) {
  void *memory;
  CHECK(zn_mem_alloc(&memory, 3000000, ZN_MEM_HUGE | ZN_MEM_TOUCH) == 0);
  memset(memory, 1, 3000000);
  CHECK(zn_mem_free(memory, 3000000) == 0);
  CHECK(zn_mem_poison(&memory, 5000000) == 0);
  CHECK(((unsigned char *)memory)[4999999] == 0xFF);
  CHECK(zn_mem_free(memory, 5000000) == 0);
}

int main(int argc, char **argv) {
  CHECK(argc == 2);
  int fd = open(argv[1], O_RDWR | O_CREAT | O_TRUNC, 0600);
  CHECK(fd >= 0);
  check_memory();
  for (int32_t backend = ZN_AIO_IO_URING; backend <= ZN_AIO_THREADS; backend++) {
    int32_t status = zn_aio_probe(backend);
    if (status == 0) {
      run(backend, fd);
    } else {
      printf("backend %d: skipped: %s\n", (int)backend, zn_strerror(status));
    }
  }
  close(fd);
  return 0;
}
