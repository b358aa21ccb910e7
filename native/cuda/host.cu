/* Page-locking of host memory, and the functions that every library of this project exports. */
#include <string.h>

#include "kernels.cuh"

#ifndef ZN_SOURCE_HASH
#define ZN_SOURCE_HASH "unknown"
#endif

const char *zn_source_hash(void) { return ZN_SOURCE_HASH; }

const char *zn_strerror(int32_t status) {
  return status > 0 ? cudaGetErrorString((cudaError_t)status) : strerror(-status);
}

int32_t zn_cuda_host_register(void *ptr, int64_t nbytes) {
  if (ptr == nullptr || nbytes < 1) return -EINVAL;
  const cudaError_t status = cudaHostRegister(ptr, (size_t)nbytes, cudaHostRegisterPortable);
  /* Clear the error: it must not appear again as the error of the next launch. */
  if (status != cudaSuccess) cudaGetLastError();
  return (int32_t)status;
}

int32_t zn_cuda_host_unregister(void *ptr) {
  if (ptr == nullptr) return -EINVAL;
  const cudaError_t status = cudaHostUnregister(ptr);
  if (status != cudaSuccess) cudaGetLastError();
  return (int32_t)status;
}
