// What torch asks of a device type: its guard (devices, streams, events) and its hooks (memory, generators).
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "allocator.h"
#include "memory.h"
#include "pinned.h"
#include "scheduler.h"

namespace pretend {
namespace {

constexpr int ASKED_MAX = 20;
constexpr int SLOW_MS = 2;  // whoever waits for late work does so for a while, in which other threads go on

struct Event {
  int stream = -1;
  Ticket ticket = 0;
  std::atomic<int> asked{0};

  bool recorded() const { return stream >= 0; }
};

std::atomic<int> streams_given{0};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::kCUDA;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}

  static c10::Device the_device() { return {c10::kCUDA, 0}; }
  static c10::Stream stream_of(int id) { return c10::Stream(c10::Stream::UNSAFE, the_device(), id); }
  static int id_of(const c10::Stream &stream) { return static_cast<int>(stream.id()); }

  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return the_device(); }
  c10::Device getDevice() const override { return the_device(); }
  void setDevice(c10::Device device) const override { TORCH_CHECK(device.index() <= 0, "pretend GPU: there is one"); }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const override { return stream_of(current_stream()); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream_of(DEFAULT_STREAM); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream_of(1 + streams_given++ % (STREAMS - 1)); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const int before = current_stream();
    current_stream() = id_of(stream);
    return stream_of(before);
  }
  void *getStreamNativeHandle(const c10::Stream stream) const override { return reinterpret_cast<void *>(stream.id()); }
  bool queryStream(const c10::Stream &stream) const override {
    return Scheduler::get().passed(id_of(stream), Scheduler::get().latest(id_of(stream)));
  }
  void synchronizeStream(const c10::Stream &stream) const override {
    note_wait("stream.synchronize");
    Scheduler::get().finish(id_of(stream), Scheduler::get().latest(id_of(stream)));
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    note_wait("device.synchronize");
    Scheduler::get().finish_all();
  }
  void recordDataPtrOnStream(const c10::DataPtr &data, const c10::Stream &stream) const override {
    DeviceAllocator::get().recordStream(data, stream);
  }

  void destroyEvent(void *event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event *>(event); }
  void record(void **event, const c10::Stream &stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    Event *recorded = static_cast<Event *>(*event);
    recorded->stream = id_of(stream);
    recorded->ticket = Scheduler::get().latest(recorded->stream);
    recorded->asked = 0;
  }
  void block(void *event, const c10::Stream &stream) const override {
    const Event *given = static_cast<Event *>(event);
    if (given && given->recorded()) Scheduler::get().add_wait(id_of(stream), given->stream, given->ticket);
  }
  bool queryEvent(void *event) const override {
    Event *given = static_cast<Event *>(event);
    if (!given || !given->recorded() || Scheduler::get().passed(given->stream, given->ticket)) return true;
    if (++given->asked <= ASKED_MAX) return false;
    Scheduler::get().finish(given->stream, given->ticket);  // whoever asks so often would ask for ever
    return true;
  }
  void synchronizeEvent(void *event) const override {
    const Event *given = static_cast<Event *>(event);
    if (!given || !given->recorded()) return;
    note_wait("event.synchronize");
    if (Scheduler::get().passed(given->stream, given->ticket)) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(SLOW_MS));
    Scheduler::get().finish(given->stream, given->ticket);
  }
  double elapsedTime(void *, void *, const c10::DeviceIndex) const override { return 1.0; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

}  // namespace
}  // namespace pretend

namespace at {

struct PretendHooks final : CUDAHooksInterface {
  explicit PretendHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void *address) const override { return pretend::is_pinned(address); }
  Allocator *getPinnedMemoryAllocator() const override { return pretend::pinned_allocator(); }
  Allocator *getCUDADeviceAllocator() const override { return &pretend::DeviceAllocator::get(); }
  Device getDeviceFromPtr(void *address) const override {
    TORCH_CHECK(pretend::on_device(address), "pretend GPU: not an address of the device");
    return {kCUDA, 0};
  }
  const Generator &getDefaultGenerator(DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  void deviceSynchronize(DeviceIndex) const override {
    pretend::note_wait("device.synchronize");
    pretend::Scheduler::get().finish_all();
  }
};

// torch looks the class up under this name, once; the library is loaded before that.
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", PretendHooks)

}  // namespace at
