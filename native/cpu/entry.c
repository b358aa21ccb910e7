/* The exported kernels except the updates: check the arguments, find the row's function, split the range. */
#include <errno.h>

#include "kernels.h"

/* ---- cast and accumulate ------------------------------------------------------------------ */

typedef struct {
  zn_cast_kernel *kernel;
  void *out;
  const void *in;
  float scale;
} zn_cast_call;

static void cast_part(const void *context, int64_t begin, int64_t end) {
  const zn_cast_call *call = context;
  call->kernel(call->out, call->in, call->scale, begin, end);
}

int32_t zn_cpu_cast(void *out, int32_t out_dtype, const void *in, int32_t in_dtype, int64_t numel,
                              float scale, int32_t threads) {
  if (!zn_is_dtype(out_dtype) || !zn_is_dtype(in_dtype) || numel < 0 || threads < 1) return -EINVAL;
  if (numel == 0) return 0;
  if (!out || !in) return -EINVAL;
  zn_cast_call call = {zn_cpu_active()->cast[out_dtype][in_dtype], out, in, scale};
  zn_parallel(cast_part, &call, 0, numel, threads);
  return 0;
}

typedef struct {
  zn_accumulate_kernel *kernel;
  float *sum;
  const void *first, *in;
} zn_accumulate_call;

static void accumulate_part(const void *context, int64_t begin, int64_t end) {
  const zn_accumulate_call *call = context;
  call->kernel(call->sum, call->first, call->in, begin, end);
}

int32_t zn_cpu_accumulate(float *sum, const void *first, int32_t first_dtype, const void *in,
                                    int32_t in_dtype, int64_t numel, int32_t threads) {
  if (first == NULL) {
    first = sum;
    first_dtype = ZN_F32;
  }
  if (!zn_is_dtype(first_dtype) || !zn_is_dtype(in_dtype) || numel < 0 || threads < 1) return -EINVAL;
  if (numel == 0) return 0;
  if (!sum || !in) return -EINVAL;
  zn_accumulate_call call = {zn_cpu_active()->accumulate[first_dtype][in_dtype], sum, first, in};
  zn_parallel(accumulate_part, &call, 0, numel, threads);
  return 0;
}

/* ---- split and join ----------------------------------------------------------------------- */

typedef struct {
  const zn_cpu_kernels *kernels;
  float *full;
  uint16_t *weight;
  int16_t *remainder;
} zn_split_call;

static void split_part(const void *context, int64_t begin, int64_t end) {
  const zn_split_call *call = context;
  call->kernels->split(call->weight, call->remainder, call->full, begin, end);
}

static void join_part(const void *context, int64_t begin, int64_t end) {
  const zn_split_call *call = context;
  call->kernels->join(call->full, call->weight, call->remainder, begin, end);
}

int32_t zn_cpu_split(void *weight_bf16, int16_t *remainder, const float *in, int64_t numel,
                               int32_t threads) {
  if (numel < 0 || threads < 1) return -EINVAL;
  if (numel == 0) return 0;
  if (!weight_bf16 || !remainder || !in) return -EINVAL;
  zn_split_call call = {zn_cpu_active(), (float *)in, weight_bf16, remainder};
  zn_parallel(split_part, &call, 0, numel, threads);
  return 0;
}

int32_t zn_cpu_join(float *out, const void *weight_bf16, const int16_t *remainder, int64_t numel,
                              int32_t threads) {
  if (numel < 0 || threads < 1) return -EINVAL;
  if (numel == 0) return 0;
  if (!out || !weight_bf16 || !remainder) return -EINVAL;
  zn_split_call call = {zn_cpu_active(), out, (uint16_t *)weight_bf16, (int16_t *)remainder};
  zn_parallel(join_part, &call, 0, numel, threads);
  return 0;
}

/* ---- block sums --------------------------------------------------------------------------- */

typedef struct {
  zn_sumsq_kernel *kernel;
  zn_square_sum *sums;
  const void *in;
} zn_sumsq_call;

static void sumsq_part(const void *context, int64_t begin, int64_t end) {
  const zn_sumsq_call *call = context;
  call->kernel(call->sums, call->in, begin, end);
}

int32_t zn_cpu_block_sumsq(zn_square_sum *sums, const void *in, int32_t in_dtype, int64_t numel, int32_t threads) {
  if (!zn_is_dtype(in_dtype) || numel < 0 || threads < 1) return -EINVAL;
  if (numel == 0) return 0;
  if (!sums || !in) return -EINVAL;
  zn_sumsq_call call = {zn_cpu_active()->sumsq[in_dtype], sums, in};
  zn_parallel(sumsq_part, &call, 0, numel, threads);
  return 0;
}
