#include "wire.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <stdexcept>

#include "memory.h"

namespace pretend {
namespace {

constexpr size_t HEADS_BYTES = 4096, SLOT_BYTES = size_t(32) << 20;
constexpr auto LOOKS_AROUND = std::chrono::microseconds(500);
constexpr auto GIVES_UP = std::chrono::seconds(60);

// As NCCL's: added up in fp32 and rounded once, which for two ranks is what any order gives.
template <typename T, typename Wide = float>
void add_up(void *to, const std::vector<const char *> &sources, size_t offset, size_t nbytes) {
  for (size_t i = 0; i < nbytes / sizeof(T); i++) {
    Wide sum = 0;
    for (const char *source : sources) sum += static_cast<Wide>(reinterpret_cast<const T *>(source + offset)[i]);
    static_cast<T *>(to)[i] = static_cast<T>(sum);
  }
}

void add_up(Number number, void *to, const std::vector<const char *> &sources, size_t offset, size_t nbytes) {
  switch (number) {
    case Number::float32: return add_up<float>(to, sources, offset, nbytes);
    case Number::bfloat16: return add_up<c10::BFloat16>(to, sources, offset, nbytes);
    case Number::float16: return add_up<c10::Half>(to, sources, offset, nbytes);
    case Number::float64: return add_up<double, double>(to, sources, offset, nbytes);
    case Number::bytes: throw std::runtime_error("bytes cannot be added up");
  }
}

}  // namespace

Wire::Wire(const std::string &path, int rank, int size, int stream)
    : path_(path), rank_(rank), size_(size), stream_(stream) {
  const size_t nbytes = HEADS_BYTES + size * SLOT_BYTES;
  const int file = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0 || ftruncate(file, nbytes) != 0) throw std::runtime_error("pretend GPU: cannot open " + path);
  void *mapped = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  ::close(file);
  if (mapped == MAP_FAILED) throw std::runtime_error("pretend GPU: cannot map " + path);
  file_ = static_cast<char *>(mapped);
  std::thread([this] { hurry(); }).detach();
}

char *Wire::slot(int rank) const { return file_ + HEADS_BYTES + rank * SLOT_BYTES; }

void Wire::launch(Message message) {
  message.to = bytes_of(message.to);
  message.from = bytes_of(message.from);
  uint64_t number;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    number = ++launched_;
  }
  Scheduler &device = Scheduler::get();
  auto may_give = [=, this] {
    head(rank_).wanted = number;
    return all_have(&Head::left, number - 1);
  };
  const Ticket given = device.add(stream_, [=, this] { give(number, message); }, may_give);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    gives_.push_back(given);
  }
  auto may_take = [=, this] { return all_have(&Head::arrived, number); };
  const Ticket taken = device.add(stream_, [=, this] { take(number, message); }, may_take);
  std::lock_guard<std::mutex> lock(mutex_);
  last_ = taken;
}

void Wire::give(uint64_t number, const Message &message) {
  if (message.nbytes > SLOT_BYTES) throw std::runtime_error("a message is larger than its slot");
  Head &mine = head(rank_);
  memcpy(slot(rank_), message.from, message.nbytes);
  mine.what = static_cast<uint64_t>(message.what);
  mine.nbytes = message.nbytes;
  mine.arrived = number;
}

void Wire::take(uint64_t number, const Message &message) {
  Head &mine = head(rank_);
  for (int rank = 0; rank < size_; rank++) {
    if (head(rank).arrived < number) throw std::runtime_error(aborted_ ? "a collective was aborted" : "a rank is late");
    if (head(rank).what != mine.what || head(rank).nbytes != mine.nbytes) {
      throw std::runtime_error("ranks run different collectives at one time");
    }
  }
  combine(message);
  mine.left = number;
}

// Or there is no sense in waiting any longer.
bool Wire::all_have(std::atomic<uint64_t> Head::*counter, uint64_t number) {
  const auto now = std::chrono::steady_clock::now();
  if (asked_since_ == std::chrono::steady_clock::time_point{}) asked_since_ = now;
  bool all = true;
  for (int rank = 0; rank < size_; rank++) all = all && head(rank).*counter >= number;
  if (!all && !aborted_ && now - asked_since_ < GIVES_UP) return false;
  asked_since_ = {};
  return true;
}

void Wire::combine(const Message &message) const {
  const size_t whole = message.nbytes, part = whole / size_;
  char *to = static_cast<char *>(message.to);
  std::vector<const char *> slots;
  for (int rank = 0; rank < size_; rank++) slots.push_back(slot(rank));
  switch (message.what) {
    case Collective::all_gather:
      for (int rank = 0; rank < size_; rank++) memcpy(to + rank * whole, slots[rank], whole);
      break;
    case Collective::exchange:
      for (int rank = 0; rank < size_; rank++) memcpy(to + rank * part, slots[rank] + rank_ * part, part);
      break;
    case Collective::reduce_scatter: add_up(message.number, to, slots, rank_ * part, part); break;
    case Collective::all_reduce: add_up(message.number, to, slots, 0, whole); break;
    case Collective::broadcast: memcpy(to, slots[message.root], whole); break;
  }
}

// A real device goes on by itself. This one may be as late as its mode says, but not while another rank's waits for it:
// the host of that rank may be what this rank's host waits for.
void Wire::hurry() {
  while (!ended()) {
    std::this_thread::sleep_for(LOOKS_AROUND);
    uint64_t wanted = 0;
    for (int rank = 0; rank < size_; rank++) wanted = std::max(wanted, head(rank).wanted.load());
    if (wanted <= head(rank_).arrived.load()) continue;
    Ticket ticket = 0;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (gives_.size() >= wanted) ticket = gives_[wanted - 1];
    }
    if (ticket != 0) Scheduler::get().finish(stream_, ticket);
  }
  munmap(file_, HEADS_BYTES + size_ * SLOT_BYTES);
  unlink(path_.c_str());
}

bool Wire::ended() {
  if (!closed_) return false;
  std::lock_guard<std::mutex> lock(mutex_);
  return launched_ == 0 || (gives_.size() == launched_ && last_ > gives_.back() && Scheduler::get().passed(stream_, last_));
}

}  // namespace pretend
