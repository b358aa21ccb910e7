/* The sum over ranks and its block sums in one pass over memory: each block is summed while it is in the first-level
 * cache, with the kernels of the row in use. */
#include <errno.h>

#include "kernels.h"

typedef struct {
  zn_reduce_kernel *reduce;
  zn_sumsq_kernel *sumsq;
  void *stored;
  zn_square_sum *sums;
  const void *const *sources;
  int64_t source_count;
  float scale;
} zn_reduce_call;

/* `begin` is a multiple of the block. */
static void reduce_part(const void *context, int64_t begin, int64_t end) {
  const zn_reduce_call *call = context;
  for (int64_t from = begin; from < end; from += ZN_BLOCK_NUMEL) {
    int64_t to = end - from < ZN_BLOCK_NUMEL ? end : from + ZN_BLOCK_NUMEL;
    call->reduce(call->stored, call->sources, call->source_count, call->scale, from, to);
    call->sumsq(call->sums, call->stored, from, to);
  }
}

static int has_null(const void *const *sources, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    if (sources[i] == NULL) return 1;
  }
  return 0;
}

int32_t zn_cpu_reduce_ranks(void *stored, int32_t stored_dtype, zn_square_sum *sums,
                            const void *const *sources, int64_t source_count, int32_t in_dtype, int64_t numel,
                            float scale, int32_t add, int32_t threads) {
  if (!zn_is_dtype(stored_dtype) || !zn_is_dtype(in_dtype) || source_count < 1 || numel < 0 || threads < 1) {
    return -EINVAL;
  }
  if (stored_dtype != ZN_F32 && (stored_dtype != in_dtype || add)) return -EINVAL;
  if (numel == 0) return 0;
  if (!stored || !sums || !sources || has_null(sources, source_count)) return -EINVAL;
  const zn_cpu_kernels *kernels = zn_cpu_active();
  int how = add ? ZN_REDUCE_ADD : stored_dtype == in_dtype ? ZN_REDUCE_SAME : ZN_REDUCE_WIDE;
  zn_reduce_call call = {
      kernels->reduce[in_dtype][how], kernels->sumsq[stored_dtype], stored, sums, sources, source_count,
      scale};
  zn_parallel(reduce_part, &call, 0, numel, threads);
  return 0;
}
