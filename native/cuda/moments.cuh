/* Narrow moments on the device: rounding and codes with the same bits as cpu/moments.h. */
#ifndef ZN_CUDA_MOMENTS_CUH
#define ZN_CUDA_MOMENTS_CUH

#include "kernels.cuh"

constexpr uint32_t ZN_NOISE_NEAREST = 0x80008000u;
constexpr int ZN_STEP_FINE = 19, ZN_STEP_COARSE = 20, ZN_KNEE_CODE_AVG = 63, ZN_KNEE_CODE_SQ = 127;
constexpr uint32_t ZN_ONE_F32 = 0x3F800000u;
constexpr uint32_t ZN_KNEE_AVG = (127u - 4u) << 23, ZN_KNEE_SQ = (127u - 8u) << 23;
constexpr uint32_t ZN_LEAST_AVG = ZN_KNEE_AVG - ((ZN_KNEE_CODE_AVG - 1u) << ZN_STEP_COARSE);
constexpr float ZN_LEAST_AVG_INVERSE = 65536.0f * 4096.0f / 1.25f;
constexpr uint32_t ZN_SCALE_MIN_BITS = (127u - 100u) << 23;

__device__ inline uint32_t zn_hash(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7FEB352Du;
  x ^= x >> 15;
  x *= 0x846CA68Bu;
  x ^= x >> 16;
  return x;
}

__device__ inline uint32_t zn_counter_at(const zn_moments &moments, int64_t i) {
  return (uint32_t)(moments.origin + i) + zn_hash((uint32_t)moments.step + 0x9E3779B9u);
}

__device__ inline uint32_t zn_noise_at(const zn_moments &moments, int64_t i) {
  return zn_hash(zn_counter_at(moments, i));
}

__device__ inline uint32_t zn_noise_of_master(const zn_moments &moments, int64_t i) {
  return zn_hash(~zn_counter_at(moments, i)) >> 16;
}

__device__ inline uint16_t zn_round_bf16(float value, uint32_t noise) {
  return (uint16_t)(value == value ? (__float_as_uint(value) + noise) >> 16 : 0x7FC0u);
}

__device__ inline uint32_t zn_ratio_of_code(int32_t code, int32_t knee_code, uint32_t knee) {
  const int32_t fine = code + min(code, knee_code);
  return ((uint32_t)fine << ZN_STEP_FINE) + (knee - ((uint32_t)knee_code << ZN_STEP_COARSE));
}

__device__ inline float zn_decode_avg(uint8_t code) {
  const uint32_t magnitude = code & 0x7Fu;
  const uint32_t ratio = zn_ratio_of_code((int32_t)magnitude, ZN_KNEE_CODE_AVG, ZN_KNEE_AVG);
  return __uint_as_float((magnitude == 0 ? 0u : ratio) | (uint32_t)(code & 0x80u) << 24);
}

__device__ inline float zn_decode_sq(uint8_t code) {
  return __uint_as_float(zn_ratio_of_code(code, ZN_KNEE_CODE_SQ, ZN_KNEE_SQ));
}

__device__ inline int32_t zn_code_of_ratio(uint32_t ratio, int32_t knee_code, uint32_t knee, uint32_t noise) {
  const int32_t over = (int32_t)(ratio - knee);
  const int32_t fine = max(over, over >> (ZN_STEP_COARSE - ZN_STEP_FINE));
  return ((fine + (int32_t)(noise << (ZN_STEP_FINE - 16))) >> ZN_STEP_FINE) + knee_code;
}

__device__ inline uint32_t zn_ratio(float value, float inverse) {
  return min(__float_as_uint(__fmul_rn(value, inverse)) & ZN_MAGNITUDE_F32, ZN_ONE_F32);
}

__device__ inline uint8_t zn_encode_avg(float value, float inverse, uint32_t noise) {
  const uint32_t ratio = zn_ratio(value, inverse);
  const int32_t code = zn_code_of_ratio(ratio, ZN_KNEE_CODE_AVG, ZN_KNEE_AVG, noise);
  const int32_t least = (int32_t)__fmul_rn(__uint_as_float(ratio), ZN_LEAST_AVG_INVERSE) > (int32_t)noise;
  return (uint8_t)((uint32_t)(ratio < ZN_LEAST_AVG ? least : code) | (__float_as_uint(value) >> 31) << 7);
}

__device__ inline uint8_t zn_encode_sq(float value, float inverse, uint32_t noise) {
  return (uint8_t)max(zn_code_of_ratio(zn_ratio(value, inverse), ZN_KNEE_CODE_SQ, ZN_KNEE_SQ, noise), 0);
}

__device__ inline float zn_scale_of(uint32_t magnitude_max) {
  if (magnitude_max >= ZN_INF_F32) return __uint_as_float(ZN_NAN_F32);
  return __uint_as_float(magnitude_max < ZN_SCALE_MIN_BITS ? 0u : magnitude_max);
}

__device__ inline float zn_inverse_of(float scale) {
  return scale > 0.0f ? __uint_as_float(__float_as_uint(__fdiv_rn(1.0f, scale)) + 1u) : 0.0f;
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
  ((uint8_t *)moments.exp_avg)[i] = zn_encode_avg(m, zn_inverse_of(avg_scale), noise & 0xFFFFu);
  ((uint8_t *)moments.exp_avg_sq)[i] = zn_encode_sq(v, zn_inverse_of(sq_scale), noise >> 16);
  if (threadIdx.x == 0) {
    moments.exp_avg_scale[block] = avg_scale;
    moments.exp_avg_sq_scale[block] = sq_scale;
  }
}

#endif /* ZN_CUDA_MOMENTS_CUH */
