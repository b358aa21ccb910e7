/* Sums of squares of blocks on the device, alone or with a cast: the same bits as on the CPU. */
#include "square_sums.cuh"

namespace {

template <int DTYPE>
__global__ void sumsq_kernel(zn_square_sum *sums, const void *in, int64_t numel) {
  for (int64_t block = blockIdx.x; block < zn_block_count(numel); block += gridDim.x) {
    const int64_t begin = block * ZN_BLOCK_NUMEL;
    zn_sum_block(
        sums + block, zn_block_length(block, numel), [&](int k) { return zn_load<DTYPE>(in, begin + k); },
        [](int, float value) { return value; });
  }
}

/* The stored value is summed: scaled, rounded, and widened again. */
template <int OUT_DTYPE, int IN_DTYPE>
__global__ void cast_sumsq_kernel(void *out, zn_square_sum *sums, const void *in, int64_t numel, float scale) {
  for (int64_t block = blockIdx.x; block < zn_block_count(numel); block += gridDim.x) {
    const int64_t begin = block * ZN_BLOCK_NUMEL;
    zn_sum_block(
        sums + block, zn_block_length(block, numel), [&](int k) { return zn_load<IN_DTYPE>(in, begin + k); },
        [&](int k, float value) { return zn_keep<OUT_DTYPE>(out, begin + k, __fmul_rn(value, scale)); });
  }
}

}  // namespace

int32_t zn_cuda_block_sumsq(zn_square_sum *sums, const void *in, int32_t in_dtype, int64_t numel, void *stream) {
  if (!zn_is_dtype(in_dtype) || numel < 0) return -EINVAL;
  if (numel == 0) return 0;
  if (!sums || !in) return -EINVAL;
  zn_with_dtype(in_dtype, [&](auto dtype) {
    sumsq_kernel<decltype(dtype)::value>
        <<<zn_block_grid(numel), ZN_THREADS, 0, (cudaStream_t)stream>>>(sums, in, numel);
  });
  return zn_launched();
}

int32_t zn_cuda_cast_sumsq(void *out, int32_t out_dtype, zn_square_sum *sums, const void *in, int32_t in_dtype,
                           int64_t numel, float scale, void *stream) {
  if (!zn_is_dtype(out_dtype) || !zn_is_dtype(in_dtype) || numel < 0) return -EINVAL;
  if (numel == 0) return 0;
  if (!out || !sums || !in) return -EINVAL;
  zn_with_dtype(out_dtype, [&](auto to) {
    zn_with_dtype(in_dtype, [&](auto from) {
      cast_sumsq_kernel<decltype(to)::value, decltype(from)::value>
          <<<zn_block_grid(numel), ZN_THREADS, 0, (cudaStream_t)stream>>>(out, sums, in, numel, scale);
    });
  });
  return zn_launched();
}
