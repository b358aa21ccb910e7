/* Casts, gradient accumulation and the exact split on the device: the same bits as on the CPU. */
#include "kernels.cuh"

namespace {

__device__ int64_t first_item() { return (int64_t)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ int64_t item_stride() { return (int64_t)gridDim.x * blockDim.x; }

template <int OUT_DTYPE, int IN_DTYPE>
__global__ void cast_kernel(void *out, const void *in, int64_t numel, float scale) {
  for (int64_t i = first_item(); i < numel; i += item_stride()) {
    zn_store<OUT_DTYPE>(out, i, __fmul_rn(zn_load<IN_DTYPE>(in, i), scale));
  }
}

template <int FIRST_DTYPE, int IN_DTYPE>
__global__ void accumulate_kernel(float *sum, const void *first, const void *in, int64_t numel) {
  for (int64_t i = first_item(); i < numel; i += item_stride()) {
    zn_store<ZN_F32>(sum, i, __fadd_rn(zn_load<FIRST_DTYPE>(first, i), zn_load<IN_DTYPE>(in, i)));
  }
}

__global__ void split_kernel(uint16_t *weight, int16_t *remainder, const float *in, int64_t numel) {
  for (int64_t i = first_item(); i < numel; i += item_stride()) zn_split_one(weight + i, remainder + i, in[i]);
}

__global__ void join_kernel(float *out, const uint16_t *weight, const int16_t *remainder, int64_t numel) {
  for (int64_t i = first_item(); i < numel; i += item_stride()) out[i] = zn_join_one(weight[i], remainder[i]);
}

}  // namespace

int32_t zn_cuda_cast(void *out, int32_t out_dtype, const void *in, int32_t in_dtype, int64_t numel,
                               float scale, void *stream) {
  if (!zn_is_dtype(out_dtype) || !zn_is_dtype(in_dtype) || numel < 0) return -EINVAL;
  if (numel == 0) return 0;
  if (!out || !in) return -EINVAL;
  zn_with_dtype(out_dtype, [&](auto to) {
    zn_with_dtype(in_dtype, [&](auto from) {
      cast_kernel<decltype(to)::value, decltype(from)::value>
          <<<zn_grid(numel), ZN_THREADS, 0, (cudaStream_t)stream>>>(out, in, numel, scale);
    });
  });
  return zn_launched();
}

int32_t zn_cuda_accumulate(float *sum, const void *first, int32_t first_dtype, const void *in,
                                     int32_t in_dtype, int64_t numel, void *stream) {
  if (first == nullptr) {
    first = sum;
    first_dtype = ZN_F32;
  }
  if (!zn_is_dtype(first_dtype) || !zn_is_dtype(in_dtype) || numel < 0) return -EINVAL;
  if (numel == 0) return 0;
  if (!sum || !in) return -EINVAL;
  zn_with_dtype(first_dtype, [&](auto one) {
    zn_with_dtype(in_dtype, [&](auto other) {
      accumulate_kernel<decltype(one)::value, decltype(other)::value>
          <<<zn_grid(numel), ZN_THREADS, 0, (cudaStream_t)stream>>>(sum, first, in, numel);
    });
  });
  return zn_launched();
}

int32_t zn_cuda_split(void *weight_bf16, int16_t *remainder, const float *in, int64_t numel, void *stream) {
  if (numel < 0) return -EINVAL;
  if (numel == 0) return 0;
  if (!weight_bf16 || !remainder || !in) return -EINVAL;
  split_kernel<<<zn_grid(numel), ZN_THREADS, 0, (cudaStream_t)stream>>>((uint16_t *)weight_bf16, remainder, in, numel);
  return zn_launched();
}

int32_t zn_cuda_join(float *out, const void *weight_bf16, const int16_t *remainder, int64_t numel,
                               void *stream) {
  if (numel < 0) return -EINVAL;
  if (numel == 0) return 0;
  if (!out || !weight_bf16 || !remainder) return -EINVAL;
  join_kernel<<<zn_grid(numel), ZN_THREADS, 0, (cudaStream_t)stream>>>(out, (const uint16_t *)weight_bf16, remainder,
                                                                       numel);
  return zn_launched();
}
