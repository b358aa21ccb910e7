#include "memory.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>

namespace pretend {
namespace {

char *reserve(int protection) {
  void *range = mmap(nullptr, SPAN_BYTES, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) {
    perror("pretend GPU: the address range cannot be reserved");
    abort();
  }
  return static_cast<char *>(range);
}

char *bytes_base() {
  static char *const base = reserve(PROT_READ | PROT_WRITE);
  return base;
}

}  // namespace

char *device_base() {
  static char *const base = reserve(PROT_NONE);
  return base;
}

bool on_device(const void *address) {
  const char *at = static_cast<const char *>(address);
  return at >= device_base() && at < device_base() + SPAN_BYTES;
}

void *bytes_of(const void *address) {
  if (!on_device(address)) return const_cast<void *>(address);
  return bytes_base() + (static_cast<const char *>(address) - device_base());
}

}  // namespace pretend
