/* The C ABI of zero-infinity's native libraries.
 *
 * gcc, nvcc and cffi all read this file (`ffi.cdef` reads the part between the two CDEF lines without
 * changes, so the compilers and Python always have the same declarations). Rules:
 *
 *  - names start with zn_; handles are opaque; struct members have fixed widths; counts are int64_t
 *  - destinations first, then sources, count, options; threads or stream last
 *  - status: 0, -errno, or a positive cudaError_t; nothing prints, exits or throws
 *  - nothing here links torch or Python; every function may run with the GIL released
 */
#ifndef ZN_ABI_H
#define ZN_ABI_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The libraries are built with -fvisibility=hidden; they export only the functions declared here. */
#pragma GCC visibility push(default)

/* CDEF BEGIN */

/* ---- common ------------------------------------------------------------------------------- */

/* Hash of the sources this library was built from (hex, static storage). Python compares it with the
 * sources in the same folder and refuses a stale library. */
const char *zn_source_hash(void);

/* Text for a status: strerror for -errno, CUDA's text for a positive one (static storage). */
const char *zn_strerror(int32_t status);

/* ---- memory ------------------------------------------------------------------------------- */

/* ZN_MEM_HUGE requests transparent huge pages (the kernel may refuse them); ZN_MEM_TOUCH faults every
 * page in now, so that later steps have no page faults. */
enum { ZN_MEM_HUGE = 1, ZN_MEM_TOUCH = 2 };

/* Map exactly `nbytes` (rounded up to the page) of zeroed private memory, aligned to 2 MiB when
 * ZN_MEM_HUGE is set. -ENOMEM, or -EINVAL when nbytes < 1. */
int32_t zn_mem_alloc(void **out, int64_t nbytes, int32_t flags);

/* Map the first `nbytes` (rounded up to the page) of file `fd`, shared with other processes; flags as above. The file
 * must have that length. The mapping outlives the descriptor. -EINVAL when nbytes < 1, -ENOMEM, or mmap's -errno. */
int32_t zn_mem_share(void **out, int32_t fd, int64_t nbytes, int32_t flags);

/* Fault pages in for writing, without changing their bytes; `ptr` must lie on a page. -EINVAL, or -ENOMEM. */
int32_t zn_mem_touch(void *ptr, int64_t nbytes);

/* Unmap memory of zn_mem_alloc or zn_mem_share; with the same `nbytes`. */
int32_t zn_mem_free(void *ptr, int64_t nbytes);

/* Map `nbytes` (rounded up to the page) of private, writable pages that all read as 0xFF bytes,
 * which is NaN in every float type. All pages are backed by one small block, so the mapping costs
 * no memory until a page is written to. Free it with zn_mem_free. */
int32_t zn_mem_poison(void **out, int64_t nbytes);

/* ---- a table that processes share ----------------------------------------------------------- */

/* One number in memory that several processes map. A reader of a published number also sees everything that the
 * publisher wrote before (release and acquire). Cells lie on multiples of 8 bytes. */
void zn_board_publish(int64_t *cell, int64_t value);
int64_t zn_board_read(const int64_t *cell);

/* ---- asynchronous file I/O ---------------------------------------------------------------- */

typedef struct zn_aio zn_aio;

enum { ZN_AIO_READ = 0, ZN_AIO_WRITE = 1, ZN_AIO_SYNC = 2 };
/* Options: submit each chunk with its own system call; start the next queue_depth chunks only when all
 * earlier ones have ended. Both are for comparisons: they cost throughput. */
enum { ZN_AIO_SINGLE_SUBMIT = 1, ZN_AIO_IN_WAVES = 2 };
enum { ZN_AIO_IO_URING = 0, ZN_AIO_LIBAIO = 1, ZN_AIO_THREADS = 2 };

typedef struct {
  int32_t backend;      /* ZN_AIO_IO_URING, ZN_AIO_LIBAIO or ZN_AIO_THREADS */
  int32_t queue_depth;  /* limit of chunks in flight, 1..4096 */
  int32_t threads;      /* workers of the threads backend, 1..64 (others ignore it) */
  int32_t requests_max; /* requests accepted and not yet reported, 1..65536 */
  int32_t flags;        /* ZN_AIO_SINGLE_SUBMIT | ZN_AIO_IN_WAVES, or 0 */
  int32_t reserved;
  int64_t chunk_bytes;  /* largest transfer handed to the kernel; a multiple of 4096 */
} zn_aio_options;

typedef struct {
  uint64_t tag;    /* returned in the completion */
  int32_t op;      /* ZN_AIO_READ, ZN_AIO_WRITE or ZN_AIO_SYNC (fdatasync; offset, nbytes 0) */
  int32_t fd;
  int64_t offset;  /* bytes from the start of the file */
  int64_t nbytes;
  void *buffer;    /* must stay valid and unchanged until the completion has been taken */
} zn_aio_request;

typedef struct {
  uint64_t tag;
  int32_t status;      /* 0: every byte moved; else -errno (-ENODATA: end of file inside a read) */
  int32_t reserved;
  int64_t nbytes;      /* bytes moved: the request's on success, fewer on failure */
  int64_t fail_offset; /* file offset of the transfer that failed, -1 on success */
} zn_aio_completion;

typedef struct {
  int64_t read_bytes, write_bytes;       /* moved so far */
  int64_t requests, chunks;              /* finished so far */
  int64_t resumed, retried;              /* short transfers resumed; EINTR/EAGAIN retried */
  int64_t registered;                    /* transfers started through registered memory */
  int64_t busy_ns, read_ns, write_ns;    /* time with any transfer / a read / a write in flight */
} zn_aio_stats;

enum { ZN_FAULT_HELD = 0x7FFFFFFF };

/* Faults injected below the chunk logic, so that tests exercise the real code that resumes, retries and
 * reports. Rates are per chunk, in 1/65536; faults are drawn from a generator seeded with `seed`, so a
 * run can be repeated. All zero: no faults. */
typedef struct {
  uint64_t seed;
  int32_t status;        /* -errno that a failing transfer reports (-EIO, -ENOSPC, -EINTR, ...) */
  int32_t fail_rate;     /* transfers that fail with `status` */
  int32_t short_rate;    /* transfers cut short after a page or more (by less than a page when the
                            file allows it) */
  int32_t delay_rate;    /* transfers delayed by delay_us */
  int32_t delay_us;      /* ZN_FAULT_HELD: until the plan is replaced */
  int32_t op_mask;       /* bit ZN_AIO_READ / WRITE / SYNC: which operations get faults */
  int64_t skip;          /* let this many matching transfers pass first */
  int64_t count_max;     /* stop after this many faults; 0: no limit */
  int64_t begin, end;    /* only transfers that touch these bytes of their file match; end 0: any */
} zn_aio_fault;

/* 0 when `backend` works on this kernel, else the -errno of the failure (-ENOSYS: not compiled in,
 * -EPERM: blocked by seccomp or sysctl). Opens and closes a small queue to find out. */
int32_t zn_aio_probe(int32_t backend);

/* Open an engine. It owns one I/O thread (the threads backend: its workers), which keeps `queue_depth`
 * chunks in flight as long as requests wait, independently of the caller. All memory is allocated here.
 * -EINVAL on a bad option, else as zn_aio_probe. */
int32_t zn_aio_open(zn_aio **out, const zn_aio_options *options);

/* Accept all `count` requests, or none: -EAGAIN when the table is full, -EINVAL when an fd is negative,
 * nbytes < 0, or op is unknown. Requests start in order and may finish in any order. A request of 0
 * bytes completes at once. Any thread may call. */
int32_t zn_aio_submit(zn_aio *aio, const zn_aio_request *requests, int32_t count);

/* Take up to `max` completions; never blocks. Returns their number (>= 0). A request completes once: in
 * full or with an errno, and never while one of its chunks is in flight. */
int32_t zn_aio_poll(zn_aio *aio, zn_aio_completion *out, int32_t max);

/* An eventfd that is readable while completions wait to be taken: for poll, epoll and asyncio. */
int32_t zn_aio_event_fd(zn_aio *aio);

int32_t zn_aio_stats_get(zn_aio *aio, zn_aio_stats *out);

/* Register memory that requests will use: io_uring then pins its pages once, not per transfer. This is
 * optional; a chunk that is not completely inside one registered range is moved as without registering.
 * Any thread may call. Registered memory must not be unmapped before it is unregistered or the engine is
 * closed, and no request that uses it may be in flight then. Unregistering removes all ranges that were
 * registered within the given one.
 * 0, or -errno and nothing has changed: -ENOTSUP (not this backend, or before Linux 5.19), -ENOMEM or
 * -EPERM (RLIMIT_MEMLOCK), -EFAULT, -ENOSPC (256 ranges of up to 1 GiB), -EINVAL. */
int32_t zn_aio_register_memory(zn_aio *aio, void *ptr, int64_t nbytes);
int32_t zn_aio_unregister_memory(zn_aio *aio, void *ptr, int64_t nbytes);

/* Replace the fault plan (NULL: none). Takes effect with the next chunk; held chunks go on. */
int32_t zn_aio_inject(zn_aio *aio, const zn_aio_fault *fault);

/* Free the engine. -EBUSY, and nothing freed, while a request's completion has not been taken. */
int32_t zn_aio_close(zn_aio *aio);

/* ---- kernels on the CPU ------------------------------------------------------------------- */

enum { ZN_F32 = 0, ZN_BF16 = 1, ZN_F16 = 2 };

/* Elements per norm block. Ranges that are passed to kernels start on a multiple of it. */
enum { ZN_BLOCK_NUMEL = 4096 };

/* Optimizers, with their states in order; states in brackets may be missing. */
enum {
  ZN_ADAM = 0,    /* exp_avg, exp_avg_sq; AdamW too */
  ZN_LION = 1,    /* exp_avg */
  ZN_SGD = 2,     /* [momentum_buffer] */
  ZN_ADAGRAD = 3, /* sum */
  ZN_RMSPROP = 4, /* square_avg, [momentum_buffer], [grad_avg] */
  ZN_RULES = 5
};

/* The most states of a rule. */
enum { ZN_STATES = 3 };

/* Flags of a segment for SGD: its momentum_buffer begins with this update; nesterov. */
enum { ZN_FIRST = 1, ZN_NESTEROV = 2 };

/* One run of elements that share hyper-parameters. Python derives the fp32 values below from
 * doubles and from the parameter's own step count t = 1, 2, ... For Adam:
 *   step_size = lr / (1 - beta1^t) * sqrt(1 - beta2^t), eps = Adam's eps * sqrt(1 - beta2^t): both bias
 *   corrections, with one division less per element than in the usual form,
 *   decay = 1 - lr * weight_decay (decoupled), l2 = weight_decay (Adam's L2 term); the unused one
 *   is 1 or 0. A skipped segment (no gradient) leaves weight and state unchanged.
 * For the others: see zn_cpu_update. */
typedef struct {
  int64_t begin, end; /* elements, relative to the pointers of the call; begin <= end */
  int32_t skip;       /* 1: do not change the range */
  int32_t flags;
  float step_size, decay, l2, beta1, one_minus_beta1, beta2, one_minus_beta2, eps;
} zn_segment;

/* Where Adam's two moments are, and how they are stored:
 *   ZN_MOMENTS_F32   both are float
 *   ZN_MOMENTS_BF16  both are bf16
 *   ZN_MOMENTS_8BIT  both are uint8 codes of the ratio to a scale, which is the largest magnitude in a
 *                    block of 256 elements; exp_avg_scale and exp_avg_sq_scale have one float per block.
 *                    Codes are steps in the bits of the ratio, 16 per power of two near 1 and 8 below:
 *       exp_avg_sq   c = 0 .. 127 .. 255 is 1.125 * 2^-24 .. 2^-8 .. 1; never 0, since Adam divides
 *                    by its root: smaller values become the smallest code
 *       exp_avg      sign bit, and c = 0 is 0, 1 .. 63 .. 127 is 1.25 * 2^-12 .. 2^-4 .. 1
 *                    A block whose largest magnitude is below 2^-100 is all 0 (scale 0); one with an inf
 *                    or NaN is all NaN (scale NaN). All-zero bytes are moments of 0.
 *
 * Narrow moments (bf16, 8 bit) are widened, updated in fp32 and rounded back. With beta2 = 0.999 one
 * step may change exp_avg_sq by less than half a unit in its last place, so that with rounding to nearest
 * it would never decay. Hence they are rounded up or down at random, with the probability that keeps the
 * mean: each uses 16 bits of a hash of (coordinate, step), so that the result depends neither on threads
 * nor on how a space is cut. The weight is updated with the unrounded moments. */
enum { ZN_MOMENTS_F32 = 0, ZN_MOMENTS_BF16 = 1, ZN_MOMENTS_8BIT = 2 };

/* Elements per scale. */
enum { ZN_MOMENTS_BLOCK_NUMEL = 256 };

typedef struct {
  int32_t kind;
  int32_t reserved;
  void *exp_avg, *exp_avg_sq;
  float *exp_avg_scale, *exp_avg_sq_scale; /* ZN_MOMENTS_8BIT only */
  int64_t numel;  /* elements; a multiple of 256 with ZN_MOMENTS_8BIT */
  int64_t origin; /* coordinate of element 0, likewise; feeds the rounding */
  int64_t step;   /* optimizer step: feeds the rounding */
} zn_moments;

/* The name of the instruction set in use ("scalar", "avx2", "avx512"), chosen at first use. */
const char *zn_cpu_isa(void);

/* Use `name` from now on, "best" for the widest one: 0, or -ENOTSUP when this CPU lacks it, -EINVAL
 * when it is unknown. All of them give the same bits. */
int32_t zn_cpu_isa_select(const char *name);

/* One Adam / AdamW update over flat ranges, in one pass:
 *
 *   g = (float)grad * grad_scale         g += l2 * w (when l2 != 0)
 *   w = w * decay (when decay != 1)
 *   m = m + one_minus_beta1 * (g - m)
 *   v = v * beta2 + one_minus_beta2 * (g * g)
 *   w = w - step_size * (m / (sqrt(v) + eps))
 *
 * each a separate fp32 operation, rounded to nearest even, never contracted. `w` is the fp32 master.
 * How it is stored follows weight_dtype and master:
 *   ZN_F32,  master NULL   weight (fp32) is the master
 *   ZN_BF16, master NULL   weight (bf16) is the master, rounded up or down at random as bf16 moments are, by a hash of
 *                          (coordinate, step) in `moments`: to nearest, a step of less than half a unit would be lost
 *   ZN_BF16, master_f32 0  master = bf16 weight + int16 remainder (`master` points to int16_t):
 *                          bits = (weight << 16) + remainder; split by rounding half away from
 *                          zero; NaN becomes 0x7FC00000
 *   ZN_BF16/ZN_F16, master_f32 1  `master` points to fp32; weight gets its value rounded to nearest
 *                          even
 * `m` and `v` are the moments. Segments ascend and do not overlap. Elements outside of all segments do not
 * change; but with 8-bit moments each block that an unskipped segment overlaps is rounded again as a whole.
 * `threads` >= 1 splits on blocks of 4096; the result does not depend on it. -EINVAL on an unknown dtype or
 * kind, a NULL that is not allowed, or segments that do not ascend inside the arrays. */
int32_t zn_cpu_adamw(void *weight, int32_t weight_dtype, void *master, int32_t master_f32,
                     const zn_moments *moments, const void *grad, int32_t grad_dtype,
                     const zn_segment *segments, int64_t segment_count, float grad_scale,
                     int32_t threads);

/* As zn_cpu_adamw, for the other optimizers: `states` are ZN_STATES arrays of `numel` elements, fp32, NULL for a
 * missing state. Results equal torch's, bit for bit, on machines where torch uses fused multiply-adds: fma(x, y, z) is
 * x * y + z rounded once.
 *
 *   g = (float)grad * grad_scale         g = fma(l2, w, g) (when l2 != 0)
 *   w = w * decay (when decay != 1)
 *   LION     w = w - step_size * sign(fma(one_minus_beta1, g, m * beta1))
 *            m = fma(one_minus_beta2, g, m * beta2)
 *   SGD      b = fma(one_minus_beta1, g, b * beta1), or g with ZN_FIRST
 *            w = fma(-step_size, b, w); of fma(beta1, b, g) with ZN_NESTEROV, of g without a momentum_buffer
 *   ADAGRAD  s = fma(g, g, s)            w = w - step_size * g / (sqrt(s) + eps)
 *   RMSPROP  v = u = fma(one_minus_beta2 * g, g, v * beta2)
 *            m = lerp(m, g, one_minus_beta2)   u = fma(-m, m, u)    with a grad_avg
 *            b = b * beta1 + g / (sqrt(u) + eps)   w = fma(-step_size, b, w)   with a momentum_buffer, else
 *            w = w - step_size * g / (sqrt(u) + eps)
 *
 * -EINVAL also for Adam (use zn_cpu_adamw), for states that the rule does not have, and for missing ones. */
int32_t zn_cpu_update(int32_t rule, void *weight, int32_t weight_dtype, void *master, int32_t master_f32,
                      float *const *states, const void *grad, int32_t grad_dtype, int64_t numel,
                      const zn_segment *segments, int64_t segment_count, float grad_scale, int32_t threads);

/* Convert moments to fp32, and fp32 to moments. Storing rounds to nearest, so that it restores loaded values bit
 * for bit (`origin` and `step` are not used). Each array has `moments->numel` elements. */
int32_t zn_cpu_moments_load(float *exp_avg, float *exp_avg_sq, const zn_moments *moments,
                            int32_t threads);
int32_t zn_cpu_moments_store(const zn_moments *moments, const float *exp_avg,
                             const float *exp_avg_sq, int32_t threads);

/* out = (out_dtype)(in * scale); scale 1 converts only. f32 -> bf16/f16 rounds to nearest even.
 * `out` may be `in` when both have the same dtype. */
int32_t zn_cpu_cast(void *out, int32_t out_dtype, const void *in, int32_t in_dtype, int64_t numel,
                    float scale, int32_t threads);

/* sum (fp32) = sum + in, or = (float)first + (float)in when `first` is not NULL: gradient
 * accumulation from the second contribution on. */
int32_t zn_cpu_accumulate(float *sum, const void *first, int32_t first_dtype, const void *in,
                          int32_t in_dtype, int64_t numel, int32_t threads);

/* fp32 -> bf16 weight + int16 remainder (exact, half away from zero, NaN canonical), and back. */
int32_t zn_cpu_split(void *weight_bf16, int16_t *remainder, const float *in, int64_t numel,
                     int32_t threads);
int32_t zn_cpu_join(float *out, const void *weight_bf16, const int16_t *remainder, int64_t numel,
                    int32_t threads);

/* A sum of squares in two digits, high * 2^(48 bin) + low * 2^(48 (bin - 1)). `tagged` holds high in its low 59 bits,
 * and above them the tag bin - ZN_SQUARE_BIN_MIN. With inf or NaN among the elements the tag is ZN_SQUARE_NONFINITE,
 * their number replaces high, and low is 0. */
enum { ZN_SQUARE_DIGIT_BITS = 48, ZN_SQUARE_BIN_MIN = -7, ZN_SQUARE_TAG_SHIFT = 59, ZN_SQUARE_NONFINITE = 15 };
typedef struct {
  int64_t tagged, low;
} zn_square_sum;

/* One sum of squares per block of 4096 elements (the last may be shorter): `sums` has ceil(numel / 4096) entries. */
int32_t zn_cpu_block_sumsq(zn_square_sum *sums, const void *in, int32_t in_dtype, int64_t numel,
                           int32_t threads);

/* zn_cpu_cast and the block sums of the stored values, in one pass over memory: the same bits as
 * zn_cpu_cast(out, ...) followed by zn_cpu_block_sumsq(sums, out, ...). */
int32_t zn_cpu_cast_sumsq(void *out, int32_t out_dtype, zn_square_sum *sums, const void *in,
                          int32_t in_dtype, int64_t numel, float scale, int32_t threads);

/* The sum over ranks and its block sums, in one pass over memory. For each element, in fp32 and in this order:
 *   s = sources[0][i];  s = s + sources[1][i]; ...  s = s * scale;  stored[i] = s, or stored[i] + s with `add`
 * `stored` is fp32 or has the dtype of the sources (rounded to nearest even); `add` needs fp32. It may be one of the
 * sources. `sums` equal those of a later zn_cpu_block_sumsq(..., stored, ...). The result does not depend on
 * `threads`. -EINVAL when source_count < 1, for dtypes that do not fit, or a NULL. */
int32_t zn_cpu_reduce_ranks(void *stored, int32_t stored_dtype, zn_square_sum *sums,
                            const void *const *sources, int64_t source_count, int32_t in_dtype,
                            int64_t numel, float scale, int32_t add, int32_t threads);

/* CRC-32C (Castagnoli) of `nbytes` at `in`, continued from `crc` (0 to begin). */
uint32_t zn_cpu_crc32c(uint32_t crc, const void *in, int64_t nbytes);

/* ---- kernels on CUDA (the second library; device pointers, one stream) --------------------- */

/* Page-lock host memory of zn_mem_alloc, so that copies do not stop the stream. */
int32_t zn_cuda_host_register(void *ptr, int64_t nbytes);
int32_t zn_cuda_host_unregister(void *ptr);

/* Device addresses that read as NaN in every float type and share one granule of memory; `device` must be the current
 * one. `nbytes` is a multiple of the granule. zn_cuda_poison_granule: its bytes, or -ENOSYS if the driver cannot map
 * memory so: then allocate it. All work of the device with a range must have finished before it is unmapped. */
int64_t zn_cuda_poison_granule(int32_t device);
int32_t zn_cuda_poison_map(void **out, int64_t nbytes, int32_t device);
int32_t zn_cuda_poison_unmap(void *ptr, int64_t nbytes, int32_t device);

/* The same bits as the CPU functions of the same name. `segments` is a device pointer (and therefore not
 * checked); `moments` and `states` are host pointers to device pointers. */
int32_t zn_cuda_adamw(void *weight, int32_t weight_dtype, void *master, int32_t master_f32,
                      const zn_moments *moments, const void *grad, int32_t grad_dtype,
                      const zn_segment *segments, int64_t segment_count, float grad_scale,
                      void *stream);
int32_t zn_cuda_update(int32_t rule, void *weight, int32_t weight_dtype, void *master, int32_t master_f32,
                       float *const *states, const void *grad, int32_t grad_dtype, int64_t numel,
                       const zn_segment *segments, int64_t segment_count, float grad_scale, void *stream);
int32_t zn_cuda_moments_load(float *exp_avg, float *exp_avg_sq, const zn_moments *moments,
                             void *stream);
int32_t zn_cuda_moments_store(const zn_moments *moments, const float *exp_avg,
                              const float *exp_avg_sq, void *stream);
int32_t zn_cuda_cast(void *out, int32_t out_dtype, const void *in, int32_t in_dtype, int64_t numel,
                     float scale, void *stream);
int32_t zn_cuda_accumulate(float *sum, const void *first, int32_t first_dtype, const void *in,
                           int32_t in_dtype, int64_t numel, void *stream);
int32_t zn_cuda_split(void *weight_bf16, int16_t *remainder, const float *in, int64_t numel,
                      void *stream);
int32_t zn_cuda_join(float *out, const void *weight_bf16, const int16_t *remainder, int64_t numel,
                     void *stream);
int32_t zn_cuda_block_sumsq(zn_square_sum *sums, const void *in, int32_t in_dtype, int64_t numel,
                            void *stream);
int32_t zn_cuda_cast_sumsq(void *out, int32_t out_dtype, zn_square_sum *sums, const void *in,
                           int32_t in_dtype, int64_t numel, float scale, void *stream);

/* CDEF END */

#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif

#endif /* ZN_ABI_H */
