// Addresses of the pretend GPU: a range that nobody may touch, and beside it the memory that kernels really use. A host
// that reads or writes device memory crashes, as it does on a GPU.
#pragma once

#include <cstddef>

namespace pretend {

constexpr size_t SPAN_BYTES = size_t(1) << 36;

// The first address of the device. No page of the range is readable.
char *device_base();

bool on_device(const void *address);

// Where the bytes of a device address are; any other address stays what it is.
void *bytes_of(const void *address);

}  // namespace pretend
