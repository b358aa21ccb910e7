/* CRC-32C (Castagnoli), reflected polynomial 0x82F63B78: the SSE4.2 instruction, or a table. */
#include <pthread.h>

#include "kernels.h"

static uint32_t table[256];
static pthread_once_t table_once = PTHREAD_ONCE_INIT;

static void fill_table(void) {
  for (uint32_t byte = 0; byte < 256; byte++) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; bit++) crc = (crc >> 1) ^ (crc & 1u ? 0x82F63B78u : 0u);
    table[byte] = crc;
  }
}

static uint32_t crc32c_table(uint32_t crc, const unsigned char *in, int64_t nbytes) {
  pthread_once(&table_once, fill_table);
  for (int64_t i = 0; i < nbytes; i++) crc = (crc >> 8) ^ table[(crc ^ in[i]) & 0xFFu];
  return crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) static uint32_t crc32c_sse42(uint32_t crc, const unsigned char *in, int64_t nbytes) {
  uint64_t wide = crc;
  int64_t i = 0;
  for (; i + 8 <= nbytes; i += 8) {
    uint64_t word;
    memcpy(&word, in + i, sizeof word);
    wide = __builtin_ia32_crc32di(wide, word);
  }
  crc = (uint32_t)wide;
  for (; i < nbytes; i++) crc = __builtin_ia32_crc32qi(crc, in[i]);
  return crc;
}
#endif

uint32_t zn_cpu_crc32c(uint32_t crc, const void *in, int64_t nbytes) {
  crc = ~crc;
#if defined(__x86_64__)
  /* The scalar choice takes the table as well, so that a test can compare the two. */
  if (strcmp(zn_cpu_isa(), "scalar") != 0 && __builtin_cpu_supports("sse4.2")) return ~crc32c_sse42(crc, in, nbytes);
#endif
  return ~crc32c_table(crc, in, nbytes);
}
