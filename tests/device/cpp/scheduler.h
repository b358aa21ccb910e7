// The order of work on the pretend GPU: streams of tasks, which one thread runs no earlier than the mode allows.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace pretend {

// When a task runs for which the host does not wait. A fence that is missing shows where one stream is early and the
// other is late; `copies` and `compute` are the two ways round.
enum class Mode {
  eager,    // at once
  late,     // not before the host waits for it, or for what comes behind it
  random,   // streams take turns at random moments
  copies,   // at once on all streams but the default one
  compute,  // at once on the default stream alone
  alone,    // at once on one other stream alone: `set_early` says which
};

constexpr int STREAMS = 33;
constexpr int DEFAULT_STREAM = 0;

using Ticket = uint64_t;  // tasks of a stream are numbered from 1

class Scheduler {
 public:
  static Scheduler &get();

  void set_mode(Mode mode);
  // Of mode `alone`; of several engines each may have one.
  void set_early(int stream);
  void seed(unsigned value);

  // `able`: the stream stands still until it says yes. It is asked again and again, and other streams go on.
  Ticket add(int stream, std::function<void()> task, std::function<bool()> able = nullptr);
  // What `stream` is given from now on waits until `other` has come to `ticket`.
  void add_wait(int stream, int other, Ticket ticket);

  Ticket latest(int stream);
  bool passed(int stream, Ticket ticket);
  // Run what it takes, and return when it is done.
  void finish(int stream, Ticket ticket);
  // All streams. Throws what the first task that failed has said since the last call.
  void finish_all();

  uint64_t tasks_run() const { return tasks_run_; }

 private:
  struct Task {
    std::function<void()> run;  // or, where `wait_stream` >= 0, nothing but waiting
    int wait_stream = -1;
    Ticket wait_ticket = 0;
    std::function<bool()> able = nullptr;
  };
  struct Stream {
    std::deque<Task> tasks;
    Ticket given = 0, done = 0;
    bool early = false;
  };
  using Lock = std::unique_lock<std::mutex>;

  [[noreturn]] void loop();
  void start();
  void run_first(Lock &lock, int stream);
  void run_wanted(Lock &lock);
  // A stream whose first task can run, and that has to for `stream` to go on; -1: all of that waits for other ranks.
  int next_for(int stream) const;
  bool early(int stream) const;
  bool ready(int stream) const;
  void run_any(Lock &lock);
  void run_guarded(const std::function<void()> &task);

  std::mutex mutex_;
  std::condition_variable work_, moved_;
  std::vector<Stream> streams_ = std::vector<Stream>(STREAMS);
  std::deque<std::pair<int, Ticket>> wanted_;
  Mode mode_ = Mode::late;
  std::mt19937 random_{1};
  std::string error_;
  std::atomic<uint64_t> tasks_run_{0};
  bool started_ = false;
};

// The stream that the calling thread gives work to.
int &current_stream();

// Somebody wants to know where the host waits for the device: called with the reason, in the thread that waits.
using Listener = void (*)(const char *reason);
void listen(Listener listener);
void note_wait(const std::string &reason);

}  // namespace pretend
