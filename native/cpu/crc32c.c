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
/* The instruction takes 3 cycles, and one can start in each cycle, so three runs of LANE_BYTES are summed in parallel.
 * To combine them, the checksum of a run is advanced over the next run as over LANE_BYTES zeros: a linear map of 32
 * bits, kept as one table per byte. */
enum { LANES = 3, LANE_BYTES = 8192 };

static uint32_t past_lane[4][256];
static pthread_once_t past_lane_once = PTHREAD_ONCE_INIT;

__attribute__((target("sse4.2"))) static void fill_past_lane(void) {
  for (int place = 0; place < 4; place++) {
    for (uint32_t byte = 0; byte < 256; byte++) {
      uint64_t crc = byte << (8 * place);
      for (int i = 0; i < LANE_BYTES; i += 8) crc = __builtin_ia32_crc32di(crc, 0);
      past_lane[place][byte] = (uint32_t)crc;
    }
  }
}

static uint64_t move_past_lane(uint64_t crc) {
  return past_lane[0][crc & 0xFFu] ^ past_lane[1][crc >> 8 & 0xFFu] ^ past_lane[2][crc >> 16 & 0xFFu] ^
         past_lane[3][crc >> 24 & 0xFFu];
}

static uint64_t word_at(const unsigned char *in) {
  uint64_t word;
  memcpy(&word, in, sizeof word);
  return word;
}

__attribute__((target("sse4.2"))) static uint32_t crc32c_sse42(uint32_t crc, const unsigned char *in, int64_t nbytes) {
  pthread_once(&past_lane_once, fill_past_lane);
  uint64_t first = crc;
  int64_t i = 0;
  for (; i + LANES * LANE_BYTES <= nbytes; i += LANES * LANE_BYTES) {
    uint64_t second = 0, third = 0;
    for (int64_t at = i; at < i + LANE_BYTES; at += 8) {
      first = __builtin_ia32_crc32di(first, word_at(in + at));
      second = __builtin_ia32_crc32di(second, word_at(in + at + LANE_BYTES));
      third = __builtin_ia32_crc32di(third, word_at(in + at + 2 * LANE_BYTES));
    }
    first = move_past_lane(move_past_lane(first) ^ second) ^ third;
  }
  for (; i + 8 <= nbytes; i += 8) first = __builtin_ia32_crc32di(first, word_at(in + i));
  crc = (uint32_t)first;
  for (; i < nbytes; i++) crc = __builtin_ia32_crc32qi(crc, in[i]);
  return crc;
}
#endif

uint32_t zn_cpu_crc32c(uint32_t crc, const void *in, int64_t nbytes) {
  crc = ~crc;
#if defined(__x86_64__)
  /* With the scalar kernels the table is used too, so that a test can compare both. */
  if (strcmp(zn_cpu_isa(), "scalar") != 0 && __builtin_cpu_supports("sse4.2")) return ~crc32c_sse42(crc, in, nbytes);
#endif
  return ~crc32c_table(crc, in, nbytes);
}
