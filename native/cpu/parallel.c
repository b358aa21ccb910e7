/* One loop on several threads. All callers share the helper threads: to start a thread costs 20 us and more, to wake
 * one costs a few. A helper without work for IDLE_NANOSECONDS ends, so none is left running; a child of fork has no
 * helpers, and starts its own. A caller waits only for helpers that have joined its work, not for late ones. All
 * threads take one part after the other from one counter: if another computation slows one core down, threads on the
 * other cores take more parts. */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <time.h>

#include "kernels.h"

enum { THREADS_MAX = 256, PART_NUMEL = 1 << 16, IDLE_NANOSECONDS = 100000000 };

typedef struct zn_work {
  zn_part *part;
  const void *context;
  int64_t begin, end;
  _Atomic int64_t next; /* where the next part begins; a multiple of ZN_BLOCK_NUMEL */
  int wanted, active;   /* helpers that may still join, and those at work; these and the rest are under the lock */
  pthread_cond_t left;  /* the last active helper has left */
  struct zn_work *older;
} zn_work;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t called = PTHREAD_COND_INITIALIZER; /* there is work that wants helpers */
static pthread_once_t once = PTHREAD_ONCE_INIT;
static zn_work *newest; /* the newest work that wants helpers */
static int helpers, useful; /* present helpers, and helpers wanted by all present callers */

static void take_parts(zn_work *work) {
  for (;;) {
    int64_t from = atomic_fetch_add_explicit(&work->next, PART_NUMEL, memory_order_relaxed);
    if (from >= work->end) return;
    int64_t to = from + PART_NUMEL;
    work->part(work->context, from > work->begin ? from : work->begin, to < work->end ? to : work->end);
  }
}

/* Remove the work from the list, so that no further helper joins. Under the lock. */
static void close_to_helpers(zn_work *work) {
  zn_work **link = &newest;
  while (*link && *link != work) link = &(*link)->older;
  if (*link) *link = work->older;
}

/* Wait for work up to IDLE_NANOSECONDS; NULL: there is none. Under the lock. */
static zn_work *awaited(void) {
  struct timespec until;
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_nsec += IDLE_NANOSECONDS;
  if (until.tv_nsec >= 1000000000) until.tv_sec++, until.tv_nsec -= 1000000000;
  int status = 0;
  while (!newest && status != ETIMEDOUT) status = pthread_cond_timedwait(&called, &lock, &until);
  return newest;
}

static void *help(void *unused) {
  pthread_mutex_lock(&lock);
  for (zn_work *work; (work = awaited());) {
    work->active++;
    if (--work->wanted == 0) close_to_helpers(work);
    pthread_mutex_unlock(&lock);
    take_parts(work);
    pthread_mutex_lock(&lock);
    if (--work->active == 0) pthread_cond_signal(&work->left);
  }
  helpers--;
  pthread_mutex_unlock(&lock);
  return unused;
}

/* Helpers block all signals: handlers must run on the program's own threads. Under the lock; false: no more threads
 * can be started. */
static bool start_helper(void) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  pthread_t thread;
  bool started = pthread_create(&thread, NULL, help, NULL) == 0;
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (started) pthread_detach(thread), helpers++;
  return started;
}

static void before_fork(void) { pthread_mutex_lock(&lock); }

static void after_fork_in_parent(void) { pthread_mutex_unlock(&lock); }

static void after_fork_in_child(void) {
  pthread_mutex_init(&lock, NULL);
  pthread_cond_init(&called, NULL);
  newest = NULL;
  helpers = useful = 0;
}

static void watch_forks(void) { pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child); }

void zn_parallel(zn_part *part, const void *context, int64_t begin, int64_t end, int32_t threads) {
  int64_t wanted = (end - begin) / PART_NUMEL - 1;
  if (wanted > threads - 1) wanted = threads - 1;
  if (wanted > THREADS_MAX - 1) wanted = THREADS_MAX - 1;
  if (wanted < 1) {
    if (begin < end) part(context, begin, end);
    return;
  }
  pthread_once(&once, watch_forks);
  zn_work work = {.part = part, .context = context, .begin = begin, .end = end, .wanted = (int)wanted};
  atomic_init(&work.next, begin - begin % ZN_BLOCK_NUMEL);
  pthread_cond_init(&work.left, NULL);
  pthread_mutex_lock(&lock);
  work.older = newest;
  newest = &work;
  useful += (int)wanted;
  while (helpers < useful && helpers < THREADS_MAX && start_helper()) continue;
  pthread_cond_broadcast(&called);
  pthread_mutex_unlock(&lock);
  take_parts(&work);
  pthread_mutex_lock(&lock);
  close_to_helpers(&work);
  useful -= (int)wanted;
  while (work.active > 0) pthread_cond_wait(&work.left, &lock);
  pthread_mutex_unlock(&lock);
  pthread_cond_destroy(&work.left);
}
