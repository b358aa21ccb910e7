/* Device address ranges of any length that read as NaN and cost one granule of memory. The driver maps the same
 * granule again and again; its functions are looked up at run time, so that the library opens without a driver. */
#include "kernels.cuh"

#if defined(__has_include)
#if __has_include(<cuda.h>)
#define ZN_HAS_DRIVER 1
#endif
#endif

#ifdef ZN_HAS_DRIVER

#include <cuda.h>
#include <dlfcn.h>

namespace {

struct Driver {
  decltype(&cuMemGetAllocationGranularity) granularity;
  decltype(&cuMemAddressReserve) reserve;
  decltype(&cuMemAddressFree) free_range;
  decltype(&cuMemCreate) create;
  decltype(&cuMemRelease) release;
  decltype(&cuMemMap) map;
  decltype(&cuMemUnmap) unmap;
  decltype(&cuMemSetAccess) set_access;
  bool found;
};

template <typename Call>
bool look_up(void *library, const char *name, Call *call) {
  *call = (Call)dlsym(library, name);
  return *call != nullptr;
}

Driver find_driver() {
  Driver driver = {};
  void *library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
  if (library == nullptr) return driver;
  driver.found = look_up(library, "cuMemGetAllocationGranularity", &driver.granularity) &&
                 look_up(library, "cuMemAddressReserve", &driver.reserve) &&
                 look_up(library, "cuMemAddressFree", &driver.free_range) &&
                 look_up(library, "cuMemCreate", &driver.create) &&
                 look_up(library, "cuMemRelease", &driver.release) &&
                 look_up(library, "cuMemMap", &driver.map) && look_up(library, "cuMemUnmap", &driver.unmap) &&
                 look_up(library, "cuMemSetAccess", &driver.set_access);
  return driver;
}

const Driver &the_driver() {
  static const Driver driver = find_driver();
  return driver;
}

CUmemAllocationProp properties(int32_t device) {
  CUmemAllocationProp wanted = {};
  wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  wanted.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  wanted.location.id = device;
  return wanted;
}

/* Maps one granule over the whole range and fills it; on failure the caller must unmap the first `*mapped` bytes. */
int32_t lay_out(const Driver &driver, CUdeviceptr range, int64_t nbytes, int64_t granule, int32_t device,
                int64_t *mapped) {
  const CUmemAllocationProp wanted = properties(device);
  CUmemGenericAllocationHandle handle;
  CUresult status = driver.create(&handle, (size_t)granule, &wanted, 0);
  if (status != CUDA_SUCCESS) return (int32_t)status;
  for (*mapped = 0; *mapped < nbytes && status == CUDA_SUCCESS;) {
    status = driver.map(range + (CUdeviceptr)*mapped, (size_t)granule, 0, handle, 0);
    if (status == CUDA_SUCCESS) *mapped += granule;
  }
  driver.release(handle); /* The mappings keep the memory alive. */
  if (status != CUDA_SUCCESS) return (int32_t)status;
  CUmemAccessDesc access = {};
  access.location = wanted.location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  status = driver.set_access(range, (size_t)nbytes, &access, 1);
  if (status != CUDA_SUCCESS) return (int32_t)status;
  return (int32_t)cudaMemset((void *)range, 0xFF, (size_t)granule);
}

}  // namespace

int64_t zn_cuda_poison_granule(int32_t device) {
  const Driver &driver = the_driver();
  /* cudaFree makes the runtime create the device's context, which the driver's calls need. */
  if (!driver.found || cudaFree(nullptr) != cudaSuccess) {
    cudaGetLastError();
    return -ENOSYS;
  }
  const CUmemAllocationProp wanted = properties(device);
  size_t granule = 0;
  const CUresult status = driver.granularity(&granule, &wanted, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
  return status == CUDA_SUCCESS && granule > 0 ? (int64_t)granule : -ENOSYS;
}

int32_t zn_cuda_poison_map(void **out, int64_t nbytes, int32_t device) {
  const int64_t granule = out == nullptr || nbytes < 1 ? -EINVAL : zn_cuda_poison_granule(device);
  if (granule < 0) return (int32_t)granule;
  if (nbytes % granule != 0) return -EINVAL;
  const Driver &driver = the_driver();
  CUdeviceptr range = 0;
  CUresult reserved = driver.reserve(&range, (size_t)nbytes, 0, 0, 0);
  if (reserved != CUDA_SUCCESS) return (int32_t)reserved;
  int64_t mapped = 0;
  const int32_t status = lay_out(driver, range, nbytes, granule, device, &mapped);
  if (status == 0) {
    *out = (void *)range;
    return 0;
  }
  for (int64_t at = 0; at < mapped; at += granule) driver.unmap(range + (CUdeviceptr)at, (size_t)granule);
  driver.free_range(range, (size_t)nbytes);
  cudaGetLastError();
  return status;
}

int32_t zn_cuda_poison_unmap(void *ptr, int64_t nbytes, int32_t device) {
  const int64_t granule = ptr == nullptr || nbytes < 1 ? -EINVAL : zn_cuda_poison_granule(device);
  if (granule < 0) return (int32_t)granule;
  const Driver &driver = the_driver();
  CUresult status = CUDA_SUCCESS;
  for (int64_t at = 0; at < nbytes && status == CUDA_SUCCESS; at += granule) {
    status = driver.unmap((CUdeviceptr)ptr + (CUdeviceptr)at, (size_t)granule);
  }
  if (status != CUDA_SUCCESS) return (int32_t)status;
  return (int32_t)driver.free_range((CUdeviceptr)ptr, (size_t)nbytes);
}

#else /* Built without the driver's header: callers allocate memory instead. */

int64_t zn_cuda_poison_granule(int32_t) { return -ENOSYS; }
int32_t zn_cuda_poison_map(void **, int64_t, int32_t) { return -ENOSYS; }
int32_t zn_cuda_poison_unmap(void *, int64_t, int32_t) { return -ENOSYS; }

#endif
