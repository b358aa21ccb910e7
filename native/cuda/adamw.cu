/* Adam / AdamW over flat device ranges: zn_cpu_adamw, bit for bit. */
#include "kernels.cuh"

namespace {

/* Fills any present GPU. */
constexpr unsigned ADAMW_BLOCKS = 2048;

enum Master { IN_WEIGHT, SPLIT, BESIDE_BF16, BESIDE_F16 };

struct Arrays {
  void *weight, *master;
  float *exp_avg, *exp_avg_sq;
  const void *grad;
  float grad_scale;
};

template <int MASTER>
__device__ float load_master(const Arrays &a, int64_t i) {
  if (MASTER == IN_WEIGHT) return ((const float *)a.weight)[i];
  if (MASTER == SPLIT) return zn_join_one(((const uint16_t *)a.weight)[i], ((const int16_t *)a.master)[i]);
  return ((const float *)a.master)[i];
}

template <int MASTER>
__device__ void store_master(const Arrays &a, int64_t i, float w) {
  if (MASTER == IN_WEIGHT) {
    zn_store<ZN_F32>(a.weight, i, w);
  } else if (MASTER == SPLIT) {
    zn_split_one((uint16_t *)a.weight + i, (int16_t *)a.master + i, w);
  } else {
    zn_store<ZN_F32>(a.master, i, w);
    zn_store<MASTER == BESIDE_BF16 ? ZN_BF16 : ZN_F16>(a.weight, i, w);
  }
}

template <int MASTER, int GRAD_DTYPE>
__device__ void update(const Arrays &a, const zn_adam_segment &s, int64_t i) {
  float w = load_master<MASTER>(a, i);
  float g = __fmul_rn(zn_load<GRAD_DTYPE>(a.grad, i), a.grad_scale);
  if (s.l2 != 0.0f) g = __fadd_rn(g, __fmul_rn(s.l2, w));
  if (s.decay != 1.0f) w = __fmul_rn(w, s.decay);
  float m = a.exp_avg[i], v = a.exp_avg_sq[i];
  m = __fadd_rn(m, __fmul_rn(s.one_minus_beta1, __fsub_rn(g, m)));
  v = __fadd_rn(__fmul_rn(v, s.beta2), __fmul_rn(s.one_minus_beta2, __fmul_rn(g, g)));
  float denominator = __fadd_rn(__fdiv_rn(__fsqrt_rn(v), s.bias2_sqrt), s.eps);
  w = __fsub_rn(w, __fmul_rn(s.step_size, __fdiv_rn(m, denominator)));
  zn_store<ZN_F32>(a.exp_avg, i, m);
  zn_store<ZN_F32>(a.exp_avg_sq, i, v);
  store_master<MASTER>(a, i, w);
}

/* Every block strides through every segment: the host does not see them (they lie on the device), and
 * so a long one gets the whole GPU whatever the others are. */
template <int MASTER, int GRAD_DTYPE>
__global__ void adamw_kernel(Arrays arrays, const zn_adam_segment *segments, int64_t segment_count) {
  const int64_t stride = (int64_t)gridDim.x * blockDim.x;
  for (int64_t k = 0; k < segment_count; k++) {
    const zn_adam_segment segment = segments[k];
    if (segment.skip) continue;
    for (int64_t i = segment.begin + (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < segment.end; i += stride) {
      update<MASTER, GRAD_DTYPE>(arrays, segment, i);
    }
  }
}

template <int MASTER>
int32_t launch(const Arrays &arrays, int32_t grad_dtype, const zn_adam_segment *segments, int64_t segment_count,
               cudaStream_t stream) {
  zn_with_dtype(grad_dtype, [&](auto dtype) {
    adamw_kernel<MASTER, decltype(dtype)::value><<<ADAMW_BLOCKS, ZN_THREADS, 0, stream>>>(arrays, segments, segment_count);
  });
  return zn_launched();
}

}  // namespace

int32_t zn_cuda_adamw(void *weight, int32_t weight_dtype, void *master, int32_t master_f32, float *exp_avg,
                                float *exp_avg_sq, const void *grad, int32_t grad_dtype,
                                const zn_adam_segment *segments, int64_t segment_count, float grad_scale,
                                void *stream) {
  if (!zn_is_dtype(weight_dtype) || !zn_is_dtype(grad_dtype) || segment_count < 0) return -EINVAL;
  if ((weight_dtype == ZN_F32) != (master == nullptr)) return -EINVAL;
  if (weight_dtype == ZN_F16 && !master_f32) return -EINVAL;
  if (segment_count == 0) return 0;
  if (!weight || !exp_avg || !exp_avg_sq || !grad || !segments) return -EINVAL;
  const Arrays arrays = {weight, master, exp_avg, exp_avg_sq, grad, grad_scale};
  const cudaStream_t on = (cudaStream_t)stream;
  if (weight_dtype == ZN_F32) return launch<IN_WEIGHT>(arrays, grad_dtype, segments, segment_count, on);
  if (weight_dtype == ZN_F16) return launch<BESIDE_F16>(arrays, grad_dtype, segments, segment_count, on);
  if (master_f32) return launch<BESIDE_BF16>(arrays, grad_dtype, segments, segment_count, on);
  return launch<SPLIT>(arrays, grad_dtype, segments, segment_count, on);
}
