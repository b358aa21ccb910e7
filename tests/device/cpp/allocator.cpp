#include "allocator.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <tuple>

#include "memory.h"

namespace pretend {
namespace {

// As torch's CUDACachingAllocator has them.
constexpr size_t MIB = 1 << 20;
constexpr size_t ROUND_BYTES = 512, SMALL_BYTES = MIB, SMALL_SEGMENT_BYTES = 2 * MIB, MIDDLE_SEGMENT_BYTES = 20 * MIB;
constexpr size_t MIDDLE_BYTES = 10 * MIB, LARGE_ROUND_BYTES = 2 * MIB;

size_t rounded(size_t nbytes, size_t to) { return (nbytes + to - 1) / to * to; }

size_t segment_bytes(size_t nbytes, bool small) {
  if (small) return SMALL_SEGMENT_BYTES;
  return nbytes < MIDDLE_BYTES ? MIDDLE_SEGMENT_BYTES : rounded(nbytes, LARGE_ROUND_BYTES);
}

const c10::Device DEVICE(c10::kCUDA, 0);

}  // namespace

DeviceAllocator &DeviceAllocator::get() {
  static DeviceAllocator *const allocator = new DeviceAllocator;
  return *allocator;
}

bool DeviceAllocator::BySize::operator()(const Block *a, const Block *b) const {
  return std::tie(a->stream, a->nbytes, a->data) < std::tie(b->stream, b->nbytes, b->data);
}

DeviceStatistics DeviceAllocator::statistics() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return_passed();
  return {requested_bytes_, allocated_bytes_, peak_bytes_, reserved_bytes_, limit_bytes_, segments_};
}

void DeviceAllocator::set_limit(size_t nbytes) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  limit_bytes_ = nbytes;
}

void DeviceAllocator::reset_peak() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  peak_bytes_ = allocated_bytes_;
}

std::pair<size_t, size_t> DeviceAllocator::getMemoryInfo(c10::DeviceIndex) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return {limit_bytes_ - reserved_bytes_, limit_bytes_};
}

c10::DataPtr DeviceAllocator::allocate(size_t nbytes) {
  if (nbytes == 0) return {nullptr, nullptr, &put_back, DEVICE};
  char *data = take(nbytes, current_stream())->data;
  return {data, data, &put_back, DEVICE};
}

c10::DeleterFnPtr DeviceAllocator::raw_deleter() const { return &put_back; }

void DeviceAllocator::copy_data(void *, const void *, size_t) const {
  TORCH_CHECK(false, "pretend GPU: copy_data is not there: nothing of the product needed it");
}

void DeviceAllocator::put_back(void *data) {
  if (data != nullptr) get().put(data);
}

void DeviceAllocator::recordStream(const c10::DataPtr &data, c10::Stream stream) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (data.get() == nullptr || data.get_deleter() != &put_back) return;
  auto found = used_.find(data.get_context());
  const int id = static_cast<int>(stream.id());
  if (found != used_.end() && found->second->stream != id) found->second->other_streams.insert(id);
}

DeviceAllocator::Block *DeviceAllocator::take(size_t nbytes, int stream) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return_passed();
  const size_t needed = rounded(nbytes, ROUND_BYTES);
  const bool small = needed <= SMALL_BYTES;
  Block wanted{nullptr, needed, stream, small};
  auto fits = free_[small].lower_bound(&wanted);
  Block *block;
  if (fits != free_[small].end() && (*fits)->stream == stream) {
    block = *fits;
    free_[small].erase(fits);
  } else {
    block = fresh_segment(needed, stream, small);
  }
  split(block, needed);
  block->used = true;
  block->requested = nbytes;
  used_[block->data] = block;
  requested_bytes_ += block->requested;
  allocated_bytes_ += block->nbytes;
  peak_bytes_ = std::max(peak_bytes_, allocated_bytes_);
  return block;
}

DeviceAllocator::Block *DeviceAllocator::fresh_segment(size_t nbytes, int stream, bool small) {
  const size_t segment = segment_bytes(nbytes, small);
  if (reserved_bytes_ + segment > limit_bytes_) empty();
  TORCH_CHECK_WITH(OutOfMemoryError, reserved_bytes_ + segment <= limit_bytes_,
                   "CUDA out of memory. Tried to allocate ", nbytes, " bytes; the pretend GPU has ", limit_bytes_,
                   " and reserved ", reserved_bytes_);
  auto &gaps = gaps_[segment];
  size_t begin = end_;
  if (gaps.empty()) {
    end_ += segment;
    TORCH_CHECK(end_ <= SPAN_BYTES, "pretend GPU: its addresses are used up");
  } else {
    begin = gaps.back();
    gaps.pop_back();
  }
  reserved_bytes_ += segment;
  segments_++;
  return new Block{device_base() + begin, segment, stream, small};
}

void DeviceAllocator::split(Block *block, size_t nbytes) {
  const size_t rest = block->nbytes - nbytes;
  if (block->small ? rest < ROUND_BYTES : rest <= SMALL_BYTES) return;
  Block *other = new Block{block->data + nbytes, rest, block->stream, block->small};
  other->before = block;
  other->behind = block->behind;
  if (block->behind) block->behind->before = other;
  block->behind = other;
  block->nbytes = nbytes;
  free_[block->small].insert(other);
}

void DeviceAllocator::put(void *data) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  auto found = used_.find(data);
  TORCH_INTERNAL_ASSERT(found != used_.end(), "pretend GPU: memory that nobody has is freed");
  Block *block = found->second;
  used_.erase(found);
  requested_bytes_ -= block->requested;
  allocated_bytes_ -= block->nbytes;
  Leaving leaving{block, {}};
  for (int stream : block->other_streams) leaving.marks.emplace_back(stream, Scheduler::get().latest(stream));
  block->other_streams.clear();
  if (leaving.marks.empty()) return_block(block);
  else leaving_.push_back(std::move(leaving));
}

void DeviceAllocator::return_passed() {
  auto done = [](const std::pair<int, Ticket> &mark) { return Scheduler::get().passed(mark.first, mark.second); };
  for (size_t i = 0; i < leaving_.size();) {
    if (std::all_of(leaving_[i].marks.begin(), leaving_[i].marks.end(), done)) {
      return_block(leaving_[i].block);
      leaving_.erase(leaving_.begin() + i);
    } else {
      i++;
    }
  }
}

void DeviceAllocator::return_block(Block *block) {
  void *bytes = bytes_of(block->data);
  Scheduler::get().add(block->stream, [bytes, nbytes = block->nbytes] { memset(bytes, 0xFF, nbytes); });
  block->used = false;
  auto &blocks = free_[block->small];
  if (block->behind && !block->behind->used) {
    blocks.erase(block->behind);
    merge_behind(block);
  }
  if (block->before && !block->before->used) {
    block = block->before;
    blocks.erase(block);
    merge_behind(block);
  }
  blocks.insert(block);
}

void DeviceAllocator::merge_behind(Block *block) {
  Block *other = block->behind;
  block->nbytes += other->nbytes;
  block->behind = other->behind;
  if (other->behind) other->behind->before = block;
  delete other;
}

void DeviceAllocator::empty() {
  Scheduler::get().finish_all();
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return_passed();
  Scheduler::get().finish_all();  // what was just returned is still to be overwritten
  for (auto &blocks : free_) {
    for (auto at = blocks.begin(); at != blocks.end();) {
      Block *block = *at;
      if (block->before || block->behind) {
        ++at;
        continue;
      }
      at = blocks.erase(at);
      reserved_bytes_ -= block->nbytes;
      madvise(bytes_of(block->data), block->nbytes, MADV_DONTNEED);
      gaps_[block->nbytes].push_back(block->data - device_base());
      delete block;
    }
  }
}

}  // namespace pretend
