// Many taps as a product of the samples X[row][s] with the banded Toeplitz matrix W[s][t] = w[s - t + left], on tensor cores. A block holds one
// channel: its taps, and whole rows of x for up to 8 * kMaxOctets batch entries.
//
// An 8x8 piece of W depends on s - t alone, so 64 outputs need 9 pieces a step of 16 samples, 7 of which the step before had. A fragment is
// a pair of neighbouring pieces in neighbouring registers, so every piece is held twice, in a pair that begins with it and in one that ends
// with it. Four steps replace all pieces: unrolled, they make a ring of registers that needs no moves.
//
// Warps take work items (16 rows x 64 outputs) from a shared counter, the longest first: those of a causal convolution differ in length.
// Results do not depend on which warp takes an item.
#pragma once
#include "causal_conv1d/direct_sums.cuh"
#include "causal_conv1d/tensor_core.cuh"

namespace fusebackend::causal_conv1d {

constexpr int kTiles = 8, kOutputs = 8 * kTiles;  // of an item, along time: 8x8 tiles, and outputs
constexpr int kRing = kTiles / 2;                 // pairs of pieces of either parity; steps that replace all of them
constexpr int kIterationSamples = 16 * kRing;     // of the main loop
constexpr int kFront = 96, kBack = 160;           // zero taps around w, which an iteration may read beyond the band
static_assert(kFront >= 31 + 8 * (kTiles - 1) && kBack >= kOutputs + kIterationSamples + 16);
constexpr int kMaxOctets = 4;
constexpr int kTilePitch = kOutputs + 8;  // elements of a row of the output tile
template <typename T>
constexpr int kTileBytes = sizeof(T) == 2 ? 16 * kTilePitch * 2 : 0;

struct ToeplitzPlan {
  int octets;    // groups of eight batch entries in a block
  int rows;      // batch entries that a block has room for
  int groups;    // blocks of a channel
  int segments;  // outputs are cut into so many column groups, which lets few batch entries fill the 16 columns
  int segment_len;
  int chunks;     // of a row
  int pitch;      // bytes from row to row
  int tap_words;  // 32-bit words of one copy of one plane of w
  int shared_bytes;
};

template <typename T>
struct ToeplitzShared {
  char* rows;
  uint32_t* taps;  // [plane][copy]: copy 1 is copy 0 moved by one element, so that any pair of taps is an aligned word
  char* zeros;     // one chunk
  int* exponents;  // of each row
  int* scratch;    // [0]: next item, [1]: largest magnitude of w, [2]: something is not finite
  char* tiles;     // 16-bit types: a warp's outputs on their way to 16-byte stores

  static __device__ ToeplitzShared carve(char* base, const ToeplitzPlan& plan) {
    ToeplitzShared s;
    s.rows = base;
    s.taps = reinterpret_cast<uint32_t*>(base + round_up_32(plan.rows * plan.pitch, 128));
    s.zeros = reinterpret_cast<char*>(s.taps + plan.tap_words * 2 * Planes<T>::kCount);
    s.exponents = reinterpret_cast<int*>(s.zeros + 32);
    s.scratch = s.exponents + 8 * kMaxOctets;
    s.tiles = reinterpret_cast<char*>(s.scratch + 4);
    return s;
  }
};

// For rows or taps with an inf or a NaN, which must not meet the zeros around the band.
template <typename T, int THREADS>
__device__ __forceinline__ void toeplitz_direct_forward(const ConvParams& p, int64_t c, int64_t b0, int rows) {
  const int64_t n = rows * p.out_len;
  for (int64_t i = threadIdx.x; i < n; i += THREADS) {
    const int64_t b = b0 + i / p.out_len, t = i % p.out_len;
    const T* x = row_of<T>(p.x, p.x_stride, b, c);
    const T* w = static_cast<const T*>(p.w) + c * p.w_stride.c;
    float y = direct_sum(x, p.x_stride.t, static_cast<int>(p.in_len), w, p.w_stride.k, static_cast<int>(p.taps), static_cast<int>(t - p.left), 0.f,
                         p.skips_padding);
    y += static_cast<float>(p.shift) + load_bias<T>(p, c);
    if (p.epilogue == Epilogue::kSilu) y = silu<T>(y);
    if (p.epilogue == Epilogue::kSiluGrad)
      y = silu_backward<T>(to_float(row_of<T>(p.dy, p.dy_stride, b, c)[t * p.dy_stride.t]), y);
    row_of<T>(p.out, p.out_stride, b, c)[t * p.out_stride.t] = from_float<T>(y);
  }
}

// PROMOTE: steps (of 16 samples) that a tensor core accumulates before its sums are added to fp32 registers. 0, for 16-bit types: all of them,
// since what its accumulator truncates is far below their rounding, and half the registers allow for half as many warps again.
template <typename T, Epilogue EPILOGUE, int WARPS, int PROMOTE>
__global__ void __launch_bounds__(WARPS * 32, (PROMOTE ? 16 : 24) / WARPS) toeplitz_forward(const ConvParams p, const ToeplitzPlan plan) {
#if __CUDA_ARCH__ >= 800
  constexpr int kThreads = WARPS * 32;
  using Elem = typename Planes<T>::Elem;
  constexpr int kPlanes = Planes<T>::kCount;
  extern __shared__ __align__(128) char shared_base[];
  const auto sh = ToeplitzShared<T>::carve(shared_base, plan);
  const int64_t c = blockIdx.x / plan.groups;
  const int64_t b0 = static_cast<int64_t>(blockIdx.x - c * plan.groups) * plan.octets * 8;
  const int rows = static_cast<int>(min(p.batch - b0, int64_t{plan.octets} * 8));
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int in_len = static_cast<int>(p.in_len), out_len = static_cast<int>(p.out_len);
  const int taps = static_cast<int>(p.taps), left = static_cast<int>(p.left);

  // Rows of x, one a warp, and w go to shared memory, each scaled to its largest magnitude.
  for (int r = warp; r < rows; r += WARPS)
    copy_row<T>(sh.rows + r * plan.pitch, row_of<T>(p.x, p.x_stride, b0 + r, c), in_len, plan.chunks, p.x_stride.t);
  cp_async_commit();
  if (threadIdx.x == 0) sh.scratch[0] = sh.scratch[1] = sh.scratch[2] = 0;
  if (threadIdx.x < 8) reinterpret_cast<uint32_t*>(sh.zeros)[threadIdx.x] = 0;
  for (int i = threadIdx.x; i < plan.tap_words * 2 * kPlanes; i += kThreads) sh.taps[i] = 0;
  __syncthreads();
  const T* w = static_cast<const T*>(p.w) + c * p.w_stride.c;
  uint32_t largest = 0;
  Elem* halves = reinterpret_cast<Elem*>(sh.taps);
  const int copy = plan.tap_words * 2;
  for (int k = threadIdx.x; k < taps; k += kThreads) {
    const T tap = w[k * p.w_stride.k];
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
  if (sh.scratch[2] || w_largest >= kNotFinite) return toeplitz_direct_forward<T, kThreads>(p, c, b0, rows);
  const int w_exponent = kPlanes == 2 ? normalizing_exponent(w_largest) : 0;
  if constexpr (kPlanes == 2) {
    const Scale scale(w_exponent);
    for (int k = threadIdx.x; k < taps; k += kThreads) {
      const int i = kFront + k;
      __half hi, lo;
      split(scale(to_float(w[k * p.w_stride.k])), hi, lo);
      halves[i] = halves[copy + i - 1] = hi;
      halves[2 * copy + i] = halves[3 * copy + i - 1] = lo;
    }
    __syncthreads();
  }

  const int blocks = plan.segment_len / kOutputs, n_tiles = plan.octets * plan.segments;
  const int items = blocks * ((n_tiles + 1) / 2);
  const bool longest_last = 2 * left > taps;
  const float bias = static_cast<float>(p.shift) + load_bias<T>(p, c);
  const int g = lane / 4, q = lane % 4;
  constexpr int kAlign = sizeof(T) == 2 ? 8 : 2;  // elements of a store
  const bool vector_out = p.out_stride.t == 1 && reinterpret_cast<uintptr_t>(p.out) % (kAlign * sizeof(T)) == 0 &&
                          p.out_stride.b % kAlign == 0 && p.out_stride.c % kAlign == 0;
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

    // The samples, relative to their segment, that the band of these outputs covers and that x has in at least one segment.
    const int seg_lo = tile0 / plan.octets, seg_hi = min(tile0 + 1, n_tiles - 1) / plan.octets;
    const int s_lo = max(t0 - left, -seg_hi * plan.segment_len);
    const int s_hi = min(t0 + kOutputs - left + taps - 1, in_len - seg_lo * plan.segment_len);
    const int s_begin = s_lo & ~15;

    // The row whose address this lane gives to ldmatrix: its matrices are (rows 0-7, s 0-7), (rows 8-15, s 0-7), and the same at s 8-15.
    const int lane_tile = tile0 + lane / 8 % 2, lane_segment = lane_tile / plan.octets;
    const int lane_row = (lane_tile - lane_segment * plan.octets) * 8 + lane % 8;
    const uint32_t lane_address = rows_address + lane_row * plan.pitch;
    const unsigned lane_chunks = lane_tile < n_tiles && lane_row < rows ? plan.chunks : 0;
    int lane_chunk = (lane_segment * plan.segment_len + s_begin) / kChunk + lane / 16;

    // This lane's taps of piece u: w[first + 8u] and w[first + 8u + 1].
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
    // A tensor core's accumulator truncates, so it sums PROMOTE steps, the large product last, and fp32 additions sum these.
    float sum[kTiles][4] = {};
    for (int s = s_begin; s < s_hi; s += kIterationSamples) {
      [[maybe_unused]] float acc[kTiles][4];
#pragma unroll
      for (int step = 0; step < kRing; ++step) {
        uint32_t a[kPlanes][4];
        const uint32_t address = static_cast<unsigned>(lane_chunk) < lane_chunks ? lane_address + lane_chunk * kChunkBytes<T> : zero_address;
        lane_chunk += 2;
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
            multiply_add<Elem, decltype(fresh)::value>(PROMOTE ? acc[j] : sum[j], a[pa], w2[0], w2[1]);
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
      pieces += kIterationSamples / 2;
    }

    // Truncation loses 2^-23 of the value on average in two steps; it is given back.
    if constexpr (kPlanes == 2 && PROMOTE == 2) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[j][i] = fmaf(sum[j][i], 1.f / (1 << 23), sum[j][i]);
      }
    }

    // A fragment has rows g and g+8, and columns 2q and 2q+1: outputs of the tile.
    auto store_row = [&](int h, auto&& value) {
      const int tile_index = tile0 + h, segment = tile_index / plan.octets, t_first = segment * plan.segment_len + t0 + 2 * q;
      const int r = (tile_index - segment * plan.octets) * 8 + g;
      if (tile_index >= n_tiles || r >= rows) return;
      const Scale unscale(kPlanes == 2 ? -(sh.exponents[r] + w_exponent) : 0);
      [[maybe_unused]] const T* dy = static_cast<const T*>(p.dy) + (b0 + r) * p.dy_stride.b + c * p.dy_stride.c + t_first * p.dy_stride.t;
      T* out = static_cast<T*>(p.out) + (b0 + r) * p.out_stride.b + c * p.out_stride.c + t_first * p.out_stride.t;
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        Vec<T, 2> two;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float y = kPlanes == 2 ? unscale(value(j, i)) + bias : value(j, i) + bias;
          if constexpr (EPILOGUE == Epilogue::kSilu) y = silu<T>(y);
          if constexpr (EPILOGUE == Epilogue::kSiluGrad)
            y = t_first + 8 * j + i < out_len ? silu_backward<T>(to_float(dy[(8 * j + i) * p.dy_stride.t]), y) : 0.f;
          two.v[i] = from_float<T>(y);
        }
        if (vector_out && sizeof(T) == 2) {
          *reinterpret_cast<Vec<T, 2>*>(tile + (8 * h + g) * kTilePitch + 8 * j + 2 * q) = two;
        } else if (vector_out && t_first + 8 * j + 2 <= out_len) {
          *reinterpret_cast<Vec<T, 2>*>(out + 8 * j) = two;
        } else {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            if (t_first + 8 * j + i < out_len) out[(8 * j + i) * p.out_stride.t] = two.v[i];
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
        const int tile_index = tile0 + row / 8, segment = tile_index / plan.octets, r = (tile_index - segment * plan.octets) * 8 + row % 8;
        const int t = segment * plan.segment_len + t0 + t_in;
        if (tile_index >= n_tiles || r >= rows) continue;
        T* out = static_cast<T*>(p.out) + (b0 + r) * p.out_stride.b + c * p.out_stride.c + t;
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

}  // namespace fusebackend::causal_conv1d
