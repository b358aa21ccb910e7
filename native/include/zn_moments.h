/* Narrow moments, one element at a time: bf16 and 8-bit codes as described at zn_moments. Only integer and
 * single fp32 operations, so that every instruction set gives the same bits: for the CPU and for CUDA. */
#ifndef ZN_MOMENTS_H
#define ZN_MOMENTS_H

#include "zn_abi.h"
#include "zn_floats.h"

/* ---- rounding ----------------------------------------------------------------------------- */

/* A bijection of 32-bit integers; each output bit depends on every input bit. The low half is used to round
 * exp_avg, the high half for exp_avg_sq. */
ZN_BOTH uint32_t zn_hash(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7FEB352Du;
  x ^= x >> 15;
  x *= 0x846CA68Bu;
  x ^= x >> 16;
  return x;
}

/* The number to hash for element `coordinate` of a space in `step`; the next element has the next number. */
ZN_BOTH uint32_t zn_counter(int64_t coordinate, int64_t step) {
  return (uint32_t)coordinate + zn_hash((uint32_t)step + 0x9E3779B9u);
}

/* 16 bits to round a master to its weight. The complement of the counter is hashed, so that an element's weight and
 * moments are rounded with different hashes. */
ZN_BOTH uint32_t zn_noise_of_master(uint32_t counter) { return zn_hash(~counter) >> 16; }

/* Used in place of a hash: half a unit for both moments, which rounds to nearest. */
#define ZN_NOISE_NEAREST 0x80008000u

/* `noise` is in units of 2^-16 of the last place. */
ZN_BOTH uint16_t zn_round_bf16(float value, uint32_t noise) {
  return (uint16_t)(value == value ? (zn_bits(value) + noise) >> 16 : ZN_NAN_BF16);
}

/* ---- 8-bit codes -------------------------------------------------------------------------- */

/* Above the knee, codes are steps of 2^19 in the bits of the ratio; below it, steps of 2^20. */
enum { ZN_STEP_FINE = 19, ZN_STEP_COARSE = 20, ZN_KNEE_CODE_AVG = 63, ZN_KNEE_CODE_SQ = 127 };
#define ZN_ONE_F32 0x3F800000u
#define ZN_KNEE_AVG ((127u - 4u) << 23)
#define ZN_KNEE_SQ ((127u - 8u) << 23)
/* The smallest ratio other than 0 that has a code, and 2^16 / its value. */
#define ZN_LEAST_AVG (ZN_KNEE_AVG - ((ZN_KNEE_CODE_AVG - 1u) << ZN_STEP_COARSE))
#define ZN_LEAST_AVG_INVERSE (65536.0f * 4096.0f / 1.25f)

/* Below the knee a code counts twice: c + min(c, knee) is linear in the bits. */
ZN_BOTH uint32_t zn_ratio_of_code(int32_t code, int32_t knee_code, uint32_t knee) {
  int32_t fine = code + (code < knee_code ? code : knee_code);
  return ((uint32_t)fine << ZN_STEP_FINE) + (knee - ((uint32_t)knee_code << ZN_STEP_COARSE));
}

ZN_BOTH float zn_decode_avg(uint8_t code) {
  uint32_t magnitude = code & 0x7Fu;
  uint32_t ratio = zn_ratio_of_code((int32_t)magnitude, ZN_KNEE_CODE_AVG, ZN_KNEE_AVG);
  return zn_float((magnitude == 0 ? 0u : ratio) | (uint32_t)(code & 0x80u) << 24);
}

ZN_BOTH float zn_decode_sq(uint8_t code) {
  return zn_float(zn_ratio_of_code(code, ZN_KNEE_CODE_SQ, ZN_KNEE_SQ));
}

/* The code of a ratio, rounded by `noise`, in units of 2^-16 of a code. Between two codes the bits of a float
 * are linear in its value, so that random rounding keeps the mean. */
ZN_BOTH int32_t zn_code_of_ratio(uint32_t ratio, int32_t knee_code, uint32_t knee, uint32_t noise) {
  int32_t over = (int32_t)(ratio - knee), half = over >> (ZN_STEP_COARSE - ZN_STEP_FINE);
  int32_t fine = over > half ? over : half; /* `half` below the knee */
  return ((fine + (int32_t)(noise << (ZN_STEP_FINE - 16))) >> ZN_STEP_FINE) + knee_code;
}

/* Bits of |value| * inverse, at most 1. */
ZN_BOTH uint32_t zn_ratio(float value, float inverse) {
  int32_t bits = (int32_t)(zn_bits(value * inverse) & ZN_MAGNITUDE_F32);
  return (uint32_t)(bits < (int32_t)ZN_ONE_F32 ? bits : (int32_t)ZN_ONE_F32);
}

ZN_BOTH uint32_t zn_encode_avg(float value, float inverse, uint32_t noise) {
  uint32_t ratio = zn_ratio(value, inverse);
  int32_t code = zn_code_of_ratio(ratio, ZN_KNEE_CODE_AVG, ZN_KNEE_AVG, noise);
  int32_t least = (int32_t)(zn_float(ratio) * ZN_LEAST_AVG_INVERSE) > (int32_t)noise;
  return (uint32_t)((int32_t)ratio < (int32_t)ZN_LEAST_AVG ? least : code) | (zn_bits(value) >> 31) << 7;
}

ZN_BOTH uint32_t zn_encode_sq(float value, float inverse, uint32_t noise) {
  int32_t code = zn_code_of_ratio(zn_ratio(value, inverse), ZN_KNEE_CODE_SQ, ZN_KNEE_SQ, noise);
  return (uint32_t)(code > 0 ? code : 0);
}

/* ---- scales ------------------------------------------------------------------------------- */

/* Below 2^-100 the products of scale and codes would not be normal numbers any more. */
#define ZN_SCALE_MIN_BITS ((127u - 100u) << 23)

/* The scale of a block whose largest magnitude has these bits. */
ZN_BOTH float zn_scale_of(uint32_t magnitude_max) {
  if (magnitude_max >= ZN_INF_F32) return zn_float(ZN_NAN_F32);
  return zn_float(magnitude_max < ZN_SCALE_MIN_BITS ? 0u : magnitude_max);
}

/* The factor from a magnitude to its ratio: one unit in the last place above 1 / scale, so that the largest
 * magnitude has the ratio 1 in spite of rounding, and the block keeps its scale when it is stored again. It is
 * 0 for blocks whose codes are all 0: with a scale of 0, or of NaN, which makes every value NaN. */
ZN_BOTH float zn_inverse_of(float scale) {
  return scale > 0.0f ? zn_float(zn_bits(1.0f / scale) + 1u) : 0.0f;
}

#endif /* ZN_MOMENTS_H */
