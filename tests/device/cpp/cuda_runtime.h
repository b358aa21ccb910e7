// CUDA for g++: one thread of the host runs the threads of a block as fibers, one block after the other. A launch is a
// task on a stream of the pretend GPU; `kernel<<<grid, block, shared, stream>>>(...)` has been rewritten to
// `pretend_launch(kernel, grid, block, shared, stream)(...)`.
#pragma once

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <functional>
#include <tuple>
#include <vector>

#define __global__ static
#define __device__
#define __host__
// Kernels run one at a time, in the device's thread; a template has a variable for each of its instances.
#define __shared__ static

typedef void *cudaStream_t;
typedef int cudaError_t;
enum { cudaSuccess = 0, cudaErrorInvalidConfiguration = 9, cudaHostRegisterPortable = 1 };

struct pretend_dim {
  unsigned x, y, z;
};
inline pretend_dim threadIdx, blockIdx, blockDim, gridDim;

// ---- arithmetic: IEEE's, but a NaN has the device's payload ---------------------------------------------------------

static inline uint32_t __float_as_uint(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}
static inline float __uint_as_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
static inline double pretend_double(uint64_t bits) {
  double value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
static inline float pretend_result(float value) { return value == value ? value : __uint_as_float(0x7FFFFFFFu); }
static inline double pretend_result(double value) {
  return value == value ? value : pretend_double(0xFFF8000000000001u);
}

static inline float __fadd_rn(float a, float b) { return pretend_result(a + b); }
static inline float __fsub_rn(float a, float b) { return pretend_result(a - b); }
static inline float __fmul_rn(float a, float b) { return pretend_result(a * b); }
static inline float __fdiv_rn(float a, float b) { return pretend_result(a / b); }
static inline float __fmaf_rn(float a, float b, float c) { return pretend_result(fmaf(a, b, c)); }
static inline float __fsqrt_rn(float a) { return pretend_result(sqrtf(a)); }
static inline double __dadd_rn(double a, double b) { return pretend_result(a + b); }
static inline double __dsub_rn(double a, double b) { return pretend_result(a - b); }
static inline double __dmul_rn(double a, double b) { return pretend_result(a * b); }

template <typename T>
static inline T min(T a, T b) { return a < b ? a : b; }
template <typename T>
static inline T max(T a, T b) { return a > b ? a : b; }

// ---- threads of a block ---------------------------------------------------------------------------------------------

// Save the registers and the stack pointer, and go on where `load` was saved.
extern "C" void pretend_switch(void **save, void *load);
__asm__(
    ".weak pretend_switch\n"
    ".type pretend_switch,@function\n"
    "pretend_switch:\n"
    " pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
    " movq %rsp,(%rdi)\n movq %rsi,%rsp\n"
    " popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n"
    " ret\n");

class pretend_block {
 public:
  static pretend_block &self() {
    static pretend_block block;
    return block;
  }

  void run(unsigned threads, const std::function<void()> &kernel) {
    if (threads > fibers_.size()) make_stacks(threads);
    kernel_ = &kernel;
    unsigned running = threads;
    for (unsigned thread = 0; thread < threads; thread++) prepare(thread);
    for (unsigned round = 0; running > 0; round++) {
      // From the last thread to the first, and back: what forgets a barrier meets both orders.
      for (unsigned i = 0; i < threads; i++) running -= resume(round % 2 ? i : threads - 1 - i);
      any_before_ = any_;
      any_ = 0;
    }
  }

  // Where every thread has come here, whether one of them said yes.
  int barrier(int value) {
    any_ |= value != 0;
    pretend_switch(&fibers_[now_].stack, host_stack_);
    return any_before_;
  }

  uint64_t exchange(uint64_t value, int mask) {
    const unsigned thread = now_;
    fibers_[thread].given = value;
    barrier(0);
    const uint64_t others = fibers_[thread ^ (unsigned)mask].given;
    barrier(0);
    return others;
  }

 private:
  static constexpr size_t STACK_BYTES = 64 << 10;
  static constexpr int SAVED_REGISTERS = 6;
  struct fiber {
    void *stack;
    bool ended;
    uint64_t given;
  };

  static void enter() {
    pretend_block &block = self();
    (*block.kernel_)();
    block.fibers_[block.now_].ended = true;
    pretend_switch(&block.fibers_[block.now_].stack, block.host_stack_);
    abort();
  }

  void make_stacks(unsigned threads) {
    if (stacks_) munmap(stacks_, fibers_.size() * STACK_BYTES);
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS;
    stacks_ = (char *)mmap(nullptr, threads * STACK_BYTES, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (stacks_ == MAP_FAILED) abort();
    fibers_.resize(threads);
  }

  void prepare(unsigned thread) {
    void **top = (void **)(stacks_ + (size_t)(thread + 1) * STACK_BYTES);
    *--top = nullptr;  // nobody returns from `enter`
    *--top = (void *)&enter;
    for (int i = 0; i < SAVED_REGISTERS; i++) *--top = nullptr;
    fibers_[thread] = {top, false, 0};
  }

  // Until its next barrier or its end; 1 if it ended.
  unsigned resume(unsigned thread) {
    if (fibers_[thread].ended) return 0;
    now_ = thread;
    threadIdx = {thread, 0, 0};
    pretend_switch(&host_stack_, fibers_[thread].stack);
    return fibers_[thread].ended;
  }

  char *stacks_ = nullptr;
  std::vector<fiber> fibers_;
  void *host_stack_ = nullptr;
  const std::function<void()> *kernel_ = nullptr;
  unsigned now_ = 0;
  int any_ = 0, any_before_ = 0;
};

static inline void __syncthreads() { pretend_block::self().barrier(0); }
static inline int __syncthreads_or(int value) { return pretend_block::self().barrier(value); }
// All threads of the block must come here, which is more than CUDA asks for.
template <typename T>
static inline T __shfl_xor_sync(uint32_t, T value, int mask) {
  static_assert(sizeof(T) <= sizeof(uint64_t), "a register or two");
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof value);
  bits = pretend_block::self().exchange(bits, mask);
  memcpy(&value, &bits, sizeof value);
  return value;
}

// ---- the runtime ----------------------------------------------------------------------------------------------------

extern "C" {
void pretend_enqueue(void *stream, void (*task)(void *), void *argument);
void *pretend_bytes_of(void *address);
int pretend_host_register(void *address, size_t nbytes);
int pretend_host_unregister(void *address);
}

inline int &pretend_error() {
  static thread_local int error;
  return error;
}
static inline cudaError_t cudaGetLastError() {
  const int error = pretend_error();
  pretend_error() = cudaSuccess;
  return error;
}
static inline const char *cudaGetErrorString(cudaError_t) { return "an error of the pretend GPU"; }
static inline cudaError_t cudaHostRegister(void *address, size_t nbytes, int) {
  return pretend_error() = pretend_host_register(address, nbytes);
}
static inline cudaError_t cudaHostUnregister(void *address) {
  return pretend_error() = pretend_host_unregister(address);
}

// An argument of a kernel whose addresses, also those inside a struct, are where the device's bytes are.
template <typename T>
static T pretend_argument(T value) {
  for (size_t at = 0; at + sizeof(void *) <= sizeof(T); at += sizeof(void *)) {
    void *address;
    memcpy(&address, (char *)&value + at, sizeof address);
    address = pretend_bytes_of(address);
    memcpy((char *)&value + at, &address, sizeof address);
  }
  return value;
}

template <typename... P>
struct pretend_launcher {
  void (*kernel)(P...);
  uint64_t grid;
  unsigned block;
  cudaStream_t stream;

  void operator()(P... arguments) const {
    if (grid < 1 || grid > 0x7FFFFFFFu || block < 1 || block > 1024) {
      pretend_error() = cudaErrorInvalidConfiguration;
      return;
    }
    auto run = [kernel = kernel, grid = grid, block = block, given = std::make_tuple(pretend_argument(arguments)...)] {
      const std::function<void()> thread = [&] { std::apply(kernel, given); };
      gridDim = {(unsigned)grid, 1, 1};
      blockDim = {block, 1, 1};
      for (uint64_t i = 0; i < grid; i++) {
        blockIdx = {(unsigned)i, 0, 0};
        pretend_block::self().run(block, thread);
      }
    };
    using Task = decltype(run);
    auto call = [](void *task) {
      (*(Task *)task)();
      delete (Task *)task;
    };
    pretend_enqueue(stream, call, new Task(std::move(run)));
  }
};

template <typename... P>
static pretend_launcher<P...> pretend_launch(void (*kernel)(P...), uint64_t grid, unsigned block, size_t,
                                             cudaStream_t on) {
  return {kernel, grid, block, on};
}
