/* Common to the whole library: the hash of the sources, and the text of a status. */
#include <stdint.h>
#include <string.h>

#include "zn_abi.h"

#ifndef ZN_SOURCE_HASH
#define ZN_SOURCE_HASH "unknown"
#endif

const char *zn_source_hash(void) { return ZN_SOURCE_HASH; }

const char *zn_strerror(int32_t status) {
  if (status > 0) return "a CUDA error; the CUDA library has its text";
  if (status == INT32_MIN) return "not a status";
  return strerror(-status);
}
