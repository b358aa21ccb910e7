/* Memory that is registered with an io_uring ring. */
#ifndef ZN_REGISTRY_H
#define ZN_REGISTRY_H

#include <stdint.h>

/* The kernel pins a registered buffer's pages once instead of once per transfer. Any thread may register;
 * the I/O thread looks entries up. Files are not registered: the gain is not measurable, and a ring whose
 * process was killed releases them late, so a killed job's disk space would be freed late. */
typedef struct zn_registry zn_registry;

/* NULL when the kernel has no table that can be filled later (before Linux 5.19) or memory is short. */
zn_registry *zn_registry_open(int ring_fd);
/* Unpins at once; if only the ring were closed, the kernel would unpin later. NULL is allowed. */
void zn_registry_close(zn_registry *registry);

/* 0, or -errno and nothing is registered: -ENOTSUP without a table, -ENOSPC when it is full, -ENOMEM
 * or -EPERM past RLIMIT_MEMLOCK. Ranges are cut at 1 GiB, the kernel's limit for one entry. */
int32_t zn_registry_add(zn_registry *registry, void *ptr, int64_t nbytes);
int32_t zn_registry_remove(zn_registry *registry, void *ptr, int64_t nbytes);

/* The entry to use in a transfer, or -1: the transfer uses none. */
int32_t zn_registry_find(zn_registry *registry, const void *ptr, int64_t nbytes);

#endif /* ZN_REGISTRY_H */
