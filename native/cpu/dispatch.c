/* One table row of kernels per instruction set; the best one for this CPU is chosen at first use. */
#include <errno.h>
#include <stdatomic.h>

#include "../include/zn_moments.h"
#include "kernels.h"

/* Elements per fixed-width loop (whole cache lines of every array), and the prefetch distance in elements. */
enum { ZN_TILE = 64, ZN_PREFETCH_NUMEL = 256 };

#define ZN_JOIN_NAME(name, isa) name##_##isa
#define ZN_EXPAND_NAME(name, isa) ZN_JOIN_NAME(name, isa)
#define ZN_NAME(name) ZN_EXPAND_NAME(name, ZN_ISA)

/* clang ignores these pragmas, so it gets the scalar row only. On ARM that row is NEON, which is the baseline there. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define ZN_X86_ROWS 1
#else
#define ZN_X86_ROWS 0
#endif

#define ZN_ISA scalar
#define ZN_FMA(a, b, c) ((a) * (b) + (c))
#define ZN_FMAF zn_fmaf
#include "update_body.inc"
#include "moments_body.inc"
#include "cast_body.inc"
#include "square_sums_body.inc"
#include "ranks_body.inc"
#undef ZN_ISA
#undef ZN_FMA
#undef ZN_FMAF

#if ZN_X86_ROWS
#define ZN_FMA __builtin_fma
#define ZN_FMAF __builtin_fmaf
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define ZN_ISA avx2
#include "update_body.inc"
#include "moments_body.inc"
#include "cast_body.inc"
#include "square_sums_body.inc"
#include "ranks_body.inc"
#undef ZN_ISA
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#define ZN_ISA avx512
#include "update_body.inc"
#include "moments_body.inc"
#include "cast_body.inc"
#include "square_sums_body.inc"
#include "ranks_body.inc"
#undef ZN_ISA
#pragma GCC pop_options
#endif

static int supported_scalar(void) { return 1; }

#if ZN_X86_ROWS
static int supported_avx2(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

static int supported_avx512(void) {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

/* Columns in the order of the dtype constants: f32, bf16, f16. */
#define ZN_COLUMNS(kernel, isa) {kernel##_f32_##isa, kernel##_bf16_##isa, kernel##_f16_##isa}
/* [rule][bit mask of the states]; an empty entry: the rule does not allow these states. */
#define ZN_UPDATES(isa)                                                                                   \
  {[ZN_ADAM][3] = update_adam_##isa,                 [ZN_LION][1] = update_lion_##isa,                    \
   [ZN_SGD][0] = update_sgd_##isa,                   [ZN_SGD][1] = update_sgd_momentum_##isa,             \
   [ZN_ADAGRAD][1] = update_adagrad_##isa,           [ZN_RMSPROP][1] = update_rmsprop_##isa,              \
   [ZN_RMSPROP][3] = update_rmsprop_momentum_##isa,  [ZN_RMSPROP][5] = update_rmsprop_centered_##isa,     \
   [ZN_RMSPROP][7] = update_rmsprop_both_##isa}
#define ZN_ROW(isa)                                                                                       \
  {.name = #isa,                                                                                          \
   .supported = supported_##isa,                                                                          \
   .update = ZN_UPDATES(isa),                                                                             \
   .block_load = block_load_##isa,                                                                        \
   .block_store = block_store_##isa,                                                                      \
   .cast = {ZN_COLUMNS(cast_f32, isa), ZN_COLUMNS(cast_bf16, isa), ZN_COLUMNS(cast_f16, isa)},            \
   .accumulate = {ZN_COLUMNS(accumulate_f32, isa), ZN_COLUMNS(accumulate_bf16, isa),                      \
                  ZN_COLUMNS(accumulate_f16, isa)},                                                       \
   .split = split_##isa,                                                                                  \
   .join = join_##isa,                                                                                    \
   .sumsq = ZN_COLUMNS(sumsq, isa),                                                                       \
   .reduce = {{reduce_f32_same_##isa, NULL, reduce_f32_add_##isa},                                        \
              {reduce_bf16_same_##isa, reduce_bf16_wide_##isa, reduce_bf16_add_##isa},                    \
              {reduce_f16_same_##isa, reduce_f16_wide_##isa, reduce_f16_add_##isa}}}

/* Best first. */
static const zn_cpu_kernels rows[] = {
#if ZN_X86_ROWS
    ZN_ROW(avx512),
    ZN_ROW(avx2),
#endif
    ZN_ROW(scalar),
};
enum { ROW_COUNT = sizeof rows / sizeof rows[0] };

/* All threads that race to set this write the same pointer. */
static _Atomic(const zn_cpu_kernels *) active;

static const zn_cpu_kernels *best_row(void) {
  int row = 0;
  while (!rows[row].supported()) row++; /* the scalar row is always supported */
  return &rows[row];
}

const zn_cpu_kernels *zn_cpu_active(void) {
  const zn_cpu_kernels *kernels = atomic_load_explicit(&active, memory_order_acquire);
  if (kernels == NULL) {
    kernels = best_row();
    atomic_store_explicit(&active, kernels, memory_order_release);
  }
  return kernels;
}

const char *zn_cpu_isa(void) { return zn_cpu_active()->name; }

int32_t zn_cpu_isa_select(const char *name) {
  if (name == NULL) return -EINVAL;
  if (strcmp(name, "best") == 0) {
    atomic_store_explicit(&active, best_row(), memory_order_release);
    return 0;
  }
  for (int row = 0; row < ROW_COUNT; row++) {
    if (strcmp(rows[row].name, name) != 0) continue;
    if (!rows[row].supported()) return -ENOTSUP;
    atomic_store_explicit(&active, &rows[row], memory_order_release);
    return 0;
  }
  /* Known names that were not compiled in. */
  return strcmp(name, "avx2") == 0 || strcmp(name, "avx512") == 0 ? -ENOTSUP : -EINVAL;
}
