/* Fork and join: no pool, hence nothing to break across fork(), nothing to share between callers
 * and nothing left running. Starting a thread costs ~20 us, which a part has to be worth. */
#include <pthread.h>

#include "kernels.h"

enum { THREADS_MAX = 256, PART_NUMEL_MIN = 1 << 16 };

typedef struct {
  zn_part *part;
  const void *context;
  int64_t begin, end;
} zn_job;

static void *run_job(void *argument) {
  const zn_job *job = argument;
  job->part(job->context, job->begin, job->end);
  return NULL;
}

static int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

void zn_parallel(zn_part *part, const void *context, int64_t begin, int64_t end, int32_t threads) {
  int64_t parts = (end - begin) / PART_NUMEL_MIN;
  if (parts > threads) parts = threads;
  if (parts > THREADS_MAX) parts = THREADS_MAX;
  if (parts < 2) {
    if (begin < end) part(context, begin, end);
    return;
  }
  pthread_t workers[THREADS_MAX];
  zn_job jobs[THREADS_MAX];
  int started[THREADS_MAX];
  int64_t origin = begin - begin % ZN_BLOCK_NUMEL;
  int64_t step = round_up((end - origin + parts - 1) / parts, ZN_BLOCK_NUMEL);
  int count = 0;
  for (int64_t at = begin, next = origin + step; at < end; at = next, next += step) {
    jobs[count] = (zn_job){part, context, at, next < end ? next : end};
    /* The caller takes the first part itself, and any part that gets no thread. */
    started[count] = count > 0 && pthread_create(&workers[count], NULL, run_job, &jobs[count]) == 0;
    count++;
  }
  for (int i = 0; i < count; i++) {
    if (!started[i]) run_job(&jobs[i]);
  }
  for (int i = 0; i < count; i++) {
    if (started[i]) pthread_join(workers[i], NULL);
  }
}
