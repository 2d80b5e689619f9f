// Long kernels as a product of the samples X[row][s] with the banded Toeplitz matrix W[s][t] = w[s - t + left], on tensor
// cores. A block holds one channel: its taps, and whole rows of x for up to 8 * kMaxOctets batch entries.
//
// An 8x8 piece of W depends on s - t alone, so 64 outputs need 9 pieces a step of 16 samples, of which 7 are the last
// step's. A fragment is a pair of neighbouring pieces in neighbouring registers, so every piece is held twice, in a pair
// that it begins and in one that it ends; four steps replace all of them, which makes the ring of registers free of moves.
// Warps take work items (16 rows x 64 outputs) from a shared counter, longest first: a causal kernel's items differ.
// Results do not depend on which warp takes an item.
#include <algorithm>

#include "conv1d_cuda.h"
#include "device_limits.h"
#include "mma.cuh"

namespace fusebackend::conv1d {
namespace {

constexpr int kTiles = 8, kOutputs = 8 * kTiles;  // of an item, along time
constexpr int kRing = kTiles / 2;                  // pairs of pieces of either parity, and steps that replace them all
constexpr int kTurn = 16 * kRing;                  // samples a turn of the main loop
constexpr int kFront = 96, kBack = 160;            // zero taps around w: what a turn overhangs the band
static_assert(kFront >= 31 + 8 * (kTiles - 1) && kBack >= kOutputs + kTurn + 16);
constexpr int kMaxOctets = 4;
constexpr int kTilePitch = kOutputs + 8;  // elements of a row of the output tile
template <typename T>
constexpr int kTileBytes = sizeof(T) == 2 ? 16 * kTilePitch * 2 : 0;

struct Plan {
  int octets;    // groups of eight batch entries in a block
  int rows;      // batch entries that a block has room for
  int groups;    // blocks a channel
  int segments;  // outputs are cut into this many column groups, so that few batch entries fill the 16 columns
  int segment_len;
  int chunks;  // of one row
  int pitch;   // bytes of one row
  int tap_words;  // 32-bit words of one copy of one plane of w
  int shared_bytes;
};

template <typename T>
struct Shared {
  char* rows;
  uint32_t* taps;  // [plane][copy]: copy 1 is copy 0 moved by one element, so that any pair of taps is an aligned word
  char* zeros;     // one chunk
  int* exponents;  // of each row
  int* scratch;    // [0]: next item, [1]: largest magnitude of w, [2]: something is not finite
  char* tiles;     // 16-bit types: a warp's outputs on their way to whole 16-byte stores
};

__host__ __device__ inline int round_up(int n, int m) { return (n + m - 1) / m * m; }

template <typename T>
__device__ Shared<T> carve(char* base, const Plan& plan) {
  Shared<T> s;
  s.rows = base;
  s.taps = reinterpret_cast<uint32_t*>(base + round_up(plan.rows * plan.pitch, 128));
  s.zeros = reinterpret_cast<char*>(s.taps + plan.tap_words * 2 * Planes<T>::kCount);
  s.exponents = reinterpret_cast<int*>(s.zeros + 32);
  s.scratch = s.exponents + 8 * kMaxOctets;
  s.tiles = reinterpret_cast<char*>(s.scratch + 4);
  return s;
}

// Outputs one by one from device memory: only for rows with an inf or a NaN, which must not meet the zeros around the band.
template <typename T, int THREADS>
__device__ void forward_one_by_one(const ConvParams& p, int64_t c, int64_t b0, int rows) {
  const int64_t n = rows * p.out_len;
  for (int64_t i = threadIdx.x; i < n; i += THREADS) {
    const int64_t b = b0 + i / p.out_len, t = i % p.out_len;
    const T* x = static_cast<const T*>(p.x) + b * p.xs.b + c * p.xs.c;
    const T* w = static_cast<const T*>(p.w) + c * p.w_c;
    float y = 0.f;
    for (int64_t k = max(int64_t{0}, p.left - t); k < min(p.taps, p.in_len + p.left - t); ++k)
      y = fmaf(to_float(w[k * p.w_k]), to_float(x[(t - p.left + k) * p.xs.t]), y);
    y += static_cast<float>(p.shift) + (p.bias ? to_float(static_cast<const T*>(p.bias)[c * p.bias_c]) : 0.f);
    if (p.epilogue == Epilogue::kSilu) y = silu<T>(y);
    if (p.epilogue == Epilogue::kSiluGrad)
      y = silu_backward<T>(to_float(static_cast<const T*>(p.dy)[b * p.dys.b + c * p.dys.c + t * p.dys.t]), y);
    static_cast<T*>(p.out)[b * p.outs.b + c * p.outs.c + t * p.outs.t] = from_float<T>(y);
  }
}

// PROMOTE: steps (of 16 samples) that the tensor core adds up before fp32 takes over; 0 for 16-bit types: never, as what it cuts off
// is far below their own rounding, and half the registers make room for half as many warps again.
template <typename T, Epilogue EPILOGUE, int WARPS, int PROMOTE>
__global__ void __launch_bounds__(WARPS * 32, (PROMOTE ? 16 : 24) / WARPS) toeplitz_forward(const ConvParams p, const Plan plan) {
#if __CUDA_ARCH__ >= 800
  constexpr int kThreads = WARPS * 32;
  using Elem = typename Planes<T>::Elem;
  constexpr int kPlanes = Planes<T>::kCount;
  extern __shared__ __align__(128) char shared_base[];
  const Shared<T> sh = carve<T>(shared_base, plan);
  const int64_t c = blockIdx.x / plan.groups;
  const int64_t b0 = static_cast<int64_t>(blockIdx.x - c * plan.groups) * plan.octets * 8;
  const int rows = static_cast<int>(min(p.batch - b0, int64_t{plan.octets} * 8));
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int in_len = static_cast<int>(p.in_len), out_len = static_cast<int>(p.out_len);
  const int taps = static_cast<int>(p.taps), left = static_cast<int>(p.left);

  // Stage x (a warp a row) and w, each scaled to its largest magnitude.
  for (int r = warp; r < rows; r += WARPS)
    copy_row<T>(sh.rows + r * plan.pitch, static_cast<const T*>(p.x) + (b0 + r) * p.xs.b + c * p.xs.c, in_len, plan.chunks, p.xs.t);
  cp_async_commit();
  if (threadIdx.x == 0) sh.scratch[0] = sh.scratch[1] = sh.scratch[2] = 0;
  if (threadIdx.x < 8) reinterpret_cast<uint32_t*>(sh.zeros)[threadIdx.x] = 0;
  for (int i = threadIdx.x; i < plan.tap_words * 2 * kPlanes; i += kThreads) sh.taps[i] = 0;
  __syncthreads();
  const T* w = static_cast<const T*>(p.w) + c * p.w_c;
  uint32_t largest = 0;
  Elem* halves = reinterpret_cast<Elem*>(sh.taps);
  const int copy = plan.tap_words * 2;
  for (int k = threadIdx.x; k < taps; k += kThreads) {
    const T tap = w[k * p.w_k];
    largest = max(largest, magnitude(to_float(tap)));
    if constexpr (kPlanes == 1) halves[kFront + k] = halves[copy + kFront + k - 1] = tap;
  }
  largest = __reduce_max_sync(0xffffffffu, largest);
  if (lane == 0) atomicMax(reinterpret_cast<unsigned*>(&sh.scratch[1]), largest);
  cp_async_wait<0>();
  __syncwarp();
  for (int r = warp; r < rows; r += WARPS) {
    char* row = sh.rows + r * plan.pitch;
    const uint32_t m = largest_of_row<T>(row, plan.chunks);
    const int e = normalizing_exponent(m);
    split_row<T>(row, plan.chunks, e);
    if (lane == 0) {
      sh.exponents[r] = kPlanes == 2 ? e : 0;
      if (m >= kNotFinite) sh.scratch[2] = 1;
    }
  }
  __syncthreads();
  const uint32_t w_largest = sh.scratch[1];
  if (sh.scratch[2] || w_largest >= kNotFinite) return forward_one_by_one<T, kThreads>(p, c, b0, rows);
  const int w_exponent = kPlanes == 2 ? normalizing_exponent(w_largest) : 0;
  if constexpr (kPlanes == 2) {
    const Scale scale(w_exponent);
    for (int k = threadIdx.x; k < taps; k += kThreads) {
      const int i = kFront + k;
      __half hi, lo;
      split(scale(to_float(w[k * p.w_k])), hi, lo);
      halves[i] = halves[copy + i - 1] = hi;
      halves[2 * copy + i] = halves[3 * copy + i - 1] = lo;
    }
    __syncthreads();
  }

  const int blocks = plan.segment_len / kOutputs, n_tiles = plan.octets * plan.segments;
  const int items = blocks * ((n_tiles + 1) / 2);
  const bool longest_last = 2 * left > taps;
  const float bias = static_cast<float>(p.shift) + (p.bias ? to_float(static_cast<const T*>(p.bias)[c * p.bias_c]) : 0.f);
  const int g = lane / 4, q = lane % 4;
  constexpr int kAlign = sizeof(T) == 2 ? 8 : 2;  // elements of a store
  const bool vector_out = p.outs.t == 1 && reinterpret_cast<uintptr_t>(p.out) % (kAlign * sizeof(T)) == 0 &&
                          p.outs.b % kAlign == 0 && p.outs.c % kAlign == 0;
  T* tile = reinterpret_cast<T*>(sh.tiles + warp * kTileBytes<T>);
  const uint32_t zero_address = shared_address(sh.zeros), rows_address = shared_address(sh.rows);

  while (true) {
    int item = 0;
    if (lane == 0) item = atomicAdd(&sh.scratch[0], 1);
    item = __shfl_sync(0xffffffffu, item, 0);
    if (item >= items) break;
    const int pairs = (n_tiles + 1) / 2;
    int block = item / pairs;
    const int tile0 = (pairs - 1 - (item - block * pairs)) * 2;
    if (longest_last) block = blocks - 1 - block;
    const int t0 = block * kOutputs;

    // Samples, relative to a column's segment, that the band of these outputs covers and x has for one column at least.
    const int seg_lo = tile0 / plan.octets, seg_hi = min(tile0 + 1, n_tiles - 1) / plan.octets;
    const int s_lo = max(t0 - left, -seg_hi * plan.segment_len);
    const int s_hi = min(t0 + kOutputs - left + taps - 1, in_len - seg_lo * plan.segment_len);
    const int s_begin = s_lo & ~15;

    // This lane's row of the matrices that it addresses for ldmatrix: (rows 0-7, s 0-7), (rows 8-15, s 0-7), (.., s 8-15).
    const int my_tile = tile0 + lane / 8 % 2, my_segment = my_tile / plan.octets;
    const int my_row = (my_tile - my_segment * plan.octets) * 8 + lane % 8;
    const uint32_t my_address = rows_address + my_row * plan.pitch;
    const unsigned my_chunks = my_tile < n_tiles && my_row < rows ? plan.chunks : 0;
    int my_chunk = (my_segment * plan.segment_len + s_begin) / kChunk + lane / 16;

    // Taps of piece u for this lane: w[first + 8u], w[first + 8u + 1].
    const int first = kFront + left + s_begin - t0 - g + 2 * q;
    const uint32_t* pieces = sh.taps + (first & 1) * plan.tap_words + (first >> 1);
    auto piece = [&](int plane, int u) { return pieces[plane * 2 * plan.tap_words + 4 * u]; };
    uint32_t even[kPlanes][kRing][2], odd[kPlanes][kRing][2];  // slot i % kRing: pieces (2i, 2i+1), and (2i-1, 2i)
#pragma unroll
    for (int i = 1 - kRing; i < 0; ++i) {
#pragma unroll
      for (int pl = 0; pl < kPlanes; ++pl) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          even[pl][i + kRing][h] = s_begin < s_hi ? piece(pl, 2 * i + h) : 0;
          odd[pl][i + kRing][h] = s_begin < s_hi ? piece(pl, 2 * i - 1 + h) : 0;
        }
      }
    }
    // The tensor core's accumulator truncates: it adds up PROMOTE steps, the large product last, and fp32 adds those.
    float sum[kTiles][4] = {};
    for (int s = s_begin; s < s_hi; s += kTurn) {
      [[maybe_unused]] float acc[kTiles][4];
#pragma unroll
      for (int step = 0; step < kRing; ++step) {
        uint32_t a[kPlanes][4];
        const uint32_t address = static_cast<unsigned>(my_chunk) < my_chunks ? my_address + my_chunk * kChunkBytes<T> : zero_address;
        my_chunk += 2;
#pragma unroll
        for (int pl = 0; pl < kPlanes; ++pl) {
          ldmatrix_x4(a[pl], address + 16 * pl);
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            even[pl][step][h] = piece(pl, 2 * step + h);
            odd[pl][step][h] = piece(pl, 2 * step - 1 + h);
          }
        }
        auto multiply = [&](int pa, int pb, auto fresh) {
#pragma unroll
          for (int j = 0; j < kTiles; ++j) {
            const int slot = (step - j / 2 + kRing) % kRing;
            const uint32_t(&w2)[2] = j % 2 ? odd[pb][slot] : even[pb][slot];
            multiply_add<Elem, decltype(fresh)::value>(PROMOTE ? acc[j] : sum[j], a[pa][0], a[pa][1], a[pa][2], a[pa][3], w2[0], w2[1]);
          }
        };
        auto products = [&](auto fresh) {
          if constexpr (kPlanes == 2) {
            multiply(1, 0, fresh);
            multiply(0, 1, std::false_type{});
            multiply(0, 0, std::false_type{});
          } else {
            multiply(0, 0, fresh);
          }
        };
        if constexpr (PROMOTE == 0) {
          products(std::false_type{});
        } else {
          if (step % PROMOTE == 0) products(std::true_type{});
          else products(std::false_type{});
          if (step % PROMOTE == PROMOTE - 1) {
#pragma unroll
            for (int j = 0; j < kTiles; ++j) {
#pragma unroll
              for (int i = 0; i < 4; ++i) sum[j][i] += acc[j][i];
            }
          }
        }
      }
      pieces += kTurn / 2;
    }

    // A tensor core cuts its sums off instead of rounding: in two steps 2^-23 of the value are lost in the mean.
    if constexpr (kPlanes == 2 && PROMOTE == 2) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[j][i] = fmaf(sum[j][i], 1.f / (1 << 23), sum[j][i]);
      }
    }

    // A fragment's rows are g and g+8, its columns the outputs 2q and 2q+1 of the tile.
    auto store_row = [&](int h, auto&& value) {
      const int of = tile0 + h, segment = of / plan.octets, t_first = segment * plan.segment_len + t0 + 2 * q;
      const int r = (of - segment * plan.octets) * 8 + g;
      if (of >= n_tiles || r >= rows) return;
      const Scale unscale(kPlanes == 2 ? -(sh.exponents[r] + w_exponent) : 0);
      [[maybe_unused]] const T* dy = static_cast<const T*>(p.dy) + (b0 + r) * p.dys.b + c * p.dys.c + t_first * p.dys.t;
      T* out = static_cast<T*>(p.out) + (b0 + r) * p.outs.b + c * p.outs.c + t_first * p.outs.t;
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        Vec<T, 2> two;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float y = kPlanes == 2 ? unscale(value(j, i)) + bias : value(j, i) + bias;
          if constexpr (EPILOGUE == Epilogue::kSilu) y = silu<T>(y);
          if constexpr (EPILOGUE == Epilogue::kSiluGrad)
            y = t_first + 8 * j + i < out_len ? silu_backward<T>(to_float(dy[(8 * j + i) * p.dys.t]), y) : 0.f;
          two.v[i] = from_float<T>(y);
        }
        if (vector_out && sizeof(T) == 2) {
          *reinterpret_cast<Vec<T, 2>*>(tile + (8 * h + g) * kTilePitch + 8 * j + 2 * q) = two;
        } else if (vector_out && t_first + 8 * j + 2 <= out_len) {
          *reinterpret_cast<Vec<T, 2>*>(out + 8 * j) = two;
        } else {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            if (t_first + 8 * j + i < out_len) out[(8 * j + i) * p.outs.t] = two.v[i];
          }
        }
      }
    };
    store_row(0, [&](int j, int i) { return sum[j][i]; });
    store_row(1, [&](int j, int i) { return sum[j][2 + i]; });
    if (vector_out && sizeof(T) == 2) {
      constexpr int kPieces = kOutputs / 8;
      __syncwarp();
#pragma unroll
      for (int i = lane; i < 16 * kPieces; i += 32) {
        const int row = i / kPieces, t_in = i % kPieces * 8;
        const int of = tile0 + row / 8, segment = of / plan.octets, r = (of - segment * plan.octets) * 8 + row % 8;
        const int t = segment * plan.segment_len + t0 + t_in;
        if (of >= n_tiles || r >= rows) continue;
        T* out = static_cast<T*>(p.out) + (b0 + r) * p.outs.b + c * p.outs.c + t;
        const T* from = tile + row * kTilePitch + t_in;
        if (t + 8 <= out_len) {
          *reinterpret_cast<uint4*>(out) = *reinterpret_cast<const uint4*>(from);
        } else {
          for (int e = 0; e < 8 && t + e < out_len; ++e) out[e] = from[e];
        }
      }
      __syncwarp();
    }
  }
#endif
}

// Bytes a block may have if an SM is to hold 16 warps.
int shared_limit(int warps) { return 14 * 1024 * warps; }

template <typename T>
Plan make_plan(const ConvParams& p, int warps) {
  constexpr int kPlanes = Planes<T>::kCount;
  Plan plan;
  plan.chunks = static_cast<int>((p.in_len + kChunk - 1) / kChunk);
  plan.pitch = row_pitch<T>(plan.chunks, 1, kNoSkew);
  // Copy 1 begins 16 banks from copy 0.
  plan.tap_words = round_up((static_cast<int>(p.taps) + kFront + kBack + 1) / 2 + 16, 32) - 16;
  auto rows = [&](int octets) { return static_cast<int>(std::min<int64_t>(octets * 8, p.batch)); };
  auto bytes = [&](int octets) {
    return round_up(rows(octets) * plan.pitch, 128) + plan.tap_words * 2 * kPlanes * 4 + 32 + (8 * kMaxOctets + 4) * 4 +
           warps * kTileBytes<T>;
  };
  const int wanted = static_cast<int>(std::min<int64_t>((p.batch + 7) / 8, kMaxOctets));
  plan.octets = 1;
  while (plan.octets < wanted && bytes(plan.octets * 2) <= shared_limit(warps)) plan.octets *= 2;
  plan.groups = static_cast<int>((p.batch + plan.octets * 8 - 1) / (plan.octets * 8));
  plan.segments = plan.octets == 1 && p.out_len > kOutputs ? 2 : 1;
  plan.segment_len = round_up(static_cast<int>((p.out_len + plan.segments - 1) / plan.segments), kOutputs);
  plan.rows = rows(plan.octets);
  plan.shared_bytes = bytes(plan.octets);
  return plan;
}

// Beyond these the plan's 32-bit arithmetic is not trusted, and shared memory would not hold a row anyway.
bool small_enough(int64_t in_len, int64_t out_len, int64_t taps, int64_t left) {
  return in_len < (1 << 16) && out_len < (1 << 20) && taps < (1 << 16) && left > -(1 << 20) && left < (1 << 20);
}

// Small blocks keep loading and multiplying out of step on an SM, unless a channel then needs more of them.
template <typename T>
int choose_warps(const ConvParams& p) {
  const Plan small = make_plan<T>(p, 4);
  return small.shared_bytes <= shared_limit(4) && (sizeof(T) == 2 || small.groups == make_plan<T>(p, 8).groups) ? 4 : 8;
}

// Steps between two promotions, so that the error stays below that of a chain of fp32 additions: for few taps that is short.
constexpr int64_t kManyTaps = 256;

template <typename T, int WARPS, int PROMOTE>
cudaError_t launch(const ConvParams& p, cudaStream_t stream) {
  const Plan plan = make_plan<T>(p, WARPS);
  auto run = [&](auto* kernel, SharedMemoryOptIn& opt_in) {
    if (const cudaError_t e = opt_in.ensure(kernel, tensor_core_shared_bytes()); e != cudaSuccess) return e;
    kernel<<<static_cast<unsigned>(p.channels * plan.groups), WARPS * 32, plan.shared_bytes, stream>>>(p, plan);
    return cudaGetLastError();
  };
  static SharedMemoryOptIn opt_in[3];
  switch (p.epilogue) {
    case Epilogue::kNone: return run(toeplitz_forward<T, Epilogue::kNone, WARPS, PROMOTE>, opt_in[0]);
    case Epilogue::kSilu: return run(toeplitz_forward<T, Epilogue::kSilu, WARPS, PROMOTE>, opt_in[1]);
    default: return run(toeplitz_forward<T, Epilogue::kSiluGrad, WARPS, PROMOTE>, opt_in[2]);
  }
}

}  // namespace

bool toeplitz_supported(const ConvParams& p) {
  if (!small_enough(p.in_len, p.out_len, p.taps, p.left)) return false;
  const Plan plan = p.dtype == Dtype::kFloat ? make_plan<float>(p, 8) : make_plan<__half>(p, 8);
  return plan.shared_bytes <= tensor_core_shared_bytes() && p.channels * plan.groups * 4 <= 0x7fffffff;
}

cudaError_t launch_toeplitz_forward(const ConvParams& p, cudaStream_t stream) {
  return dispatch_dtype(p.dtype, [&](auto type) {
    using T = decltype(type);
    const bool small = choose_warps<T>(p) == 4;
    if constexpr (sizeof(T) == 4) {
      if (std::min(p.taps, p.in_len) < kManyTaps) return small ? launch<T, 4, 1>(p, stream) : launch<T, 8, 1>(p, stream);
      return small ? launch<T, 4, 2>(p, stream) : launch<T, 8, 2>(p, stream);
    } else {
      return small ? launch<T, 4, 0>(p, stream) : launch<T, 8, 0>(p, stream);
    }
  });
}

}  // namespace fusebackend::conv1d
