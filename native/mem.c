/* Host memory by mapping: exact sizes, huge pages if the kernel grants them, and pages of NaN. */
#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "zn_abi.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

enum { HUGE_PAGE_BYTES = 2 << 20, POISON_MAPS_MAX = 1000, POISON_BYTE = 0xFF };

static int64_t page_bytes(void) { return (int64_t)sysconf(_SC_PAGESIZE); }

static int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

static bool is_mappable(int64_t nbytes) { return nbytes >= 1 && nbytes <= INT64_MAX / 2; }

/* The kernel aligns a mapping to the page only: map more, then cut off both ends. */
static void *map_aligned(int64_t nbytes, int64_t alignment, int protection, int more_flags) {
  int64_t slack = alignment > page_bytes() ? alignment : 0;
  char *map = mmap(NULL, (size_t)(nbytes + slack), protection, MAP_PRIVATE | MAP_ANONYMOUS | more_flags, -1, 0);
  if (map == MAP_FAILED) return NULL;
  if (slack == 0) return map;
  int64_t head = round_up((int64_t)(uintptr_t)map, alignment) - (int64_t)(uintptr_t)map;
  if (head > 0) munmap(map, (size_t)head);
  if (head < slack) munmap(map + head + nbytes, (size_t)(slack - head));
  return map + head;
}

static int32_t touch(char *map, int64_t nbytes) {
  while (madvise(map, (size_t)nbytes, MADV_POPULATE_WRITE) != 0) {
    if (errno == EINTR || errno == EAGAIN) continue;
    if (errno != EINVAL) return -ENOMEM;
    /* Kernels before 5.14 do not know the advice. Shared pages may already hold bytes: an atomic "or 0" keeps them. */
    for (int64_t at = 0; at < nbytes; at += page_bytes()) __atomic_fetch_or(map + at, 0, __ATOMIC_RELAXED);
    return 0;
  }
  return 0;
}

int32_t zn_mem_alloc(void **out, int64_t nbytes, int32_t flags) {
  if (!is_mappable(nbytes)) return -EINVAL;
  nbytes = round_up(nbytes, page_bytes());
  bool huge = (flags & ZN_MEM_HUGE) != 0;
  char *map = map_aligned(nbytes, huge ? HUGE_PAGE_BYTES : page_bytes(), PROT_READ | PROT_WRITE, 0);
  if (map == NULL) return -ENOMEM;
  if (huge) (void)madvise(map, (size_t)nbytes, MADV_HUGEPAGE);
  int32_t status = (flags & ZN_MEM_TOUCH) != 0 ? touch(map, nbytes) : 0;
  if (status != 0) {
    munmap(map, (size_t)nbytes);
    return status;
  }
  *out = map;
  return 0;
}

int32_t zn_mem_share(void **out, int32_t fd, int64_t nbytes, int32_t flags) {
  if (!is_mappable(nbytes)) return -EINVAL;
  nbytes = round_up(nbytes, page_bytes());
  bool huge = (flags & ZN_MEM_HUGE) != 0;
  /* The kernel can use huge pages only if the address and the file offset have the same alignment. */
  char *map = map_aligned(nbytes, huge ? HUGE_PAGE_BYTES : page_bytes(), PROT_NONE, MAP_NORESERVE);
  if (map == NULL) return -ENOMEM;
  if (mmap(map, (size_t)nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
    int32_t status = -errno;
    munmap(map, (size_t)nbytes);
    return status;
  }
  if (huge) (void)madvise(map, (size_t)nbytes, MADV_HUGEPAGE);
  int32_t status = (flags & ZN_MEM_TOUCH) != 0 ? touch(map, nbytes) : 0;
  if (status != 0) {
    munmap(map, (size_t)nbytes);
    return status;
  }
  *out = map;
  return 0;
}

int32_t zn_mem_touch(void *ptr, int64_t nbytes) {
  if (!is_mappable(nbytes) || (uintptr_t)ptr % (uintptr_t)page_bytes() != 0) return -EINVAL;
  return touch(ptr, round_up(nbytes, page_bytes()));
}

int32_t zn_mem_free(void *ptr, int64_t nbytes) {
  if (!is_mappable(nbytes)) return -EINVAL;
  return munmap(ptr, (size_t)round_up(nbytes, page_bytes())) == 0 ? 0 : -errno;
}

/* A file in memory that holds `nbytes` of poison: its descriptor, or -errno. */
static int poison_file(int64_t nbytes) {
  int fd = memfd_create("zn-poison", MFD_CLOEXEC);
  if (fd < 0) return -errno;
  void *map = MAP_FAILED;
  if (ftruncate(fd, nbytes) == 0) {
    map = mmap(NULL, (size_t)nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  }
  if (map == MAP_FAILED) {
    int error = errno;
    close(fd);
    return -error;
  }
  memset(map, POISON_BYTE, (size_t)nbytes);
  munmap(map, (size_t)nbytes);
  return fd;
}

/* Map the same block again and again, until the mappings cover the whole range. */
static int32_t poison_range(char *range, int64_t nbytes, int64_t block_bytes) {
  int fd = poison_file(block_bytes);
  if (fd < 0) return fd;
  int32_t status = 0;
  for (int64_t at = 0; at < nbytes && status == 0; at += block_bytes) {
    int64_t part = nbytes - at < block_bytes ? nbytes - at : block_bytes;
    void *map = mmap(range + at, (size_t)part, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, fd, 0);
    if (map == MAP_FAILED) status = -errno;
  }
  close(fd);
  return status;
}

int32_t zn_mem_poison(void **out, int64_t nbytes) {
  if (!is_mappable(nbytes)) return -EINVAL;
  nbytes = round_up(nbytes, page_bytes());
  char *range = mmap(NULL, (size_t)nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) return -ENOMEM;
  int64_t block_bytes = round_up((nbytes + POISON_MAPS_MAX - 1) / POISON_MAPS_MAX, HUGE_PAGE_BYTES);
  int32_t status = 0;
  /* If the process is close to its limit of mappings, use fewer and larger blocks. */
  for (;; block_bytes *= 8) {
    if (block_bytes > nbytes) block_bytes = nbytes;
    status = poison_range(range, nbytes, block_bytes);
    if (status != -ENOMEM || block_bytes == nbytes) break;
  }
  if (status != 0) {
    munmap(range, (size_t)nbytes);
    return status;
  }
  *out = range;
  return 0;
}
