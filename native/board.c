/* Numbers that processes publish to each other in shared memory. */
#include <stdint.h>

#include "zn_abi.h"

void zn_board_publish(int64_t *cell, int64_t value) { __atomic_store_n(cell, value, __ATOMIC_RELEASE); }

int64_t zn_board_read(const int64_t *cell) { return __atomic_load_n(cell, __ATOMIC_ACQUIRE); }
