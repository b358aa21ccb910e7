// Device memory, cached and given out in stream order as torch's allocator does it: segments, best fit, split, merge.
// Freed memory turns to NaN once its stream comes to that point.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "scheduler.h"

namespace pretend {

struct DeviceStatistics {
  uint64_t requested_bytes, allocated_bytes, peak_bytes, reserved_bytes, limit_bytes, segments;
};

class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  static DeviceAllocator &get();

  DeviceStatistics statistics();
  void set_limit(size_t nbytes);
  void reset_peak();
  // Return every segment that is wholly free to the device.
  void empty();

  c10::DataPtr allocate(size_t nbytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void *to, const void *from, size_t nbytes) const override;
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { empty(); }
  void recordStream(const c10::DataPtr &data, c10::Stream stream) override;
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return {}; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override { reset_peak(); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override;

 private:
  struct Block {
    char *data;
    size_t nbytes;
    int stream;
    bool small;
    size_t requested = 0;
    bool used = false;
    std::set<int> other_streams;  // that work with it too, see recordStream
    Block *before = nullptr, *behind = nullptr;
  };
  struct BySize {
    bool operator()(const Block *a, const Block *b) const;
  };
  struct Leaving {
    Block *block;
    std::vector<std::pair<int, Ticket>> marks;
  };

  Block *take(size_t nbytes, int stream);
  Block *fresh_segment(size_t nbytes, int stream, bool small);
  void split(Block *block, size_t nbytes);
  void put(void *data);
  void return_block(Block *block);
  void merge_behind(Block *block);
  void return_passed();
  static void put_back(void *data);

  std::recursive_mutex mutex_;
  size_t limit_bytes_ = size_t(8) << 30, reserved_bytes_ = 0, segments_ = 0;
  size_t requested_bytes_ = 0, allocated_bytes_ = 0, peak_bytes_ = 0;  // blocks are larger than what was asked for
  size_t end_ = 0;                              // of the addresses that segments have been given
  std::map<size_t, std::vector<size_t>> gaps_;  // segment size -> offsets of segments that were returned
  std::set<Block *, BySize> free_[2];           // large and small blocks
  std::unordered_map<void *, Block *> used_;
  std::vector<Leaving> leaving_;
};

}  // namespace pretend
