/* Block sums of squares on the device, in the CPU's order of additions. */
#include "kernels.cuh"

namespace {

constexpr int LANES = 16;

/* One CUDA block of 256 threads per block of 4096 elements. The squares are made by all threads;
 * then sixteen of them add one lane each, in element order, and thread 0 folds the lanes 0..15. The
 * additions are serial by contract; they read shared memory, so the disk or the bus stays the limit. */
template <int DTYPE>
__global__ void sumsq_kernel(double *out, int64_t *nonfinite, const void *in, int64_t numel) {
  __shared__ float staged[ZN_BLOCK_NUMEL];
  __shared__ double lanes[LANES];
  __shared__ int bad;
  const int64_t block_count = (numel + ZN_BLOCK_NUMEL - 1) / ZN_BLOCK_NUMEL;
  for (int64_t block = blockIdx.x; block < block_count; block += gridDim.x) {
    const int64_t begin = block * ZN_BLOCK_NUMEL;
    const int count = (int)(numel - begin < ZN_BLOCK_NUMEL ? numel - begin : ZN_BLOCK_NUMEL);
    if (threadIdx.x == 0) bad = 0;
    __syncthreads();
    int own_bad = 0;
    for (int k = threadIdx.x; k < count; k += ZN_THREADS) {
      const float x = zn_load<DTYPE>(in, begin + k);
      staged[k] = x;
      own_bad += (__float_as_uint(x) & ZN_INF_F32) == ZN_INF_F32;
    }
    if (own_bad) atomicAdd(&bad, own_bad);
    __syncthreads();
    if (threadIdx.x < LANES) {
      double sum = 0.0;
      for (int k = threadIdx.x; k < count; k += LANES) {
        const double x = staged[k];
        sum = __dadd_rn(sum, __dmul_rn(x, x));
      }
      lanes[threadIdx.x] = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      double sum = lanes[0];
      for (int lane = 1; lane < LANES; lane++) sum = __dadd_rn(sum, lanes[lane]);
      out[block] = sum == sum ? sum : __longlong_as_double(0x7FF8000000000000LL);
      nonfinite[block] = bad;
    }
    __syncthreads();
  }
}

}  // namespace

int32_t zn_cuda_block_sumsq(double *out, int64_t *nonfinite, const void *in, int32_t in_dtype,
                                      int64_t numel, void *stream) {
  if (!zn_is_dtype(in_dtype) || numel < 0) return -EINVAL;
  if (numel == 0) return 0;
  if (!out || !nonfinite || !in) return -EINVAL;
  const int64_t blocks = (numel + ZN_BLOCK_NUMEL - 1) / ZN_BLOCK_NUMEL;
  const unsigned grid = (unsigned)(blocks < ZN_GRID_MAX ? blocks : ZN_GRID_MAX);
  zn_with_dtype(in_dtype, [&](auto dtype) {
    sumsq_kernel<decltype(dtype)::value>
        <<<grid, ZN_THREADS, 0, (cudaStream_t)stream>>>(out, nonfinite, in, numel);
  });
  return zn_launched();
}
