/* Registered buffers of an io_uring ring: a sparse table, filled and emptied entry by entry.
 *
 * A chunk that does not lie in one entry is moved without it, so no call here has to succeed. */
#include "registry.h"

#if defined(__linux__) && defined(__has_include)
#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#endif
#endif

#ifdef IORING_RSRC_REGISTER_SPARSE /* headers of Linux 5.19 */

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#ifndef SYS_io_uring_register
#define SYS_io_uring_register 427
#endif

enum { ENTRIES = 256, ENTRY_BYTES_MAX = 1 << 30 };

struct zn_registry {
  int ring_fd;
  pthread_mutex_t lock;
  struct iovec entries[ENTRIES]; /* length 0: free */
  int32_t used;                  /* entries from this index on were never filled */
};

zn_registry *zn_registry_open(int ring_fd) {
  struct io_uring_rsrc_register table = {.nr = ENTRIES, .flags = IORING_RSRC_REGISTER_SPARSE};
  if (syscall(SYS_io_uring_register, ring_fd, IORING_REGISTER_BUFFERS2, &table, sizeof table) != 0) return NULL;
  zn_registry *registry = calloc(1, sizeof *registry);
  if (registry == NULL) return NULL;
  registry->ring_fd = ring_fd;
  pthread_mutex_init(&registry->lock, NULL);
  return registry;
}

void zn_registry_close(zn_registry *registry) {
  if (registry == NULL) return;
  (void)syscall(SYS_io_uring_register, registry->ring_fd, IORING_UNREGISTER_BUFFERS, NULL, 0);
  pthread_mutex_destroy(&registry->lock);
  free(registry);
}

/* ---- entries; `lock` is held --------------------------------------------------------------- */

static int32_t replace(zn_registry *registry, int32_t entry, struct iovec range) {
  struct io_uring_rsrc_update2 change = {
      .offset = (uint32_t)entry, .data = (uint64_t)(uintptr_t)&range, .nr = 1};
  const long done =
      syscall(SYS_io_uring_register, registry->ring_fd, IORING_REGISTER_BUFFERS_UPDATE, &change, sizeof change);
  if (done != 1) return done < 0 ? -errno : -EIO;
  registry->entries[entry] = range;
  if (entry >= registry->used) registry->used = entry + 1;
  return 0;
}

/* Remove every entry that lies within the range. */
static int32_t forget(zn_registry *registry, const char *begin, const char *end) {
  int32_t status = 0;
  for (int32_t i = 0; i < registry->used; i++) {
    const struct iovec known = registry->entries[i];
    const char *base = known.iov_base;
    if (known.iov_len == 0 || base < begin || base + known.iov_len > end) continue;
    const int32_t failed = replace(registry, i, (struct iovec){0});
    if (failed != 0) status = failed;
  }
  return status;
}

static int32_t free_entry(const zn_registry *registry) {
  for (int32_t i = 0; i < ENTRIES; i++) {
    if (registry->entries[i].iov_len == 0) return i;
  }
  return -1;
}

/* ---- calls --------------------------------------------------------------------------------- */

int32_t zn_registry_add(zn_registry *registry, void *ptr, int64_t nbytes) {
  if (registry == NULL) return -ENOTSUP;
  char *begin = ptr;
  int32_t status = 0;
  pthread_mutex_lock(&registry->lock);
  for (int64_t at = 0; at < nbytes && status == 0; at += ENTRY_BYTES_MAX) {
    const int64_t part = nbytes - at < ENTRY_BYTES_MAX ? nbytes - at : ENTRY_BYTES_MAX;
    const int32_t entry = free_entry(registry);
    status = entry < 0 ? -ENOSPC : replace(registry, entry, (struct iovec){begin + at, (size_t)part});
  }
  if (status != 0) (void)forget(registry, begin, begin + nbytes);
  pthread_mutex_unlock(&registry->lock);
  return status;
}

int32_t zn_registry_remove(zn_registry *registry, void *ptr, int64_t nbytes) {
  if (registry == NULL) return -ENOTSUP;
  pthread_mutex_lock(&registry->lock);
  const int32_t status = forget(registry, ptr, (char *)ptr + nbytes);
  pthread_mutex_unlock(&registry->lock);
  return status;
}

int32_t zn_registry_find(zn_registry *registry, const void *ptr, int64_t nbytes) {
  if (registry == NULL) return -1;
  const char *begin = ptr;
  int32_t found = -1;
  pthread_mutex_lock(&registry->lock);
  for (int32_t i = 0; i < registry->used && found < 0; i++) {
    const struct iovec known = registry->entries[i];
    const char *base = known.iov_base;
    if (known.iov_len != 0 && base <= begin && begin + nbytes <= base + known.iov_len) found = i;
  }
  pthread_mutex_unlock(&registry->lock);
  return found;
}

#else /* no headers to build against */

#include <errno.h>
#include <stddef.h>

zn_registry *zn_registry_open(int ring_fd) {
  (void)ring_fd;
  return NULL;
}

void zn_registry_close(zn_registry *registry) { (void)registry; }

int32_t zn_registry_add(zn_registry *registry, void *ptr, int64_t nbytes) {
  (void)registry, (void)ptr, (void)nbytes;
  return -ENOTSUP;
}

int32_t zn_registry_remove(zn_registry *registry, void *ptr, int64_t nbytes) {
  return zn_registry_add(registry, ptr, nbytes);
}

int32_t zn_registry_find(zn_registry *registry, const void *ptr, int64_t nbytes) {
  (void)registry, (void)ptr, (void)nbytes;
  return -1;
}

#endif
