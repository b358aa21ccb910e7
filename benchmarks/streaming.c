/* The least an Adam update of split masters can cost: the same streams, read and written in place, and no maths.
 *
 * weight and remainder (2 bytes each), exp_avg and exp_avg_sq (4 each) are read and written, gradient (2) is read. */
#include <pthread.h>
#include <stdint.h>

enum { TILE = 64, THREADS_MAX = 64, LINE_F32 = 16, LINE_HALF = 32 };

typedef struct {
  uint16_t *weight, *remainder;
  uint32_t *exp_avg, *exp_avg_sq;
  const uint16_t *gradient;
  int64_t prefetch_numel; /* how far ahead to ask for lines; 0: leave it to the hardware */
  int64_t begin, end;
} streams;

static void prefetch(const streams *s, int64_t i) {
  for (int64_t k = 0; k < TILE; k += LINE_F32) {
    __builtin_prefetch(s->exp_avg + i + k, 1);
    __builtin_prefetch(s->exp_avg_sq + i + k, 1);
  }
  for (int64_t k = 0; k < TILE; k += LINE_HALF) {
    __builtin_prefetch(s->gradient + i + k, 0);
    __builtin_prefetch(s->weight + i + k, 1);
    __builtin_prefetch(s->remainder + i + k, 1);
  }
}

static void *stream(void *argument) {
  const streams s = *(const streams *)argument;
  for (int64_t i = s.begin; i < s.end; i += TILE) {
    if (s.prefetch_numel) prefetch(&s, i + s.prefetch_numel);
#pragma GCC ivdep
    for (int64_t k = i; k < i + TILE; k++) {
      uint16_t g = s.gradient[k];
      s.weight[k] = (uint16_t)(s.weight[k] + g);
      s.remainder[k] = (uint16_t)(s.remainder[k] ^ g);
      s.exp_avg[k] += g;
      s.exp_avg_sq[k] ^= g;
    }
  }
  return 0;
}

/* `numel` is a multiple of 64 * threads. Returns 0, or the errno of a thread that could not be started. */
int32_t stream_adam(uint16_t *weight, uint16_t *remainder, uint32_t *exp_avg, uint32_t *exp_avg_sq,
                    const uint16_t *gradient, int64_t numel, int64_t prefetch_numel, int32_t threads) {
  pthread_t workers[THREADS_MAX];
  streams parts[THREADS_MAX];
  if (threads < 1 || threads > THREADS_MAX) return 22; /* EINVAL */
  int64_t step = numel / threads;
  int32_t status = 0, started = 1;
  for (int32_t t = 0; t < threads; t++) {
    int64_t begin = t * step;
    parts[t] = (streams){weight, remainder, exp_avg, exp_avg_sq, gradient, prefetch_numel, begin, begin + step};
  }
  for (; started < threads && status == 0; started++) {
    status = pthread_create(&workers[started], 0, stream, &parts[started]);
  }
  if (status != 0) started--;
  stream(&parts[0]);
  for (int32_t t = 1; t < started; t++) pthread_join(workers[t], 0);
  return status;
}
