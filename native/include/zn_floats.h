/* Floats and their bits, and conversions that give the same bits on every instruction set: for the CPU and for CUDA. */
#ifndef ZN_FLOATS_H
#define ZN_FLOATS_H

#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define ZN_BOTH static inline __host__ __device__
#else
#define ZN_BOTH static inline __attribute__((always_inline))
#endif

/* A NaN's payload depends on operand order, which compilers choose; so all NaN are written as the
 * canonical one. */
#define ZN_NAN_F32 0x7FC00000u
#define ZN_NAN_BF16 0x7FC0u
#define ZN_NAN_F16 0x7E00u
#define ZN_INF_F32 0x7F800000u
#define ZN_MAGNITUDE_F32 0x7FFFFFFFu

ZN_BOTH uint32_t zn_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

ZN_BOTH float zn_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

/* Bits of `value` with NaN made canonical. */
ZN_BOTH uint32_t zn_canonical_bits(float value) { return value == value ? zn_bits(value) : ZN_NAN_F32; }

ZN_BOTH float zn_from_bf16(uint16_t half) { return zn_float((uint32_t)half << 16); }

ZN_BOTH uint16_t zn_to_bf16(float value) {
  uint32_t bits = zn_bits(value);
  uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return (uint16_t)((bits & ZN_MAGNITUDE_F32) > ZN_INF_F32 ? ZN_NAN_BF16 : rounded);
}

/* The exact split: if the magnitude is rounded half away from zero, the remainder is the low 16 bits, read as
 * a signed number. So every fp32 is restored, except NaNs other than the canonical one. */
ZN_BOTH float zn_join_one(uint16_t weight, int16_t remainder) {
  uint32_t alone = (uint32_t)weight << 16, bits = alone + (uint32_t)(int32_t)remainder;
  /* No split gives a NaN like this: somebody has set the weight to 0 or inf since, and the remainder is an older one's. */
  return zn_float((bits & ZN_MAGNITUDE_F32) > ZN_INF_F32 ? alone : bits);
}

ZN_BOTH void zn_split_one(uint16_t *weight, int16_t *remainder, float value) {
  uint32_t bits = zn_canonical_bits(value);
  *weight = (uint16_t)((bits + 0x8000u) >> 16);
  *remainder = (int16_t)(uint16_t)bits;
}

#endif /* ZN_FLOATS_H */
