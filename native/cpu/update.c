/* The exported updates: check the arguments, walk blocks and segments, widen and round 8-bit moments. */
#include <errno.h>

#include "../include/zn_moments.h"
#include "kernels.h"

typedef struct {
  const zn_cpu_kernels *kernels;
  zn_update_kernel *update;
  zn_update_arrays arrays;
  void *states[ZN_STATES];   /* states, or NULL */
  const zn_moments *moments; /* for Adam; else NULL */
  const zn_segment *segments;
  int64_t segment_count;
} zn_update_call;

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* Update elements [begin, end), with fp32 or bf16 states, in place. */
static void update_in_place(const zn_update_call *call, int64_t begin, int64_t end) {
  const zn_moments *moments = call->moments;
  const int32_t bf16 = moments != NULL && moments->kind == ZN_MOMENTS_BF16;
  const int32_t rounds = bf16 || call->arrays.scheme == ZN_MASTER_ROUNDED;
  for (int64_t k = 0; k < call->segment_count; k++) {
    const zn_segment *segment = &call->segments[k];
    int64_t from = larger(segment->begin, begin), to = smaller(segment->end, end);
    if (segment->skip || from >= to) continue;
    zn_states_run run = {.bf16 = bf16, .counter = rounds ? zn_counter(moments->origin + from, moments->step) : 0};
    for (int p = 0; p < ZN_STATES; p++) run.states[p] = (char *)call->states[p] + from * (bf16 ? 2 : 4);
    call->update(&call->arrays, run, segment, from, to);
  }
}

/* Update one block of 8-bit moments, with the segments from `segment` on that overlap it. */
static void update_block(const zn_update_call *call, const zn_segment *segment, int64_t begin) {
  float exp_avg[ZN_MOMENTS_BLOCK_NUMEL], exp_avg_sq[ZN_MOMENTS_BLOCK_NUMEL];
  const zn_moments *moments = call->moments;
  const zn_segment *last = call->segments + call->segment_count;
  int64_t end = begin + ZN_MOMENTS_BLOCK_NUMEL, block = begin / ZN_MOMENTS_BLOCK_NUMEL;
  int loaded = 0;
  for (; segment < last && segment->begin < end; segment++) {
    int64_t from = larger(segment->begin, begin), to = smaller(segment->end, end);
    if (segment->skip || from >= to) continue;
    if (!loaded) call->kernels->block_load(exp_avg, exp_avg_sq, moments, block);
    loaded = 1;
    zn_states_run run = {
        .states = {exp_avg + (from - begin), exp_avg_sq + (from - begin)},
        .counter = zn_counter(moments->origin + from, moments->step),
    };
    call->update(&call->arrays, run, segment, from, to);
  }
  if (!loaded) return; /* no segment, or only skipped ones, overlap the block: no bit may change */
  zn_rounding rounding = {0, zn_counter(moments->origin + begin, moments->step)};
  call->kernels->block_store(moments, exp_avg, exp_avg_sq, block, rounding);
}

static void update_part(const void *context, int64_t begin, int64_t end) {
  const zn_update_call *call = context;
  if (call->moments == NULL || call->moments->kind != ZN_MOMENTS_8BIT) {
    update_in_place(call, begin, end);
    return;
  }
  const zn_segment *segment = call->segments, *last = call->segments + call->segment_count;
  for (int64_t i = begin; i < end; i += ZN_MOMENTS_BLOCK_NUMEL) {
    while (segment < last && segment->end <= i) segment++;
    update_block(call, segment, i);
  }
}

/* How the master is stored, or -1 when the arguments fit no scheme. */
static int master_scheme(int32_t rule, int32_t weight_dtype, const void *master, int32_t master_f32) {
  if (weight_dtype == ZN_F32) return master == NULL ? ZN_MASTER_IN_WEIGHT : -1;
  if (master == NULL) return rule == ZN_ADAM && weight_dtype == ZN_BF16 ? ZN_MASTER_ROUNDED : -1;
  if (weight_dtype == ZN_BF16) return master_f32 ? ZN_MASTER_BESIDE_BF16 : ZN_MASTER_SPLIT;
  return weight_dtype == ZN_F16 && master_f32 ? ZN_MASTER_BESIDE_F16 : -1;
}

static int moments_valid(const zn_moments *moments) {
  if (moments == NULL || moments->kind < ZN_MOMENTS_F32 || moments->kind > ZN_MOMENTS_8BIT) return 0;
  if (moments->numel < 0 || moments->origin < 0) return 0;
  if (moments->numel == 0) return 1;
  if (!moments->exp_avg || !moments->exp_avg_sq) return 0;
  if (moments->kind != ZN_MOMENTS_8BIT) return 1;
  return moments->exp_avg_scale && moments->exp_avg_sq_scale && moments->numel % ZN_MOMENTS_BLOCK_NUMEL == 0 &&
         moments->origin % ZN_MOMENTS_BLOCK_NUMEL == 0;
}

static int segments_valid(const zn_segment *segments, int64_t segment_count, int64_t numel) {
  int64_t position = 0;
  for (int64_t k = 0; k < segment_count; k++) {
    if (segments[k].begin < position || segments[k].begin > segments[k].end) return 0;
    position = segments[k].end;
  }
  return position <= numel;
}

/* Check and fill in the rest of `call`, and run it; `present` has a bit for each state that is not NULL. */
static int32_t update(zn_update_call *call, int32_t rule, int present, int32_t weight_dtype, int32_t master_f32,
                      int64_t numel, int32_t threads) {
  const zn_update_arrays *a = &call->arrays;
  call->kernels = zn_cpu_active();
  call->update = call->kernels->update[rule][present];
  call->arrays.scheme = master_scheme(rule, weight_dtype, a->master, master_f32);
  if (a->scheme < 0 || !zn_is_dtype(a->grad_dtype) || !call->update) return -EINVAL;
  if (call->segment_count < 0 || threads < 1) return -EINVAL;
  if (call->segment_count == 0 || numel == 0) return 0;
  if (!a->weight || !a->grad || !call->segments) return -EINVAL;
  if (!segments_valid(call->segments, call->segment_count, numel)) return -EINVAL;
  int64_t begin = call->segments[0].begin, end = call->segments[call->segment_count - 1].end;
  if (call->moments != NULL && call->moments->kind == ZN_MOMENTS_8BIT) {
    begin -= begin % ZN_MOMENTS_BLOCK_NUMEL;
    end += (ZN_MOMENTS_BLOCK_NUMEL - end % ZN_MOMENTS_BLOCK_NUMEL) % ZN_MOMENTS_BLOCK_NUMEL;
  }
  zn_parallel(update_part, call, begin, end, threads);
  return 0;
}

int32_t zn_cpu_adamw(void *weight, int32_t weight_dtype, void *master, int32_t master_f32, const zn_moments *moments,
                     const void *grad, int32_t grad_dtype, const zn_segment *segments, int64_t segment_count,
                     float grad_scale, int32_t threads) {
  if (!moments_valid(moments)) return -EINVAL;
  zn_update_call call = {
      .arrays = {0, grad_dtype, weight, master, grad, grad_scale},
      .states = {moments->exp_avg, moments->exp_avg_sq},
      .moments = moments,
      .segments = segments,
      .segment_count = segment_count,
  };
  return update(&call, ZN_ADAM, 3, weight_dtype, master_f32, moments->numel, threads);
}

int32_t zn_cpu_update(int32_t rule, void *weight, int32_t weight_dtype, void *master, int32_t master_f32,
                      float *const *states, const void *grad, int32_t grad_dtype, int64_t numel,
                      const zn_segment *segments, int64_t segment_count, float grad_scale, int32_t threads) {
  if (rule <= ZN_ADAM || rule >= ZN_RULES || !states || numel < 0) return -EINVAL;
  zn_update_call call = {
      .arrays = {0, grad_dtype, weight, master, grad, grad_scale},
      .states = {states[0], states[1], states[2]},
      .segments = segments,
      .segment_count = segment_count,
  };
  int present = (states[0] != NULL) | (states[1] != NULL) << 1 | (states[2] != NULL) << 2;
  return update(&call, rule, present, weight_dtype, master_f32, numel, threads);
}

/* ---- moments alone ------------------------------------------------------------------------ */

typedef struct {
  zn_block_load_kernel *load;
  zn_block_store_kernel *store;
  const zn_moments *moments;
  float *exp_avg, *exp_avg_sq;
} zn_moments_call;

static void load_part(const void *context, int64_t begin, int64_t end) {
  const zn_moments_call *call = context;
  for (int64_t i = begin; i < end; i += ZN_MOMENTS_BLOCK_NUMEL) {
    call->load(call->exp_avg + i, call->exp_avg_sq + i, call->moments, i / ZN_MOMENTS_BLOCK_NUMEL);
  }
}

static void store_part(const void *context, int64_t begin, int64_t end) {
  const zn_moments_call *call = context;
  const zn_rounding to_nearest = {1, 0};
  for (int64_t i = begin; i < end; i += ZN_MOMENTS_BLOCK_NUMEL) {
    int64_t block = i / ZN_MOMENTS_BLOCK_NUMEL;
    call->store(call->moments, call->exp_avg + i, call->exp_avg_sq + i, block, to_nearest);
  }
}

int32_t zn_cpu_moments_load(float *exp_avg, float *exp_avg_sq, const zn_moments *moments, int32_t threads) {
  if (!moments_valid(moments) || threads < 1) return -EINVAL;
  int64_t numel = moments->numel;
  if (numel == 0) return 0;
  if (!exp_avg || !exp_avg_sq) return -EINVAL;
  if (moments->kind == ZN_MOMENTS_8BIT) {
    zn_moments_call call = {zn_cpu_active()->block_load, NULL, moments, exp_avg, exp_avg_sq};
    zn_parallel(load_part, &call, 0, numel, threads);
    return 0;
  }
  int32_t dtype = moments->kind == ZN_MOMENTS_BF16 ? ZN_BF16 : ZN_F32;
  int32_t status = zn_cpu_cast(exp_avg, ZN_F32, moments->exp_avg, dtype, numel, 1.0f, threads);
  return status != 0 ? status : zn_cpu_cast(exp_avg_sq, ZN_F32, moments->exp_avg_sq, dtype, numel, 1.0f, threads);
}

int32_t zn_cpu_moments_store(const zn_moments *moments, const float *exp_avg, const float *exp_avg_sq,
                             int32_t threads) {
  if (!moments_valid(moments) || threads < 1) return -EINVAL;
  int64_t numel = moments->numel;
  if (numel == 0) return 0;
  if (!exp_avg || !exp_avg_sq) return -EINVAL;
  if (moments->kind == ZN_MOMENTS_8BIT) {
    zn_moments_call call = {NULL, zn_cpu_active()->block_store, moments, (float *)exp_avg, (float *)exp_avg_sq};
    zn_parallel(store_part, &call, 0, numel, threads);
    return 0;
  }
  int32_t dtype = moments->kind == ZN_MOMENTS_BF16 ? ZN_BF16 : ZN_F32;
  int32_t status = zn_cpu_cast(moments->exp_avg, dtype, exp_avg, ZN_F32, numel, 1.0f, threads);
  return status != 0 ? status : zn_cpu_cast(moments->exp_avg_sq, dtype, exp_avg_sq, ZN_F32, numel, 1.0f, threads);
}
