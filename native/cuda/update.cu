/* Optimizer updates over flat device ranges: the same bits as zn_cpu_adamw and zn_cpu_update. */
#include "moments.cuh"

#define ZN_NAME(name) name
#define ZN_INLINE __device__ static inline
#define ZN_FMAF __fmaf_rn
#define ZN_SQRTF __fsqrt_rn
#include "../include/zn_rules.h"

namespace {

/* Enough blocks to fill any GPU of today. */
constexpr unsigned UPDATE_BLOCKS = 2048;

enum Master { IN_WEIGHT, SPLIT, BESIDE_BF16, BESIDE_F16, ROUNDED };

struct Arrays {
  void *weight, *master;
  int32_t rule, present;   /* the optimizer, and a bit for each of its states */
  void *states[ZN_STATES]; /* kernels take 8-bit codes from `moments` instead */
  zn_moments moments;      /* Adam's */
  const void *grad;
  float grad_scale;
  bool aligned; /* WIDE elements can be loaded and stored at once */
};

/* Elements that a thread moves with one load or store of each array: 16 bytes of fp32. */
constexpr int WIDE = 4;

template <typename T, int WIDTH>
struct alignas(WIDTH * sizeof(T)) Run {
  T at[WIDTH];
};

template <typename T, int WIDTH>
__device__ Run<T, WIDTH> &run_at(const void *array, int64_t i) {
  return *(Run<T, WIDTH> *)((T *)array + i);
}

template <int DTYPE>
struct Stored {
  using type = uint16_t;
};
template <>
struct Stored<ZN_F32> {
  using type = float;
};

template <int DTYPE, int WIDTH>
__device__ void load(float (&values)[WIDTH], const void *array, int64_t i) {
  const auto run = run_at<typename Stored<DTYPE>::type, WIDTH>(array, i);
  for (int k = 0; k < WIDTH; k++) values[k] = zn_load<DTYPE>(run.at, k);
}

template <int DTYPE, int WIDTH>
__device__ void store(void *array, int64_t i, const float (&values)[WIDTH]) {
  Run<typename Stored<DTYPE>::type, WIDTH> run;
  for (int k = 0; k < WIDTH; k++) zn_store<DTYPE>(run.at, k, values[k]);
  run_at<typename Stored<DTYPE>::type, WIDTH>(array, i) = run;
}

template <int MASTER, int WIDTH>
__device__ void load_masters(float (&w)[WIDTH], const Arrays &a, int64_t i) {
  if (MASTER == SPLIT) {
    const auto weights = run_at<uint16_t, WIDTH>(a.weight, i);
    const auto remainders = run_at<int16_t, WIDTH>(a.master, i);
    for (int k = 0; k < WIDTH; k++) w[k] = zn_join_one(weights.at[k], remainders.at[k]);
  } else if (MASTER == ROUNDED) {
    load<ZN_BF16>(w, a.weight, i);
  } else {
    load<ZN_F32>(w, MASTER == IN_WEIGHT ? a.weight : a.master, i);
  }
}

template <int MASTER, int WIDTH>
__device__ void store_masters(const Arrays &a, int64_t i, const float (&w)[WIDTH]) {
  if (MASTER == SPLIT) {
    Run<uint16_t, WIDTH> weights;
    Run<int16_t, WIDTH> remainders;
    for (int k = 0; k < WIDTH; k++) zn_split_one(weights.at + k, remainders.at + k, w[k]);
    run_at<uint16_t, WIDTH>(a.weight, i) = weights;
    run_at<int16_t, WIDTH>(a.master, i) = remainders;
  } else if (MASTER == ROUNDED) {
    Run<uint16_t, WIDTH> weights;
    for (int k = 0; k < WIDTH; k++)
      weights.at[k] = zn_round_bf16(w[k], zn_noise_of_master(zn_counter_at(a.moments, i + k)));
    run_at<uint16_t, WIDTH>(a.weight, i) = weights;
  } else {
    store<ZN_F32>(MASTER == IN_WEIGHT ? a.weight : a.master, i, w);
    if (MASTER != IN_WEIGHT) store<MASTER == BESIDE_BF16 ? ZN_BF16 : ZN_F16>(a.weight, i, w);
  }
}

/* Update WIDTH elements from `i` on; their states are in registers. */
template <int MASTER, int GRAD_DTYPE, int WIDTH>
__device__ void update(const Arrays &a, int rule, int present, const zn_segment &s, int64_t i,
                       float (&states)[ZN_STATES][WIDTH]) {
  float w[WIDTH], g[WIDTH];
  load_masters<MASTER>(w, a, i);
  load<GRAD_DTYPE>(g, a.grad, i);
  for (int k = 0; k < WIDTH; k++) {
    const float scaled = __fmul_rn(g[k], a.grad_scale);
    update_one(rule, present, &s, &w[k], scaled, &states[0][k], &states[1][k], &states[2][k]);
    for (int p = 0; p < ZN_STATES; p++) states[p][k] = __uint_as_float(zn_canonical_bits(states[p][k]));
  }
  store_masters<MASTER>(a, i, w);
}

/* The same, with fp32 or bf16 states in memory. For Adam the formula is known at compile time; the others, which memory
 * bandwidth limits as well, share one kernel. */
template <bool ADAM, int MASTER, int GRAD_DTYPE, int STATE_DTYPE, int WIDTH>
__device__ void update_in_place(const Arrays &a, const zn_segment &s, int64_t i) {
  const int rule = ADAM ? (int)ZN_ADAM : a.rule, present = ADAM ? 3 : a.present;
  float states[ZN_STATES][WIDTH] = {};
  for (int p = 0; p < ZN_STATES; p++) {
    if (present >> p & 1) load<STATE_DTYPE>(states[p], a.states[p], i);
  }
  update<MASTER, GRAD_DTYPE>(a, rule, present, s, i, states);
  for (int p = 0; p < ZN_STATES; p++) {
    if (!(present >> p & 1)) continue;
    if (STATE_DTYPE == ZN_F32) {
      store<ZN_F32>(a.states[p], i, states[p]);
    } else {
      Run<uint16_t, WIDTH> run;
      for (int k = 0; k < WIDTH; k++) {
        const uint32_t noise = zn_noise_at(a.moments, i + k);
        run.at[k] = zn_round_bf16(states[p][k], p == 0 ? noise & 0xFFFFu : noise >> 16);
      }
      run_at<uint16_t, WIDTH>(a.states[p], i) = run;
    }
  }
}

/* Every block strides through every segment: the host cannot see their lengths (they lie on the device), and a long
 * segment gets the whole GPU, independently of the others. */
template <bool ADAM, int MASTER, int GRAD_DTYPE, int STATE_DTYPE>
__global__ void in_place_kernel(Arrays arrays, const zn_segment *segments, int64_t segment_count) {
  const int64_t thread = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, stride = (int64_t)gridDim.x * blockDim.x;
  for (int64_t n = 0; n < segment_count; n++) {
    const zn_segment segment = segments[n];
    if (segment.skip) continue;
    /* Elements before the first whole run, whole runs, elements after the last one. */
    int64_t first = segment.end, last = segment.end;
    if (arrays.aligned) {
      first = min((segment.begin + WIDE - 1) / WIDE * WIDE, segment.end);
      last = max(segment.end / WIDE * WIDE, first);
    }
    for (int64_t i = segment.begin + thread; i < first; i += stride)
      update_in_place<ADAM, MASTER, GRAD_DTYPE, STATE_DTYPE, 1>(arrays, segment, i);
    for (int64_t i = first + thread * WIDE; i < last; i += stride * WIDE)
      update_in_place<ADAM, MASTER, GRAD_DTYPE, STATE_DTYPE, WIDE>(arrays, segment, i);
    for (int64_t i = last + thread; i < segment.end; i += stride)
      update_in_place<ADAM, MASTER, GRAD_DTYPE, STATE_DTYPE, 1>(arrays, segment, i);
  }
}

/* The first segment that ends after element `i`; `segment_count` if none does. */
__device__ int64_t segment_after(const zn_segment *segments, int64_t segment_count, int64_t i) {
  int64_t low = 0, high = segment_count;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (segments[middle].end > i) high = middle;
    else low = middle + 1;
  }
  return low;
}

/* 8-bit moments: a CUDA block processes one block of elements at a time, with one thread per element. */
template <int MASTER, int GRAD_DTYPE>
__global__ void blocks_kernel(Arrays arrays, const zn_segment *segments, int64_t segment_count) {
  const int64_t block_count = arrays.moments.numel / ZN_MOMENTS_BLOCK_NUMEL;
  for (int64_t block = blockIdx.x; block < block_count; block += gridDim.x) {
    const int64_t begin = block * ZN_MOMENTS_BLOCK_NUMEL, i = begin + threadIdx.x;
    int64_t k = segment_after(segments, segment_count, begin);
    while (k < segment_count && segments[k].end <= i) k++;
    const bool mine = k < segment_count && segments[k].begin <= i && !segments[k].skip;
    if (!__syncthreads_or(mine)) continue; /* no bit may change */
    float states[ZN_STATES][1] = {};
    zn_block_load(states[0][0], states[1][0], arrays.moments, block);
    if (mine) update<MASTER, GRAD_DTYPE>(arrays, ZN_ADAM, 3, segments[k], i, states);
    zn_block_store(arrays.moments, states[0][0], states[1][0], block, zn_noise_at(arrays.moments, i));
  }
}

__global__ void load_kernel(float *exp_avg, float *exp_avg_sq, zn_moments moments) {
  for (int64_t block = blockIdx.x; block < moments.numel / ZN_MOMENTS_BLOCK_NUMEL; block += gridDim.x) {
    const int64_t i = block * ZN_MOMENTS_BLOCK_NUMEL + threadIdx.x;
    zn_block_load(exp_avg[i], exp_avg_sq[i], moments, block);
  }
}

__global__ void store_kernel(zn_moments moments, const float *exp_avg, const float *exp_avg_sq) {
  for (int64_t block = blockIdx.x; block < moments.numel / ZN_MOMENTS_BLOCK_NUMEL; block += gridDim.x) {
    const int64_t i = block * ZN_MOMENTS_BLOCK_NUMEL + threadIdx.x;
    zn_block_store(moments, exp_avg[i], exp_avg_sq[i], block, ZN_NOISE_NEAREST);
  }
}

template <int MASTER>
int32_t launch(const Arrays &arrays, int32_t grad_dtype, const zn_segment *segments, int64_t segment_count,
               cudaStream_t stream) {
  static_assert(ZN_THREADS == ZN_MOMENTS_BLOCK_NUMEL, "one thread for each element of a block");
  zn_with_dtype(grad_dtype, [&](auto dtype) {
    constexpr int GRAD_DTYPE = decltype(dtype)::value;
    auto kernel = blocks_kernel<MASTER, GRAD_DTYPE>;
    if (arrays.moments.kind == ZN_MOMENTS_F32) kernel = in_place_kernel<true, MASTER, GRAD_DTYPE, ZN_F32>;
    if (arrays.moments.kind == ZN_MOMENTS_BF16) kernel = in_place_kernel<true, MASTER, GRAD_DTYPE, ZN_BF16>;
    if (arrays.rule != ZN_ADAM) kernel = in_place_kernel<false, MASTER, GRAD_DTYPE, ZN_F32>;
    kernel<<<UPDATE_BLOCKS, ZN_THREADS, 0, stream>>>(arrays, segments, segment_count);
  });
  return zn_launched();
}

bool moments_valid(const zn_moments *moments) {
  if (moments == nullptr || moments->kind < ZN_MOMENTS_F32 || moments->kind > ZN_MOMENTS_8BIT) return false;
  if (moments->numel < 0 || moments->origin < 0) return false;
  if (moments->numel == 0) return true;
  if (!moments->exp_avg || !moments->exp_avg_sq) return false;
  if (moments->kind != ZN_MOMENTS_8BIT) return true;
  return moments->exp_avg_scale && moments->exp_avg_sq_scale && moments->numel % ZN_MOMENTS_BLOCK_NUMEL == 0 &&
         moments->origin % ZN_MOMENTS_BLOCK_NUMEL == 0;
}

/* The allowed sets of states per rule: bit n is set if the set with bit mask n is allowed. */
constexpr int32_t PRESENT[ZN_RULES] = {1 << 3, 1 << 1, 1 << 0 | 1 << 1, 1 << 1, 1 << 1 | 1 << 3 | 1 << 5 | 1 << 7};

/* Check the rest of the arguments and launch; `arrays` is complete except for `aligned`, which is set here. */
int32_t start(Arrays &arrays, int32_t weight_dtype, int32_t master_f32, int32_t grad_dtype, int64_t numel,
              const zn_segment *segments, int64_t segment_count, void *stream) {
  if (!zn_is_dtype(weight_dtype) || !zn_is_dtype(grad_dtype) || segment_count < 0) return -EINVAL;
  const bool rounded = weight_dtype == ZN_BF16 && arrays.master == nullptr;
  if (rounded ? arrays.rule != ZN_ADAM : (weight_dtype == ZN_F32) != (arrays.master == nullptr)) return -EINVAL;
  if (weight_dtype == ZN_F16 && !master_f32) return -EINVAL;
  if (!(PRESENT[arrays.rule] >> arrays.present & 1)) return -EINVAL;
  if (segment_count == 0 || numel == 0) return 0;
  if (!arrays.weight || !arrays.grad || !segments) return -EINVAL;
  uintptr_t address = (uintptr_t)arrays.weight | (uintptr_t)arrays.master | (uintptr_t)arrays.grad;
  for (const void *state : arrays.states) address |= (uintptr_t)state;
  arrays.aligned = address % (WIDE * sizeof(float)) == 0;
  const cudaStream_t on = (cudaStream_t)stream;
  if (weight_dtype == ZN_F32) return launch<IN_WEIGHT>(arrays, grad_dtype, segments, segment_count, on);
  if (weight_dtype == ZN_F16) return launch<BESIDE_F16>(arrays, grad_dtype, segments, segment_count, on);
  if (rounded) return launch<ROUNDED>(arrays, grad_dtype, segments, segment_count, on);
  if (master_f32) return launch<BESIDE_BF16>(arrays, grad_dtype, segments, segment_count, on);
  return launch<SPLIT>(arrays, grad_dtype, segments, segment_count, on);
}

}  // namespace

int32_t zn_cuda_adamw(void *weight, int32_t weight_dtype, void *master, int32_t master_f32, const zn_moments *moments,
                      const void *grad, int32_t grad_dtype, const zn_segment *segments, int64_t segment_count,
                      float grad_scale, void *stream) {
  if (!moments_valid(moments)) return -EINVAL;
  Arrays arrays = {weight, master, ZN_ADAM, 3, {moments->exp_avg, moments->exp_avg_sq}, *moments, grad, grad_scale,
                   false};
  return start(arrays, weight_dtype, master_f32, grad_dtype, moments->numel, segments, segment_count, stream);
}

int32_t zn_cuda_update(int32_t rule, void *weight, int32_t weight_dtype, void *master, int32_t master_f32,
                       float *const *states, const void *grad, int32_t grad_dtype, int64_t numel,
                       const zn_segment *segments, int64_t segment_count, float grad_scale, void *stream) {
  if (rule <= ZN_ADAM || rule >= ZN_RULES || !states || numel < 0) return -EINVAL;
  const int32_t present = (states[0] != nullptr) | (states[1] != nullptr) << 1 | (states[2] != nullptr) << 2;
  Arrays arrays = {weight, master, rule, present, {states[0], states[1], states[2]}, {}, grad, grad_scale, false};
  return start(arrays, weight_dtype, master_f32, grad_dtype, numel, segments, segment_count, stream);
}

int32_t zn_cuda_moments_load(float *exp_avg, float *exp_avg_sq, const zn_moments *moments, void *stream) {
  if (!moments_valid(moments)) return -EINVAL;
  if (moments->numel == 0) return 0;
  if (!exp_avg || !exp_avg_sq) return -EINVAL;
  if (moments->kind == ZN_MOMENTS_8BIT) {
    load_kernel<<<zn_grid(moments->numel), ZN_THREADS, 0, (cudaStream_t)stream>>>(exp_avg, exp_avg_sq, *moments);
    return zn_launched();
  }
  const int32_t dtype = moments->kind == ZN_MOMENTS_BF16 ? ZN_BF16 : ZN_F32;
  const int32_t status = zn_cuda_cast(exp_avg, ZN_F32, moments->exp_avg, dtype, moments->numel, 1.0f, stream);
  if (status != 0) return status;
  return zn_cuda_cast(exp_avg_sq, ZN_F32, moments->exp_avg_sq, dtype, moments->numel, 1.0f, stream);
}

int32_t zn_cuda_moments_store(const zn_moments *moments, const float *exp_avg, const float *exp_avg_sq, void *stream) {
  if (!moments_valid(moments)) return -EINVAL;
  if (moments->numel == 0) return 0;
  if (!exp_avg || !exp_avg_sq) return -EINVAL;
  if (moments->kind == ZN_MOMENTS_8BIT) {
    store_kernel<<<zn_grid(moments->numel), ZN_THREADS, 0, (cudaStream_t)stream>>>(*moments, exp_avg, exp_avg_sq);
    return zn_launched();
  }
  const int32_t dtype = moments->kind == ZN_MOMENTS_BF16 ? ZN_BF16 : ZN_F32;
  const int32_t status = zn_cuda_cast(moments->exp_avg, dtype, exp_avg, ZN_F32, moments->numel, 1.0f, stream);
  if (status != 0) return status;
  return zn_cuda_cast(moments->exp_avg_sq, dtype, exp_avg_sq, ZN_F32, moments->numel, 1.0f, stream);
}
