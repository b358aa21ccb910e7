/* Common declarations of the CUDA files: loads, stores and launch helpers. The arithmetic is the same as
 * in cpu/kernels.h, in the same order and with the same canonical NaN, so that both give the same bits; the
 * __f*_rn intrinsics prevent the compiler from contracting or reordering it. */
#ifndef ZN_CUDA_KERNELS_CUH
#define ZN_CUDA_KERNELS_CUH

#include <cuda_runtime.h>
#include <errno.h>

#include "../include/zn_abi.h"
#include "../include/zn_floats.h"

constexpr int ZN_THREADS = 256;
/* The most blocks of a grid; it strides over longer ranges, so that this is enough for counts above 2^31. */
constexpr int64_t ZN_GRID_MAX = 1 << 16;

static inline unsigned zn_grid(int64_t items) {
  int64_t blocks = (items + ZN_THREADS - 1) / ZN_THREADS;
  return (unsigned)(blocks < ZN_GRID_MAX ? blocks : ZN_GRID_MAX);
}

/* Combine ZN_THREADS values, one from each thread of the block; every thread gets the result. */
template <typename T, typename Combine>
__device__ inline T zn_over_block(T value, Combine combine) {
  constexpr int WARPS = ZN_THREADS / 32;
  __shared__ T warps[WARPS];
  for (int lane = 16; lane > 0; lane /= 2) value = combine(value, __shfl_xor_sync(0xFFFFFFFFu, value, lane));
  __syncthreads(); /* the values of the previous call must have been read */
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  value = warps[0];
  for (int warp = 1; warp < WARPS; warp++) value = combine(value, warps[warp]);
  return value;
}

__device__ inline uint32_t zn_block_max(uint32_t value) {
  return zn_over_block(value, [](uint32_t a, uint32_t b) { return max(a, b); });
}

static inline int32_t zn_launched() { return (int32_t)cudaGetLastError(); }

static inline bool zn_is_dtype(int32_t dtype) { return dtype >= ZN_F32 && dtype <= ZN_F16; }

__device__ inline float zn_from_f16(uint16_t half) {
  uint32_t magnitude = (uint32_t)(half & 0x7FFFu) << 13;
  uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
  uint32_t exponent = magnitude & (0x7C00u << 13);
  uint32_t bits = magnitude + ((127u - 15u) << 23);
  if (exponent == (0x7C00u << 13)) {
    bits += (128u - 16u) << 23;
  } else if (exponent == 0) {
    bits = __float_as_uint(__fsub_rn(__uint_as_float(bits + (1u << 23)), __uint_as_float(113u << 23)));
  }
  return __uint_as_float(bits | sign);
}

__device__ inline uint16_t zn_to_f16(float value) {
  uint32_t bits = __float_as_uint(value);
  uint32_t magnitude = bits & ZN_MAGNITUDE_F32;
  uint32_t sign = (bits >> 16) & 0x8000u;
  if (magnitude > ZN_INF_F32) return ZN_NAN_F16;
  if (magnitude >= (143u << 23)) return (uint16_t)(0x7C00u | sign);
  if (magnitude < (113u << 23)) {
    float shifted = __fadd_rn(__uint_as_float(magnitude), 0.5f);
    return (uint16_t)((__float_as_uint(shifted) - __float_as_uint(0.5f)) | sign);
  }
  return (uint16_t)(((magnitude - (112u << 23) + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13) | sign);
}

template <int DTYPE>
__device__ inline float zn_load(const void *in, int64_t i) {
  if (DTYPE == ZN_F32) return ((const float *)in)[i];
  if (DTYPE == ZN_BF16) return zn_from_bf16(((const uint16_t *)in)[i]);
  return zn_from_f16(((const uint16_t *)in)[i]);
}

/* Store a value; returns the value that a load would give, without a load. */
template <int DTYPE>
__device__ inline float zn_keep(void *out, int64_t i, float value) {
  if (DTYPE == ZN_F32) return ((float *)out)[i] = __uint_as_float(zn_canonical_bits(value));
  const uint16_t half = DTYPE == ZN_BF16 ? zn_to_bf16(value) : zn_to_f16(value);
  ((uint16_t *)out)[i] = half;
  return zn_load<DTYPE>(&half, 0);
}

template <int DTYPE>
__device__ inline void zn_store(void *out, int64_t i, float value) {
  zn_keep<DTYPE>(out, i, value);
}

/* Call `launch` with the dtype as a template argument: `zn_with_dtype(dtype, [&](auto constant) {...})`. */
template <int VALUE>
struct zn_constant {
  static constexpr int value = VALUE;
};

template <typename Launch>
static void zn_with_dtype(int32_t dtype, Launch launch) {
  if (dtype == ZN_F32) launch(zn_constant<ZN_F32>{});
  else if (dtype == ZN_BF16) launch(zn_constant<ZN_BF16>{});
  else launch(zn_constant<ZN_F16>{});
}

#endif /* ZN_CUDA_KERNELS_CUH */
