/* Sums of squares whose bits do not depend on how elements are grouped or ordered: for the CPU and for CUDA.
 *
 * [Note: digits] The square of an fp32 is exact in fp64. It is written in two digits of ZN_SQUARE_DIGIT_BITS bits: a
 * multiple of 2^(48 bin) and one of 2^(48 (bin - 1)), which is rounded. Digits are integers, and integers add up
 * exactly in any order. The bin of a sum is the bin of its largest element. If two sums with different bins are added,
 * the larger bin is used, and digits below its second one are dropped. The result is the same as if all squares had
 * been rounded to the second digit of the larger bin from the start: the square of an element of a lower bin is below
 * half of a higher bin's unit. So a sum over any parts is the sum of all squares, each rounded to a multiple of
 * 2^(48 (bin - 1)) of the largest one: an error of at most 2^-47 of the largest square for each element.
 *
 * A digit is cut off by adding a number so large that the unit of the digit is its last place; the low bits of the sum
 * are then the digit. (Demmel and Nguyen, "Parallel Reproducible Summation", use bins and cuts of this kind.) */
#ifndef ZN_SQUARE_SUM_H
#define ZN_SQUARE_SUM_H

#include "zn_abi.h"
#include "zn_floats.h"

ZN_BOTH uint64_t zn_bits64(double value) {
  uint64_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

/* The bin of a sum whose largest element is `most` (finite, not negative): the smallest bin with
 * most^2 < 2^(48 (bin + 1) - 1). */
ZN_BOTH int64_t zn_square_bin(float most) {
  int64_t exponent = (int64_t)(zn_bits64((double)most) >> 52) - 1023; /* most < 2^(exponent + 1), subnormals too */
  if (most == 0) return ZN_SQUARE_BIN_MIN;
  /* Division rounds toward zero, so the dividend is made non-negative. */
  return (2 * exponent + 2 - ZN_SQUARE_DIGIT_BITS * ZN_SQUARE_BIN_MIN) / ZN_SQUARE_DIGIT_BITS + ZN_SQUARE_BIN_MIN;
}

/* 1.5 * 2^52 units of the digit of `bin`: added to a number of either sign, it cuts off that digit. */
ZN_BOTH double zn_square_anchor(int64_t bin) {
  uint64_t bits = (uint64_t)(ZN_SQUARE_DIGIT_BITS * bin + 52 + 1023) << 52 | 1ull << 51;
  double anchor;
  memcpy(&anchor, &bits, sizeof anchor);
  return anchor;
}

ZN_BOTH zn_square_sum zn_square_sum_of(int64_t tag, uint64_t high, uint64_t low) {
  zn_square_sum sum = {(int64_t)((uint64_t)tag << ZN_SQUARE_TAG_SHIFT | high), (int64_t)low};
  return sum;
}

#endif /* ZN_SQUARE_SUM_H */
