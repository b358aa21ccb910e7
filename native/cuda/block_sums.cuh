/* The sum of one block of 4096 elements, in the CPU's order of additions. */
#ifndef ZN_CUDA_BLOCK_SUMS_CUH
#define ZN_CUDA_BLOCK_SUMS_CUH

#include "kernels.cuh"

constexpr int ZN_LANES = 16;

/* What one CUDA block of ZN_THREADS threads shares while it works on a block of elements. */
struct zn_block_scratch {
  float staged[ZN_BLOCK_NUMEL];
  double lanes[ZN_LANES];
  int bad;
};

/* Sum a block whose element k is `load(k)`; all threads of the CUDA block call this together.
 * `load` is called once per element, by the thread that may also store it. Sixteen threads then add
 * one lane each, in element order, and thread 0 folds the lanes 0..15. The additions are serial by
 * contract; they read shared memory, so the bus to the host stays the limit. */
template <typename Load>
__device__ inline void zn_sum_block(zn_block_scratch &scratch, double *out, int64_t *nonfinite, int count, Load load) {
  if (threadIdx.x == 0) scratch.bad = 0;
  __syncthreads();
  int own_bad = 0;
  for (int k = threadIdx.x; k < count; k += ZN_THREADS) {
    const float x = load(k);
    scratch.staged[k] = x;
    own_bad += (__float_as_uint(x) & ZN_INF_F32) == ZN_INF_F32;
  }
  if (own_bad) atomicAdd(&scratch.bad, own_bad);
  __syncthreads();
  if (threadIdx.x < ZN_LANES) {
    double sum = 0.0;
    for (int k = threadIdx.x; k < count; k += ZN_LANES) {
      const double x = scratch.staged[k];
      sum = __dadd_rn(sum, __dmul_rn(x, x));
    }
    scratch.lanes[threadIdx.x] = sum;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    double sum = scratch.lanes[0];
    for (int lane = 1; lane < ZN_LANES; lane++) sum = __dadd_rn(sum, scratch.lanes[lane]);
    *out = sum == sum ? sum : __longlong_as_double(0x7FF8000000000000LL);
    *nonfinite = scratch.bad;
  }
  __syncthreads(); /* the scratch is used again for the next block */
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

#endif /* ZN_CUDA_BLOCK_SUMS_CUH */
