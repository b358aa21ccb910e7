/* Block sums of squares on the device, alone or while casting: as the CPU, bit for bit. */
#include "block_sums.cuh"

namespace {

template <int DTYPE>
__global__ void sumsq_kernel(double *out, int64_t *nonfinite, const void *in, int64_t numel) {
  __shared__ zn_block_scratch scratch;
  for (int64_t block = blockIdx.x; block < zn_block_count(numel); block += gridDim.x) {
    const int64_t begin = block * ZN_BLOCK_NUMEL;
    zn_sum_block(scratch, out + block, nonfinite + block, zn_block_length(block, numel),
                 [&](int k) { return zn_load<DTYPE>(in, begin + k); });
  }
}

/* The value that is summed is the one that was stored: scaled, rounded, and widened again. */
template <int OUT_DTYPE, int IN_DTYPE>
__global__ void cast_sumsq_kernel(void *out, double *sums, int64_t *nonfinite, const void *in, int64_t numel,
                                  float scale) {
  __shared__ zn_block_scratch scratch;
  for (int64_t block = blockIdx.x; block < zn_block_count(numel); block += gridDim.x) {
    const int64_t begin = block * ZN_BLOCK_NUMEL;
    zn_sum_block(scratch, sums + block, nonfinite + block, zn_block_length(block, numel), [&](int k) {
      zn_store<OUT_DTYPE>(out, begin + k, __fmul_rn(zn_load<IN_DTYPE>(in, begin + k), scale));
      return zn_load<OUT_DTYPE>(out, begin + k);
    });
  }
}

}  // namespace

int32_t zn_cuda_block_sumsq(double *out, int64_t *nonfinite, const void *in, int32_t in_dtype, int64_t numel,
                            void *stream) {
  if (!zn_is_dtype(in_dtype) || numel < 0) return -EINVAL;
  if (numel == 0) return 0;
  if (!out || !nonfinite || !in) return -EINVAL;
  zn_with_dtype(in_dtype, [&](auto dtype) {
    sumsq_kernel<decltype(dtype)::value>
        <<<zn_block_grid(numel), ZN_THREADS, 0, (cudaStream_t)stream>>>(out, nonfinite, in, numel);
  });
  return zn_launched();
}

int32_t zn_cuda_cast_sumsq(void *out, int32_t out_dtype, double *sums, int64_t *nonfinite, const void *in,
                           int32_t in_dtype, int64_t numel, float scale, void *stream) {
  if (!zn_is_dtype(out_dtype) || !zn_is_dtype(in_dtype) || numel < 0) return -EINVAL;
  if (numel == 0) return 0;
  if (!out || !sums || !nonfinite || !in) return -EINVAL;
  zn_with_dtype(out_dtype, [&](auto to) {
    zn_with_dtype(in_dtype, [&](auto from) {
      cast_sumsq_kernel<decltype(to)::value, decltype(from)::value>
          <<<zn_block_grid(numel), ZN_THREADS, 0, (cudaStream_t)stream>>>(out, sums, nonfinite, in, numel, scale);
    });
  });
  return zn_launched();
}
