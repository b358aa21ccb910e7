/* Fork and join: no pool, hence nothing to break across fork(), nothing to share between callers
 * and nothing left running; who waits sleeps. Starting a thread costs ~20 us, which its parts have to be
 * worth. Threads take part after part from one counter: when another thread of the process computes
 * on one of the cores, the others take what it cannot. */
#include <pthread.h>
#include <stdatomic.h>

#include "kernels.h"

enum { THREADS_MAX = 256, PART_NUMEL = 1 << 16 };

typedef struct {
  zn_part *part;
  const void *context;
  int64_t begin, end;
  _Atomic int64_t next; /* where the next part begins; a multiple of ZN_BLOCK_NUMEL */
} zn_work;

static void *take_parts(void *argument) {
  zn_work *work = argument;
  for (;;) {
    int64_t from = atomic_fetch_add_explicit(&work->next, PART_NUMEL, memory_order_relaxed);
    if (from >= work->end) return NULL;
    int64_t to = from + PART_NUMEL;
    work->part(work->context, from > work->begin ? from : work->begin, to < work->end ? to : work->end);
  }
}

void zn_parallel(zn_part *part, const void *context, int64_t begin, int64_t end, int32_t threads) {
  int64_t helpers = (end - begin) / PART_NUMEL - 1;
  if (helpers > threads - 1) helpers = threads - 1;
  if (helpers > THREADS_MAX - 1) helpers = THREADS_MAX - 1;
  if (helpers < 1) {
    if (begin < end) part(context, begin, end);
    return;
  }
  zn_work work = {part, context, begin, end, begin - begin % ZN_BLOCK_NUMEL};
  pthread_t workers[THREADS_MAX];
  int started = 0;
  while (started < helpers && pthread_create(&workers[started], NULL, take_parts, &work) == 0) started++;
  take_parts(&work);
  for (int i = 0; i < started; i++) pthread_join(workers[i], NULL);
}
