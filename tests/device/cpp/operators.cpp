// Operators that the pretend GPU has of its own: memory, views, copies, and reading a number.
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>

#include "allocator.h"
#include "pinned.h"
#include "raw_tensor.h"
#include "scheduler.h"

namespace pretend {

using at::IntArrayRef;
using at::Tensor;

Tensor new_on_device(IntArrayRef sizes, IntArrayRef strides, at::ScalarType dtype) {
  const c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
  return at::detail::empty_strided_generic(sizes, strides, &DeviceAllocator::get(), keys, dtype);
}

void resize_storage(c10::StorageImpl *storage, size_t nbytes) {
  const size_t kept = std::min(storage->nbytes(), nbytes);
  c10::DataPtr fresh = DeviceAllocator::get().allocate(nbytes);
  if (kept > 0) {
    void *to = bytes_of(fresh.get()), *from = bytes_of(storage->data());
    Scheduler::get().add(current_stream(), [to, from, kept] { memcpy(to, from, kept); });
  }
  storage->set_data_ptr(std::move(fresh));  // frees what was there
  storage->set_nbytes(nbytes);
}

const Tensor &resize(const Tensor &tensor, IntArrayRef sizes, std::optional<at::MemoryFormat>) {
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  const int64_t numel = tensor.numel() + tensor.storage_offset();
  auto *storage = tensor.storage().unsafeGetStorageImpl();
  if (numel * tensor.itemsize() > storage->nbytes()) resize_storage(storage, numel * tensor.itemsize());
  return tensor;
}

namespace {

// ---- memory and views -----------------------------------------------------------------------------------------------

at::ScalarType given_dtype(std::optional<at::ScalarType> dtype) {
  return dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype()));
}

Tensor empty_strided(IntArrayRef sizes, IntArrayRef strides, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return new_on_device(sizes, strides, given_dtype(dtype));
}

Tensor empty(IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
  return at::detail::empty_generic(sizes, &DeviceAllocator::get(), keys, given_dtype(dtype), format);
}

Tensor as_strided(const Tensor &self, IntArrayRef sizes, IntArrayRef strides, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, sizes, strides, offset);
}

Tensor view(const Tensor &self, IntArrayRef sizes) { return at::native::view(self, sizes); }

Tensor reshape_alias(const Tensor &self, IntArrayRef sizes, IntArrayRef strides) {
  return at::native::_reshape_alias(self, sizes, strides);
}

Tensor unfold(const Tensor &self, int64_t dimension, int64_t size, int64_t step) {
  return at::native::unfold(self, dimension, size, step);
}

Tensor &set_to_part(Tensor &self, at::Storage source, int64_t offset, IntArrayRef sizes, IntArrayRef strides) {
  auto *impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source);
  impl->set_storage_offset(offset);
  const bool strided = strides.data() != nullptr && strides.size() == sizes.size();
  if (strided) impl->set_sizes_and_strides(sizes, strides);
  else impl->set_sizes_contiguous(sizes);
  return self;
}

Tensor &set_to_storage(Tensor &self, at::Storage source) {
  const int64_t numel = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_to_part(self, source, 0, {numel}, {});
}

Tensor &set_to_tensor(Tensor &self, const Tensor &other) {
  return set_to_part(self, other.storage(), other.storage_offset(), other.sizes(), other.strides());
}

Tensor &set_to_nothing(Tensor &self) {
  DeviceAllocator &device = DeviceAllocator::get();
  at::Storage nothing(at::Storage::use_byte_size_t(), 0, device.allocate(0), &device, true);
  return set_to_part(self, nothing, 0, {0}, {});
}

void record_stream(Tensor &self, at::Stream stream) {
  DeviceAllocator::get().recordStream(self.storage().data_ptr(), stream);
}

// ---- copies ---------------------------------------------------------------------------------------------------------

void copy_later(const RawTensor &to, const RawTensor &from) {
  Scheduler::get().add(current_stream(), [to, from] { on_host(to).copy_(on_host(from)); });
}

void copy_pinned(const RawTensor &to, const RawTensor &from, const void *host) {
  begin_use(host);
  Scheduler::get().add(current_stream(), [to, from, host] {
    on_host(to).copy_(on_host(from));
    end_use(host);
  });
}

void wait_for_current(const std::string &reason) {
  note_wait(reason);
  Scheduler::get().finish(current_stream(), Scheduler::get().latest(current_stream()));
}

Tensor &copy(Tensor &self, const Tensor &source, bool non_blocking) {
  if (self.numel() == 0) return self;
  const Tensor from = source.sizes() == self.sizes() ? source : source.expand_as(self);
  const RawTensor raw_to = raw(self), raw_from = raw(from);
  if (self.is_cuda() && from.is_cuda()) {
    copy_later(raw_to, raw_from);
    return self;
  }
  const void *host = self.is_cuda() ? from.data_ptr() : self.data_ptr();
  if (non_blocking && is_pinned(host)) {
    copy_pinned(raw_to, raw_from, host);
    return self;
  }
  if (self.is_cuda()) {
    // The source is read before the call returns, whatever the device does meanwhile.
    const Tensor staged = from.clone();
    Scheduler::get().add(current_stream(), [raw_to, staged] { on_host(raw_to).copy_(staged); });
    if (non_blocking) note_wait("copy to the device from pageable memory");
    else wait_for_current("copy to the device");
    return self;
  }
  copy_later(raw_to, raw_from);
  wait_for_current(non_blocking ? "copy to pageable memory" : "copy to the host");
  return self;
}

at::Scalar local_scalar(const Tensor &self) {
  wait_for_current("item");
  at::AutoDispatchBelowADInplaceOrView below;
  return on_host(raw(self)).item();
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", as_strided);
  library.impl("view", view);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("unfold", unfold);
  library.impl("resize_", resize);
  library.impl("set_.source_Storage_storage_offset", set_to_part);
  library.impl("set_.source_Storage", set_to_storage);
  library.impl("set_.source_Tensor", set_to_tensor);
  library.impl("set_", set_to_nothing);
  library.impl("record_stream", record_stream);
  library.impl("copy_", copy);
  library.impl("_local_scalar_dense", local_scalar);
}

}  // namespace pretend
