/* Memory that an io_uring ring was told about in advance. */
#ifndef ZN_REGISTRY_H
#define ZN_REGISTRY_H

#include <stdint.h>

/* The kernel pins a registered buffer's pages once instead of once per transfer. Any thread may
 * register; the I/O thread looks up. Files are not registered: it gains nothing measurable, and a ring
 * that dies with its process lets go of them late, so a killed job's disk space would come back late. */
typedef struct zn_registry zn_registry;

/* NULL when the kernel has no table that can be filled later (before Linux 5.19) or memory is short. */
zn_registry *zn_registry_open(int ring_fd);
/* Unpins at once: closing the ring would leave that for later. NULL is allowed. */
void zn_registry_close(zn_registry *registry);

/* 0, or -errno and nothing is registered: -ENOTSUP without a table, -ENOSPC when it is full, -ENOMEM
 * or -EPERM past RLIMIT_MEMLOCK. Ranges are cut at 1 GiB, the kernel's limit for one entry. */
int32_t zn_registry_add(zn_registry *registry, void *ptr, int64_t nbytes);
int32_t zn_registry_remove(zn_registry *registry, void *ptr, int64_t nbytes);

/* The entry to name in a transfer, or -1: take the plain way. */
int32_t zn_registry_find(zn_registry *registry, const void *ptr, int64_t nbytes);

#endif /* ZN_REGISTRY_H */
