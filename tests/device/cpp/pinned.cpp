#include "pinned.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "memory.h"

namespace pretend {
namespace {

constexpr int ALREADY_REGISTERED = 712, NOT_REGISTERED = 713;  // cudaErrorHostMemory...
constexpr int INVALID_VALUE = 1;
constexpr size_t PAGE_BYTES = 4096;

struct Range {
  size_t nbytes;
  bool of_torch;
  int uses = 0;
  bool freed = false;
};

std::mutex mutex;
std::map<char *, Range> ranges;

std::map<char *, Range>::iterator range_with(const void *address) {
  char *at = static_cast<char *>(const_cast<void *>(address));
  auto found = ranges.upper_bound(at);
  if (found == ranges.begin()) return ranges.end();
  --found;
  return at < found->first + found->second.nbytes ? found : ranges.end();
}

void give_back(std::map<char *, Range>::iterator range) {
  char *begin = range->first;
  memset(begin, 0xFF, range->second.nbytes);  // who still reads it reads NaN
  ranges.erase(range);
  free(begin);
}

void change_uses(const void *address, int by) {
  std::lock_guard<std::mutex> lock(mutex);
  auto range = range_with(address);
  if (range == ranges.end() || !range->second.of_torch) return;
  range->second.uses += by;
  if (range->second.freed && range->second.uses == 0) give_back(range);
}

void free_pinned(void *address) {
  std::lock_guard<std::mutex> lock(mutex);
  auto range = ranges.find(static_cast<char *>(address));
  if (range == ranges.end()) return;
  if (range->second.uses > 0) range->second.freed = true;
  else give_back(range);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void *data = nullptr;
    if (nbytes > 0) {
      TORCH_CHECK(posix_memalign(&data, PAGE_BYTES, nbytes) == 0, "pretend GPU: no host memory for ", nbytes, " bytes");
      std::lock_guard<std::mutex> lock(mutex);
      ranges[static_cast<char *>(data)] = {nbytes, true};
    }
    return {data, data, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void *to, const void *from, size_t nbytes) const override { memcpy(to, from, nbytes); }
};

}  // namespace

c10::Allocator *pinned_allocator() {
  static PinnedAllocator *const allocator = new PinnedAllocator;
  return allocator;
}

bool is_pinned(const void *address) {
  std::lock_guard<std::mutex> lock(mutex);
  auto range = range_with(address);
  return range != ranges.end() && !range->second.freed;
}

size_t pinned_count() {
  std::lock_guard<std::mutex> lock(mutex);
  return ranges.size();
}

void begin_use(const void *address) { change_uses(address, 1); }
void end_use(const void *address) { change_uses(address, -1); }

int host_register(void *address, size_t nbytes) {
  if (on_device(address)) return INVALID_VALUE;
  char *begin = static_cast<char *>(address);
  std::lock_guard<std::mutex> lock(mutex);
  auto next = ranges.lower_bound(begin);
  const bool overlaps_next = next != ranges.end() && next->first < begin + nbytes;
  if (overlaps_next || range_with(begin) != ranges.end()) return ALREADY_REGISTERED;
  ranges[begin] = {nbytes, false};
  return 0;
}

int host_unregister(void *address) {
  std::lock_guard<std::mutex> lock(mutex);
  auto range = ranges.find(static_cast<char *>(address));
  if (range == ranges.end() || range->second.of_torch) return NOT_REGISTERED;
  ranges.erase(range);
  return 0;
}

}  // namespace pretend
