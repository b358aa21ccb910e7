// Collectives between processes that have a pretend GPU each, as NCCL runs them: the call returns, the work is a task on a
// stream, and it moves nothing before the devices of all ranks have come to it. The data goes through a file that the
// ranks share.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "scheduler.h"

namespace pretend {

enum class Collective { all_gather, reduce_scatter, exchange, all_reduce, broadcast };
enum class Number { bytes, float32, bfloat16, float16, float64 };

struct Message {
  Collective what;
  Number number;
  void *to;
  const void *from;
  size_t nbytes;  // of `from`
  int root;
};

class Wire {
 public:
  // `path` is the same on all ranks; `stream` is that of the tasks.
  Wire(const std::string &path, int rank, int size, int stream);

  void launch(Message message);
  // Whatever waits for other ranks fails.
  void abort() { aborted_ = true; }
  // Nothing more is launched. What has been comes to its end, and then the file is let go.
  void close() { closed_ = true; }

 private:
  struct Head {  // of a rank; in the file
    std::atomic<uint64_t> wanted, arrived, left;
    std::atomic<uint64_t> what, nbytes;
  };

  Head &head(int rank) const { return reinterpret_cast<Head *>(file_)[rank]; }
  char *slot(int rank) const;
  // Both run on the stream: give what this rank has, when all have left the collective before; take what there is, when
  // all have given.
  void give(uint64_t number, const Message &message);
  void take(uint64_t number, const Message &message);
  bool all_have(std::atomic<uint64_t> Head::*counter, uint64_t number);
  void combine(const Message &message) const;
  void hurry();
  bool ended();

  const std::string path_;
  const int rank_, size_, stream_;
  char *file_;
  std::mutex mutex_;
  std::vector<Ticket> gives_;  // of the collectives that this rank has launched
  Ticket last_ = 0;
  uint64_t launched_ = 0;
  std::atomic<bool> aborted_{false}, closed_{false};
  std::chrono::steady_clock::time_point asked_since_{};  // without success; on the device's thread
};

}  // namespace pretend
