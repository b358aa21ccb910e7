// Page-locked host memory: torch's own, and what the product registers.
#pragma once

#include <c10/core/Allocator.h>

#include <cstddef>

namespace pretend {

c10::Allocator *pinned_allocator();

bool is_pinned(const void *address);
size_t pinned_count();

// A copy that is still to run uses the memory: torch's own is not reused before `end_use`.
void begin_use(const void *address);
void end_use(const void *address);

// As cudaHostRegister and cudaHostUnregister: 0 or CUDA's error number.
int host_register(void *address, size_t nbytes);
int host_unregister(void *address);

}  // namespace pretend
