// A tensor as a task on the device sees it: the memory that is really there, and no owner.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

#include <vector>

#include "memory.h"

namespace pretend {

struct RawTensor {
  void *data = nullptr;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype = at::kByte;
};

inline RawTensor raw(const at::Tensor &tensor) {
  void *data = tensor.numel() > 0 ? bytes_of(tensor.data_ptr()) : nullptr;
  return {data, tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type()};
}

// A tensor of the CPU over the same bytes.
inline at::Tensor on_host(const RawTensor &raw) {
  return at::from_blob(raw.data, raw.sizes, raw.strides, at::TensorOptions().dtype(raw.dtype));
}

// A new tensor of the device; its memory belongs to the calling thread's stream.
at::Tensor new_on_device(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype);

// Give a storage of the device memory of that length, which belongs to the calling thread's stream.
void resize_storage(c10::StorageImpl *storage, size_t nbytes);

// Give a tensor of the device other sizes, and more memory if it needs it.
const at::Tensor &resize(const at::Tensor &tensor, at::IntArrayRef sizes, std::optional<at::MemoryFormat>);

}  // namespace pretend
