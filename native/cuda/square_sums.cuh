/* The sum of squares of one block of 4096 elements: see the note in zn_square_sum.h. */
#ifndef ZN_CUDA_SQUARE_SUMS_CUH
#define ZN_CUDA_SQUARE_SUMS_CUH

#include "../include/zn_square_sum.h"
#include "kernels.cuh"

/* Sum a block whose element k is `take(k, load(k))`; all threads of the CUDA block call this together. Both functions
 * are called once per element, by one thread. `take` may store it: a thread starts all loads before its first store. */
template <typename Load, typename Take>
__device__ inline void zn_sum_block(zn_square_sum *out, int count, Load load, Take take) {
  constexpr int OWN = ZN_BLOCK_NUMEL / ZN_THREADS;
  const auto add = [](uint64_t a, uint64_t b) { return a + b; };
  float own[OWN];
  uint32_t own_most = 0;
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    const int k = threadIdx.x + i * ZN_THREADS;
    own[i] = k < count ? load(k) : 0.0f; /* a zero changes no digit */
  }
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    const int k = threadIdx.x + i * ZN_THREADS;
    if (k < count) own[i] = take(k, own[i]);
    own_most = max(own_most, __float_as_uint(own[i]) & ZN_MAGNITUDE_F32);
  }
  const uint32_t most = zn_block_max(own_most);
  uint64_t high = 0, low = 0;
  int64_t tag = ZN_SQUARE_NONFINITE;
  if (most < ZN_INF_F32) {
    const int64_t bin = zn_square_bin(__uint_as_float(most));
    const double above = zn_square_anchor(bin), below = zn_square_anchor(bin - 1);
    tag = bin - ZN_SQUARE_BIN_MIN;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      const double x = own[i], square = __dmul_rn(x, x), cut = __dadd_rn(square, above);
      const double rest = __dsub_rn(square, __dsub_rn(cut, above));
      high += zn_bits64(cut) - zn_bits64(above);
      low += zn_bits64(__dadd_rn(rest, below)) - zn_bits64(below);
    }
  } else {
    for (int i = 0; i < OWN; i++) high += (__float_as_uint(own[i]) & ZN_INF_F32) == ZN_INF_F32;
  }
  high = zn_over_block(high, add);
  low = zn_over_block(low, add);
  if (threadIdx.x == 0) *out = zn_square_sum_of(tag, high, low);
}

__host__ __device__ inline int64_t zn_block_count(int64_t numel) { return (numel + ZN_BLOCK_NUMEL - 1) / ZN_BLOCK_NUMEL; }

/* One CUDA block per block of elements, striding over longer ranges. */
static inline unsigned zn_block_grid(int64_t numel) {
  const int64_t blocks = zn_block_count(numel);
  return (unsigned)(blocks < ZN_GRID_MAX ? blocks : ZN_GRID_MAX);
}

__device__ inline int zn_block_length(int64_t block, int64_t numel) {
  const int64_t rest = numel - block * ZN_BLOCK_NUMEL;
  return (int)(rest < ZN_BLOCK_NUMEL ? rest : ZN_BLOCK_NUMEL);
}

#endif /* ZN_CUDA_SQUARE_SUMS_CUH */
