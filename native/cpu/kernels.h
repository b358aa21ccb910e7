/* Common declarations of this folder: the table of kernels, the work split, and float conversions that give
 * the same bits on every instruction set. */
#ifndef ZN_CPU_KERNELS_H
#define ZN_CPU_KERNELS_H

#include <stddef.h>
#include <string.h>

#include "../include/zn_abi.h"
#include "../include/zn_floats.h"
#include "../include/zn_square_sum.h"

#define ZN_INLINE ZN_BOTH

enum { ZN_DTYPES = 3 };

/* How the fp32 master is stored: see zn_cpu_adamw. */
enum {
  ZN_MASTER_IN_WEIGHT = 0,
  ZN_MASTER_SPLIT = 1,
  ZN_MASTER_BESIDE_BF16 = 2,
  ZN_MASTER_BESIDE_F16 = 3,
  ZN_MASTER_ROUNDED = 4
};

typedef struct {
  int32_t scheme, grad_dtype;
  void *weight, *master;
  const void *grad;
  float grad_scale;
} zn_update_arrays;

/* The states of a run of elements: pointers to the first one. Rounding to bf16 uses the hash of `counter` + element. */
typedef struct {
  void *states[ZN_STATES];
  int32_t bf16;
  uint32_t counter;
} zn_states_run;

/* How a block of 8-bit moments is rounded: to nearest, or with the hash of `counter` + element. */
typedef struct {
  int32_t to_nearest;
  uint32_t counter;
} zn_rounding;

/* All kernels work on elements [begin, end) of arrays; the pointers are to element 0. */
typedef void zn_update_kernel(const zn_update_arrays *arrays, zn_states_run run, const zn_segment *segment,
                              int64_t begin, int64_t end);
/* Convert one block of 8-bit moments to fp32, and back. */
typedef void zn_block_load_kernel(float *exp_avg, float *exp_avg_sq, const zn_moments *moments, int64_t block);
typedef void zn_block_store_kernel(const zn_moments *moments, const float *exp_avg, const float *exp_avg_sq,
                                   int64_t block, zn_rounding rounding);
typedef void zn_cast_kernel(void *out, const void *in, float scale, int64_t begin, int64_t end);
typedef void zn_accumulate_kernel(float *sum, const void *first, const void *in, int64_t begin, int64_t end);
typedef void zn_split_kernel(uint16_t *weight, int16_t *remainder, const float *in, int64_t begin, int64_t end);
typedef void zn_join_kernel(float *out, const uint16_t *weight, const int16_t *remainder, int64_t begin, int64_t end);
typedef void zn_sumsq_kernel(zn_square_sum *sums, const void *in, int64_t begin, int64_t end);
typedef void zn_reduce_kernel(void *stored, const void *const *sources, int64_t count, float scale, int64_t begin,
                              int64_t end);

/* How a sum over ranks is stored: in the dtype of the sources, as fp32, or added to fp32. */
enum { ZN_REDUCE_SAME = 0, ZN_REDUCE_WIDE = 1, ZN_REDUCE_ADD = 2, ZN_REDUCES = 3 };

typedef struct {
  const char *name;
  int (*supported)(void);
  zn_update_kernel *update[ZN_RULES][1 << ZN_STATES];          /* [rule][which states there are] */
  zn_block_load_kernel *block_load;
  zn_block_store_kernel *block_store;
  zn_cast_kernel *cast[ZN_DTYPES][ZN_DTYPES];                  /* [out][in] */
  zn_accumulate_kernel *accumulate[ZN_DTYPES][ZN_DTYPES];      /* [first][in] */
  zn_split_kernel *split;
  zn_join_kernel *join;
  zn_sumsq_kernel *sumsq[ZN_DTYPES];
  zn_reduce_kernel *reduce[ZN_DTYPES][ZN_REDUCES];             /* [in][how]; nothing is wider than fp32 */
} zn_cpu_kernels;

/* The row in use. */
const zn_cpu_kernels *zn_cpu_active(void);

/* Call `part(context, begin, end)` on parts of [begin, end) from up to `threads` threads. Parts
 * meet on multiples of ZN_BLOCK_NUMEL. Returns when all are done. */
typedef void zn_part(const void *context, int64_t begin, int64_t end);
void zn_parallel(zn_part *part, const void *context, int64_t begin, int64_t end, int32_t threads);

static inline int zn_is_dtype(int32_t dtype) { return dtype >= ZN_F32 && dtype < ZN_DTYPES; }

/* ---- conversions -------------------------------------------------------------------------- */

/* Prefetch the cache lines of `nbytes` from `at` on. Past the end of an array the hint has no effect. */
#define ZN_FETCH(at, nbytes, will_write)                   \
  for (int64_t line = 0; line < (nbytes); line += 64)      \
  __builtin_prefetch((const void *)((uintptr_t)(at) + (uintptr_t)line), will_write)

ZN_INLINE float zn_canonical(float value) { return value == value ? value : zn_float(ZN_NAN_F32); }

/* a * b + c rounded once, without an fma instruction. The product is exact in fp64; the sum is rounded to odd in fp64,
 * so that the second rounding, to fp32, gives the same result as a single one. */
ZN_INLINE float zn_fmaf(float a, float b, float c) {
#ifdef __FP_FAST_FMAF
  return __builtin_fmaf(a, b, c);
#else
  const double product = (double)a * (double)b, sum = product + (double)c, part = sum - product;
  const double error = (product - (sum - part)) + ((double)c - part);
  int64_t bits;
  memcpy(&bits, &sum, sizeof bits);
  const int64_t away = (error > 0.0) - (error < 0.0); /* 0 for inf and NaN */
  bits += bits & 1 ? 0 : sum < 0.0 ? -away : away;
  double odd;
  memcpy(&odd, &bits, sizeof odd);
  return (float)odd;
#endif
}

/* Only integer and exact float operations, so that the result is the same on CPUs with and without F16C. */
ZN_INLINE float zn_from_f16(uint16_t half) {
  uint32_t magnitude = (uint32_t)(half & 0x7FFFu) << 13;
  uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
  uint32_t exponent = magnitude & (0x7C00u << 13);
  uint32_t normal = magnitude + ((127u - 15u) << 23);
  uint32_t special = normal + ((128u - 16u) << 23);
  /* A subnormal number gets an implicit leading one, which the exact subtraction removes again. */
  uint32_t subnormal = zn_bits(zn_float(normal + (1u << 23)) - zn_float(113u << 23));
  uint32_t bits = exponent == 0 ? subnormal : normal;
  bits = exponent == (0x7C00u << 13) ? special : bits;
  return zn_float(bits | sign);
}

ZN_INLINE uint16_t zn_to_f16(float value) {
  uint32_t bits = zn_bits(value);
  uint32_t magnitude = bits & ZN_MAGNITUDE_F32;
  uint32_t sign = (bits >> 16) & 0x8000u;
  uint32_t normal = (magnitude - (112u << 23) + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
  /* Adding 0.5 puts the last place of a binary16 subnormal at the last place of the sum, so that the
   * addition does the rounding. */
  uint32_t subnormal = zn_bits(zn_float(magnitude) + 0.5f) - zn_bits(0.5f);
  uint32_t half = magnitude < (113u << 23) ? subnormal : normal;
  half = (magnitude >= (143u << 23) ? 0x7C00u : half) | sign;
  return (uint16_t)(magnitude > ZN_INF_F32 ? ZN_NAN_F16 : half);
}

/* `dtype` is a constant in all uses, so only one branch is compiled. */
ZN_INLINE float zn_load(const void *in, int dtype, int64_t i) {
  if (dtype == ZN_F32) return ((const float *)in)[i];
  if (dtype == ZN_BF16) return zn_from_bf16(((const uint16_t *)in)[i]);
  return zn_from_f16(((const uint16_t *)in)[i]);
}

ZN_INLINE void zn_store(void *out, int dtype, int64_t i, float value) {
  if (dtype == ZN_F32) ((float *)out)[i] = zn_canonical(value);
  else if (dtype == ZN_BF16) ((uint16_t *)out)[i] = zn_to_bf16(value);
  else ((uint16_t *)out)[i] = zn_to_f16(value);
}

#endif /* ZN_CPU_KERNELS_H */
