/* Cast and block sums in one pass over memory: each block is summed while it is still in the first-level
 * cache after its cast, with the kernels of the row in use. */
#include <errno.h>

#include "kernels.h"

typedef struct {
  zn_cast_kernel *cast;
  zn_sumsq_kernel *sumsq;
  void *out;
  zn_square_sum *sums;
  const void *in;
  float scale;
} zn_cast_sumsq_call;

/* `begin` is a multiple of the block. */
static void cast_sumsq_part(const void *context, int64_t begin, int64_t end) {
  const zn_cast_sumsq_call *call = context;
  for (int64_t from = begin; from < end; from += ZN_BLOCK_NUMEL) {
    int64_t to = end - from < ZN_BLOCK_NUMEL ? end : from + ZN_BLOCK_NUMEL;
    call->cast(call->out, call->in, call->scale, from, to);
    call->sumsq(call->sums, call->out, from, to);
  }
}

int32_t zn_cpu_cast_sumsq(void *out, int32_t out_dtype, zn_square_sum *sums, const void *in, int32_t in_dtype,
                          int64_t numel, float scale, int32_t threads) {
  if (!zn_is_dtype(out_dtype) || !zn_is_dtype(in_dtype) || numel < 0 || threads < 1) return -EINVAL;
  if (numel == 0) return 0;
  if (!out || !sums || !in) return -EINVAL;
  const zn_cpu_kernels *kernels = zn_cpu_active();
  zn_cast_sumsq_call call = {
      kernels->cast[out_dtype][in_dtype], kernels->sumsq[out_dtype], out, sums, in, scale};
  zn_parallel(cast_sumsq_part, &call, 0, numel, threads);
  return 0;
}
