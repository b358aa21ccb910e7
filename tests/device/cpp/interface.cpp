// What Python and the kernels call.
#include <cstdint>
#include <string>

#include "allocator.h"
#include "memory.h"
#include "pinned.h"
#include "raw_tensor.h"
#include "scheduler.h"
#include "wire.h"

using namespace pretend;

namespace {

// torch finds the device's memory here; see guard.cpp for the rest.
const bool registered = (c10::SetAllocator(c10::kCUDA, &DeviceAllocator::get(), 100), true);

}  // namespace

extern "C" {

struct pretend_statistics {
  uint64_t requested_bytes, allocated_bytes, peak_bytes, reserved_bytes, limit_bytes, segments, pinned, tasks;
};

void pretend_read(pretend_statistics *out) {
  const DeviceStatistics device = DeviceAllocator::get().statistics();
  *out = {device.requested_bytes, device.allocated_bytes, device.peak_bytes, device.reserved_bytes,
          device.limit_bytes,     device.segments,        pinned_count(),    Scheduler::get().tasks_run()};
}

void pretend_mode(int mode) { Scheduler::get().set_mode(static_cast<Mode>(mode)); }
void pretend_early(int stream) { Scheduler::get().set_early(stream); }
void pretend_seed(unsigned value) { Scheduler::get().seed(value); }
void pretend_limit(uint64_t nbytes) { DeviceAllocator::get().set_limit(nbytes); }
void pretend_reset_peak() { DeviceAllocator::get().reset_peak(); }
void pretend_listen(Listener listener) { listen(listener); }

// Null, or what has failed; valid until the thread calls again.
const char *pretend_synchronize(int noted) {
  static thread_local std::string error;
  if (noted) note_wait("device.synchronize");
  try {
    Scheduler::get().finish_all();
  } catch (const std::exception &failed) {
    error = failed.what();
    return error.c_str();
  }
  return nullptr;
}

void pretend_resize(void *storage, uint64_t nbytes) {
  resize_storage(static_cast<c10::StorageImpl *>(storage), nbytes);
}

void pretend_empty_cache() { DeviceAllocator::get().empty(); }

// ---- collectives, see wire.h

void *pretend_wire(const char *path, int rank, int size, int stream) {
  return new Wire(path, rank, size, stream);  // never destroyed: who has it may ask at any time
}

void pretend_launch_collective(void *wire, int what, int number, void *to, const void *from, size_t nbytes, int root) {
  const Message message{static_cast<Collective>(what), static_cast<Number>(number), to, from, nbytes, root};
  static_cast<Wire *>(wire)->launch(message);
}

void pretend_abort(void *wire) { static_cast<Wire *>(wire)->abort(); }
void pretend_close(void *wire) { static_cast<Wire *>(wire)->close(); }

// ---- the kernels' side, see cuda_runtime.h

void pretend_enqueue(void *stream, void (*task)(void *), void *argument) {
  Scheduler::get().add(static_cast<int>(reinterpret_cast<intptr_t>(stream)), [task, argument] { task(argument); });
}

void *pretend_bytes_of(void *address) { return bytes_of(address); }
int pretend_host_register(void *address, size_t nbytes) { return host_register(address, nbytes); }
int pretend_host_unregister(void *address) { return host_unregister(address); }

}  // extern "C"
