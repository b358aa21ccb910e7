/* Blocks of 8-bit moments on the device, and the numbers with which an element is rounded. */
#ifndef ZN_CUDA_MOMENTS_CUH
#define ZN_CUDA_MOMENTS_CUH

#include "../include/zn_moments.h"
#include "kernels.cuh"

__device__ inline uint32_t zn_counter_at(const zn_moments &moments, int64_t i) {
  return zn_counter(moments.origin + i, moments.step);
}

__device__ inline uint32_t zn_noise_at(const zn_moments &moments, int64_t i) {
  return zn_hash(zn_counter_at(moments, i));
}

/* Each of 256 threads loads one element of a block of 8-bit moments. A NaN from a product has the device's
 * payload, hence the canonical bits. */
__device__ inline void zn_block_load(float &m, float &v, const zn_moments &moments, int64_t block) {
  const int64_t i = block * ZN_MOMENTS_BLOCK_NUMEL + threadIdx.x;
  const uint8_t avg = ((const uint8_t *)moments.exp_avg)[i], sq = ((const uint8_t *)moments.exp_avg_sq)[i];
  m = __uint_as_float(zn_canonical_bits(__fmul_rn(zn_decode_avg(avg), moments.exp_avg_scale[block])));
  v = __uint_as_float(zn_canonical_bits(__fmul_rn(zn_decode_sq(sq), moments.exp_avg_sq_scale[block])));
}

__device__ inline void zn_block_store(const zn_moments &moments, float m, float v, int64_t block, uint32_t noise) {
  const int64_t i = block * ZN_MOMENTS_BLOCK_NUMEL + threadIdx.x;
  const float avg_scale = zn_scale_of(zn_block_max(__float_as_uint(m) & ZN_MAGNITUDE_F32));
  const float sq_scale = zn_scale_of(zn_block_max(__float_as_uint(v) & ZN_MAGNITUDE_F32));
  ((uint8_t *)moments.exp_avg)[i] = (uint8_t)zn_encode_avg(m, zn_inverse_of(avg_scale), noise & 0xFFFFu);
  ((uint8_t *)moments.exp_avg_sq)[i] = (uint8_t)zn_encode_sq(v, zn_inverse_of(sq_scale), noise >> 16);
  if (threadIdx.x == 0) {
    moments.exp_avg_scale[block] = avg_scale;
    moments.exp_avg_sq_scale[block] = sq_scale;
  }
}

#endif /* ZN_CUDA_MOMENTS_CUH */
