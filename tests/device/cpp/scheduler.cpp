#include "scheduler.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>

#include <chrono>
#include <cstdio>
#include <stdexcept>
#include <thread>

namespace pretend {
namespace {

constexpr int ASKS_AGAIN_US = 200;
constexpr int TURN_US_MAX = 300;  // how long random mode lets the device idle between two tasks
thread_local bool is_device_thread = false;
std::atomic<Listener> listener_{nullptr};

}  // namespace

Scheduler &Scheduler::get() {
  // Never destroyed: its thread outlives what the process tears down.
  static Scheduler *const scheduler = new Scheduler;
  return *scheduler;
}

void Scheduler::set_mode(Mode mode) {
  Lock lock(mutex_);
  mode_ = mode;
  for (Stream &stream : streams_) stream.early = false;
}

void Scheduler::set_early(int stream) {
  Lock lock(mutex_);
  streams_[stream].early = mode_ == Mode::alone;
}

void Scheduler::seed(unsigned value) {
  Lock lock(mutex_);
  random_.seed(value);
}

Ticket Scheduler::add(int stream, std::function<void()> task, std::function<bool()> able) {
  Ticket ticket;
  bool now;
  {
    Lock lock(mutex_);
    start();
    streams_[stream].tasks.push_back({std::move(task), -1, 0, std::move(able)});
    ticket = ++streams_[stream].given;
    now = early(stream);
  }
  work_.notify_all();
  if (now && !is_device_thread) finish(stream, ticket);
  return ticket;
}

void Scheduler::add_wait(int stream, int other, Ticket ticket) {
  Lock lock(mutex_);
  if (stream == other || streams_[other].done >= ticket) return;
  start();
  streams_[stream].tasks.push_back({nullptr, other, ticket});
  ++streams_[stream].given;
  work_.notify_all();
}

Ticket Scheduler::latest(int stream) {
  Lock lock(mutex_);
  return streams_[stream].given;
}

bool Scheduler::passed(int stream, Ticket ticket) {
  Lock lock(mutex_);
  return streams_[stream].done >= ticket;
}

void Scheduler::finish(int stream, Ticket ticket) {
  Lock lock(mutex_);
  if (streams_[stream].done >= ticket) return;
  wanted_.emplace_back(stream, ticket);
  work_.notify_all();
  moved_.wait(lock, [&] { return streams_[stream].done >= ticket; });
}

void Scheduler::finish_all() {
  for (int stream = 0; stream < STREAMS; stream++) finish(stream, latest(stream));
  Lock lock(mutex_);
  if (error_.empty()) return;
  std::string error;
  std::swap(error, error_);
  throw std::runtime_error("pretend GPU: " + error);
}

void Scheduler::start() {
  if (started_) return;
  started_ = true;
  std::thread([this] { loop(); }).detach();
}

void Scheduler::loop() {
  is_device_thread = true;
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  at::NoGradGuard no_grad;
  Lock lock(mutex_);
  while (true) {
    if (!wanted_.empty()) {
      run_wanted(lock);
    } else if (mode_ == Mode::random) {
      run_any(lock);
    } else {
      work_.wait_for(lock, std::chrono::milliseconds(50));
    }
  }
}

bool Scheduler::early(int stream) const {
  const bool is_default = stream == DEFAULT_STREAM;
  return mode_ == Mode::eager || (mode_ == Mode::copies && !is_default) || (mode_ == Mode::compute && is_default) ||
         streams_[stream].early;
}

bool Scheduler::ready(int stream) const {
  const auto &tasks = streams_[stream].tasks;
  if (tasks.empty()) return false;
  const Task &first = tasks.front();
  if (first.able && !first.able()) return false;
  return first.wait_stream < 0 || streams_[first.wait_stream].done >= first.wait_ticket;
}

void Scheduler::run_any(Lock &lock) {
  std::vector<int> able;
  for (int stream = 0; stream < STREAMS; stream++) {
    if (ready(stream)) able.push_back(stream);
  }
  if (able.empty()) {
    work_.wait_for(lock, std::chrono::milliseconds(50));
    return;
  }
  const int stream = able[random_() % able.size()];
  work_.wait_for(lock, std::chrono::microseconds(random_() % TURN_US_MAX));
  if (ready(stream)) run_first(lock, stream);
}

void Scheduler::run_first(Lock &lock, int stream) {
  Task task = std::move(streams_[stream].tasks.front());
  if (task.run) {
    lock.unlock();
    run_guarded(task.run);
    task.run = nullptr;  // what it holds goes before anybody hears that it is done
    lock.lock();
  }
  streams_[stream].tasks.pop_front();
  streams_[stream].done++;
  moved_.notify_all();
}

void Scheduler::run_wanted(Lock &lock) {
  bool ran = false;
  for (size_t i = 0; i < wanted_.size();) {
    const auto [stream, ticket] = wanted_[i];
    const bool done = streams_[stream].done >= ticket;
    const int next = done ? -1 : next_for(stream);
    if (done) {
      wanted_.erase(wanted_.begin() + i);
    } else if (next >= 0) {
      run_first(lock, next);
      ran = true;
    } else {
      i++;
    }
  }
  if (!ran && !wanted_.empty()) work_.wait_for(lock, std::chrono::microseconds(ASKS_AGAIN_US));
}

int Scheduler::next_for(int stream) const {
  while (!ready(stream)) {
    const Task &first = streams_[stream].tasks.front();
    if (first.wait_stream < 0) return -1;
    stream = first.wait_stream;
  }
  return stream;
}

void Scheduler::run_guarded(const std::function<void()> &task) {
  tasks_run_++;
  try {
    task();
  } catch (const std::exception &error) {
    fprintf(stderr, "pretend GPU: a task failed: %s\n", error.what());
    Lock lock(mutex_);
    if (error_.empty()) error_ = error.what();
  }
}

int &current_stream() {
  static thread_local int stream = DEFAULT_STREAM;
  return stream;
}

void listen(Listener listener) { listener_ = listener; }

void note_wait(const std::string &reason) {
  if (Listener listener = listener_) listener(reason.c_str());
}

}  // namespace pretend
