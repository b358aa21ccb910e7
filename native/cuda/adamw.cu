/* Adam / AdamW over flat device ranges: zn_cpu_adamw, bit for bit. */
#include "moments.cuh"

namespace {

/* Fills any present GPU. */
constexpr unsigned ADAMW_BLOCKS = 2048;

enum Master { IN_WEIGHT, SPLIT, BESIDE_BF16, BESIDE_F16 };

struct Arrays {
  void *weight, *master;
  zn_moments moments;
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

/* One element; its moments are in registers. */
template <int MASTER, int GRAD_DTYPE>
__device__ void update(const Arrays &a, const zn_adam_segment &s, int64_t i, float &m, float &v) {
  float w = load_master<MASTER>(a, i);
  float g = __fmul_rn(zn_load<GRAD_DTYPE>(a.grad, i), a.grad_scale);
  if (s.l2 != 0.0f) g = __fadd_rn(g, __fmul_rn(s.l2, w));
  if (s.decay != 1.0f) w = __fmul_rn(w, s.decay);
  m = __fadd_rn(m, __fmul_rn(s.one_minus_beta1, __fsub_rn(g, m)));
  v = __fadd_rn(__fmul_rn(v, s.beta2), __fmul_rn(s.one_minus_beta2, __fmul_rn(g, g)));
  w = __fsub_rn(w, __fmul_rn(s.step_size, __fdiv_rn(m, __fadd_rn(__fsqrt_rn(v), s.eps))));
  m = __uint_as_float(zn_canonical_bits(m));
  v = __uint_as_float(zn_canonical_bits(v));
  store_master<MASTER>(a, i, w);
}

/* fp32 and bf16 moments. Every block strides through every segment: the host does not see them (they lie
 * on the device), and so a long one gets the whole GPU whatever the others are. */
template <int MASTER, int GRAD_DTYPE, int MOMENT_DTYPE>
__global__ void in_place_kernel(Arrays arrays, const zn_adam_segment *segments, int64_t segment_count) {
  const int64_t stride = (int64_t)gridDim.x * blockDim.x;
  void *exp_avg = arrays.moments.exp_avg, *exp_avg_sq = arrays.moments.exp_avg_sq;
  for (int64_t k = 0; k < segment_count; k++) {
    const zn_adam_segment segment = segments[k];
    if (segment.skip) continue;
    for (int64_t i = segment.begin + (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < segment.end; i += stride) {
      float m = zn_load<MOMENT_DTYPE>(exp_avg, i), v = zn_load<MOMENT_DTYPE>(exp_avg_sq, i);
      update<MASTER, GRAD_DTYPE>(arrays, segment, i, m, v);
      if (MOMENT_DTYPE == ZN_F32) {
        ((float *)exp_avg)[i] = m;
        ((float *)exp_avg_sq)[i] = v;
      } else {
        const uint32_t noise = zn_noise_at(arrays.moments, i);
        ((uint16_t *)exp_avg)[i] = zn_round_bf16(m, noise & 0xFFFFu);
        ((uint16_t *)exp_avg_sq)[i] = zn_round_bf16(v, noise >> 16);
      }
    }
  }
}

/* The first segment that ends after element `i`; `segment_count` if none does. */
__device__ int64_t segment_after(const zn_adam_segment *segments, int64_t segment_count, int64_t i) {
  int64_t low = 0, high = segment_count;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (segments[middle].end > i) high = middle;
    else low = middle + 1;
  }
  return low;
}

/* 8-bit moments: one CUDA block for one block of elements at a time, one thread for each of them. */
template <int MASTER, int GRAD_DTYPE>
__global__ void blocks_kernel(Arrays arrays, const zn_adam_segment *segments, int64_t segment_count) {
  const int64_t block_count = arrays.moments.numel / ZN_MOMENTS_BLOCK_NUMEL;
  for (int64_t block = blockIdx.x; block < block_count; block += gridDim.x) {
    const int64_t begin = block * ZN_MOMENTS_BLOCK_NUMEL, i = begin + threadIdx.x;
    int64_t k = segment_after(segments, segment_count, begin);
    while (k < segment_count && segments[k].end <= i) k++;
    const bool mine = k < segment_count && segments[k].begin <= i && !segments[k].skip;
    if (!__syncthreads_or(mine)) continue; /* not a bit changes */
    float m, v;
    zn_block_load(m, v, arrays.moments, block);
    if (mine) update<MASTER, GRAD_DTYPE>(arrays, segments[k], i, m, v);
    zn_block_store(arrays.moments, m, v, block, zn_noise_at(arrays.moments, i));
  }
}

__global__ void load_kernel(float *exp_avg, float *exp_avg_sq, zn_moments moments) {
  for (int64_t block = blockIdx.x; block < moments.numel / ZN_MOMENTS_BLOCK_NUMEL; block += gridDim.x) {
    const int64_t i = block * ZN_MOMENTS_BLOCK_NUMEL + threadIdx.x;
    zn_block_load(exp_avg[i], exp_avg_sq[i], moments, block);
  }
}

__global__ void store_kernel(zn_moments moments, const float *exp_avg, const float *exp_avg_sq) {
  for (int64_t block = blockIdx.x; block < moments.numel / ZN_MOMENTS_BLOCK_NUMEL; block += gridDim.x) {
    const int64_t i = block * ZN_MOMENTS_BLOCK_NUMEL + threadIdx.x;
    zn_block_store(moments, exp_avg[i], exp_avg_sq[i], block, ZN_NOISE_NEAREST);
  }
}

template <int MASTER>
int32_t launch(const Arrays &arrays, int32_t grad_dtype, const zn_adam_segment *segments, int64_t segment_count,
               cudaStream_t stream) {
  static_assert(ZN_THREADS == ZN_MOMENTS_BLOCK_NUMEL, "one thread for each element of a block");
  zn_with_dtype(grad_dtype, [&](auto dtype) {
    constexpr int GRAD_DTYPE = decltype(dtype)::value;
    auto kernel = blocks_kernel<MASTER, GRAD_DTYPE>;
    if (arrays.moments.kind == ZN_MOMENTS_F32) kernel = in_place_kernel<MASTER, GRAD_DTYPE, ZN_F32>;
    if (arrays.moments.kind == ZN_MOMENTS_BF16) kernel = in_place_kernel<MASTER, GRAD_DTYPE, ZN_BF16>;
    kernel<<<ADAMW_BLOCKS, ZN_THREADS, 0, stream>>>(arrays, segments, segment_count);
  });
  return zn_launched();
}

bool moments_valid(const zn_moments *moments) {
  if (moments == nullptr || moments->kind < ZN_MOMENTS_F32 || moments->kind > ZN_MOMENTS_8BIT) return false;
  if (moments->numel < 0 || moments->origin < 0) return false;
  if (moments->numel == 0) return true;
  if (!moments->exp_avg || !moments->exp_avg_sq) return false;
  if (moments->kind != ZN_MOMENTS_8BIT) return true;
  return moments->exp_avg_scale && moments->exp_avg_sq_scale && moments->numel % ZN_MOMENTS_BLOCK_NUMEL == 0 &&
         moments->origin % ZN_MOMENTS_BLOCK_NUMEL == 0;
}

}  // namespace

int32_t zn_cuda_adamw(void *weight, int32_t weight_dtype, void *master, int32_t master_f32, const zn_moments *moments,
                      const void *grad, int32_t grad_dtype, const zn_adam_segment *segments, int64_t segment_count,
                      float grad_scale, void *stream) {
  if (!zn_is_dtype(weight_dtype) || !zn_is_dtype(grad_dtype) || segment_count < 0) return -EINVAL;
  if ((weight_dtype == ZN_F32) != (master == nullptr)) return -EINVAL;
  if (weight_dtype == ZN_F16 && !master_f32) return -EINVAL;
  if (!moments_valid(moments)) return -EINVAL;
  if (segment_count == 0 || moments->numel == 0) return 0;
  if (!weight || !grad || !segments) return -EINVAL;
  const Arrays arrays = {weight, master, *moments, grad, grad_scale};
  const cudaStream_t on = (cudaStream_t)stream;
  if (weight_dtype == ZN_F32) return launch<IN_WEIGHT>(arrays, grad_dtype, segments, segment_count, on);
  if (weight_dtype == ZN_F16) return launch<BESIDE_F16>(arrays, grad_dtype, segments, segment_count, on);
  if (master_f32) return launch<BESIDE_BF16>(arrays, grad_dtype, segments, segment_count, on);
  return launch<SPLIT>(arrays, grad_dtype, segments, segment_count, on);
}

int32_t zn_cuda_moments_load(float *exp_avg, float *exp_avg_sq, const zn_moments *moments, void *stream) {
  if (!moments_valid(moments)) return -EINVAL;
  if (moments->numel == 0) return 0;
  if (!exp_avg || !exp_avg_sq) return -EINVAL;
  if (moments->kind == ZN_MOMENTS_8BIT) {
    load_kernel<<<zn_grid(moments->numel), ZN_THREADS, 0, (cudaStream_t)stream>>>(exp_avg, exp_avg_sq, *moments);
    return zn_launched();
  }
  const int32_t dtype = moments->kind == ZN_MOMENTS_BF16 ? ZN_BF16 : ZN_F32;
  const int32_t status = zn_cuda_cast(exp_avg, ZN_F32, moments->exp_avg, dtype, moments->numel, 1.0f, stream);
  if (status != 0) return status;
  return zn_cuda_cast(exp_avg_sq, ZN_F32, moments->exp_avg_sq, dtype, moments->numel, 1.0f, stream);
}

int32_t zn_cuda_moments_store(const zn_moments *moments, const float *exp_avg, const float *exp_avg_sq, void *stream) {
  if (!moments_valid(moments)) return -EINVAL;
  if (moments->numel == 0) return 0;
  if (!exp_avg || !exp_avg_sq) return -EINVAL;
  if (moments->kind == ZN_MOMENTS_8BIT) {
    store_kernel<<<zn_grid(moments->numel), ZN_THREADS, 0, (cudaStream_t)stream>>>(*moments, exp_avg, exp_avg_sq);
    return zn_launched();
  }
  const int32_t dtype = moments->kind == ZN_MOMENTS_BF16 ? ZN_BF16 : ZN_F32;
  const int32_t status = zn_cuda_cast(moments->exp_avg, dtype, exp_avg, ZN_F32, moments->numel, 1.0f, stream);
  if (status != 0) return status;
  return zn_cuda_cast(moments->exp_avg_sq, dtype, exp_avg_sq, ZN_F32, moments->numel, 1.0f, stream);
}
