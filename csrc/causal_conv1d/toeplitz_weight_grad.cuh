// dw of many taps on tensor cores. With time cut into blocks of 64, the products of gradient block I with sample block I + delta all fall on the
// taps left + 64*delta + (s - t): for each delta one 64x64 matrix sum_{b,I} G_I^T X_{I+delta} is accumulated, and its diagonals are summed
// once at the end.
//
// A block holds one channel's rows of g and x for up to 16 batch entries; a warp's work item is one delta and half of the sample columns. The
// reduction runs over (batch entry, I), 16 at a time: few batch entries are joined by several I.
#pragma once
#include "causal_conv1d/direct_sums.cuh"
#include "causal_conv1d/tensor_core.cuh"

namespace fusebackend::causal_conv1d {

constexpr int kBlock = 64;                                    // samples
constexpr int kMTiles = 4, kNTiles = 4, kHalf = 8 * kNTiles;  // 16x8 tiles of an item, and its sample columns
constexpr int kDiagonals = 96, kTilePitch = 104;  // of an item: 64 + 32 - 1, rounded up; floats of a row of the diagonal sums' tile
constexpr int kMaxRows = 16, kMaxWarps = 8;

struct ToeplitzGradPlan {
  int rows;    // batch entries of a block, a power of two
  int groups;  // blocks of a channel
  int g_chunks, x_chunks, g_pitch, x_pitch;
  int skew;  // of rows; see unit_offset
  int delta_first, deltas;
  int warps;  // of a block
  int shared_bytes;
};

struct ToeplitzGradShared {
  char* g;
  char* x;
  float* diagonals;  // [item][kDiagonals]
  float* tiles;      // [warp][4][kTilePitch]
  char* zeros;
  int* g_exponents;  // [row]
  int* x_exponents;
  double* g_sums;
  int* scratch;  // [0]: next item, [1]: something is not finite

  static __device__ ToeplitzGradShared carve(char* base, const ToeplitzGradPlan& plan) {
    ToeplitzGradShared s;
    s.g = base;
    s.x = s.g + plan.rows * plan.g_pitch;
    s.diagonals = reinterpret_cast<float*>(s.x + plan.rows * plan.x_pitch);
    s.tiles = s.diagonals + plan.deltas * 2 * kDiagonals;
    s.zeros = reinterpret_cast<char*>(s.tiles + plan.warps * 4 * kTilePitch);
    s.g_sums = reinterpret_cast<double*>(s.zeros + 32);
    s.g_exponents = reinterpret_cast<int*>(s.g_sums + kMaxRows);
    s.x_exponents = s.g_exponents + kMaxRows;
    s.scratch = s.x_exponents + kMaxRows;
    return s;
  }
};

template <typename T>
__device__ __forceinline__ int chunk_offset(int chunk, int skew) { return unit_offset(chunk * kChunkBytes<T> / 16, skew); }

// Steps whose sums one set of fp32 accumulators takes before they are added to another set: rounding errors of a chain of hundreds would show.
constexpr int kChain = 8;

// A tensor core truncates the sums of a step instead of rounding them, which loses half a unit of the last of 24 digits on average,
// 1 / (2 ln 2) of 2^-24 of the value. All results are multiplied by this.
constexpr double kTruncationCorrection = 1 + 0.7213 / (1 << 24);

// sum + add; `lost` is what the rounding of it left over.
__device__ __forceinline__ float two_sum(float sum, float add, float& lost) {
  const float total = __fadd_rn(sum, add), part = __fsub_rn(total, sum);
  lost = __fadd_rn(__fsub_rn(sum, __fsub_rn(total, part)), __fsub_rn(add, part));
  return total;
}

// COMPENSATED, for fp32: the product of both lower planes is added as well, and sums are compensated, so that only the tensor core's rounding
// is left. Without, errors would exceed eager mode's where that adds up few samples.
template <typename T, bool COMPENSATED>
__global__ void __launch_bounds__(kMaxWarps * 32, sizeof(T) == 2 ? 2 : 1)
    toeplitz_weight_grad(const WeightGradParams p, const ToeplitzGradPlan plan) {
#if __CUDA_ARCH__ >= 800
  using Elem = typename Planes<T>::Elem;
  constexpr int kPlanes = Planes<T>::kCount;
  extern __shared__ __align__(128) char shared_base[];
  const auto sh = ToeplitzGradShared::carve(shared_base, plan);
  const int64_t c = blockIdx.x / plan.groups;
  const int group = static_cast<int>(blockIdx.x - c * plan.groups);
  const int64_t b0 = static_cast<int64_t>(group) * plan.rows;
  const int rows = static_cast<int>(min(p.batch - b0, int64_t{plan.rows}));
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int in_len = static_cast<int>(p.in_len), out_len = static_cast<int>(p.out_len);
  const int taps = static_cast<int>(p.taps), left = static_cast<int>(p.left);
  double* partial = p.partial + (group * p.channels + c) * (p.taps + 1);

  if (threadIdx.x == 0) sh.scratch[0] = sh.scratch[1] = 0;
  if (threadIdx.x < 8) reinterpret_cast<uint32_t*>(sh.zeros)[threadIdx.x] = 0;
  for (int r = warp; r < rows; r += plan.warps) {
    const int64_t b = b0 + r;
    copy_row<T>(sh.g + r * plan.g_pitch, row_of<T>(p.g, p.g_stride, b, c), out_len, plan.g_chunks, p.g_stride.t, plan.skew);
    copy_row<T>(sh.x + r * plan.x_pitch, row_of<T>(p.x, p.x_stride, b, c), in_len, plan.x_chunks, p.x_stride.t, plan.skew);
  }
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  for (int r = warp; r < rows; r += plan.warps) {
    const uint32_t gm = largest_of_row<T>(sh.g + r * plan.g_pitch, plan.g_chunks, plan.skew);
    const uint32_t xm = largest_of_row<T>(sh.x + r * plan.x_pitch, plan.x_chunks, plan.skew);
    const double g_sum = p.db ? sum_of_row<T>(sh.g + r * plan.g_pitch, plan.g_chunks, plan.skew) : 0.;
    if (lane == 0) {
      sh.g_exponents[r] = gm ? normalizing_exponent(gm) : 126;
      sh.x_exponents[r] = xm ? normalizing_exponent(xm) : 126;
      sh.g_sums[r] = g_sum;
      if (max(gm, xm) >= kNotFinite) sh.scratch[1] = 1;
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    double db = 0;
    for (int r = 0; r < rows; ++r) db += sh.g_sums[r];
    partial[p.taps] = db;
  }
  if (sh.scratch[1]) return direct_weight_grad<T>(p, c, b0, rows, partial);
  // Products of all rows are added up, so they share one exponent, that of the row with the largest: x takes its own, g what remains.
  int exponent = 252;
  for (int r = 0; r < rows; ++r) exponent = min(exponent, sh.g_exponents[r] + sh.x_exponents[r]);
  for (int r = warp; r < rows; r += plan.warps) {
    split_row<T>(sh.x + r * plan.x_pitch, plan.x_chunks, sh.x_exponents[r], plan.skew);
    split_row<T>(sh.g + r * plan.g_pitch, plan.g_chunks, max(-252, exponent - sh.x_exponents[r]), plan.skew);
  }
  __syncthreads();

  const int g_blocks = (out_len + kBlock - 1) / kBlock, x_blocks = (in_len + kBlock - 1) / kBlock;
  const int row_bits = 31 - __clz(plan.rows), per_step = 16 / plan.rows;
  const uint32_t g_base = shared_address(sh.g), x_base = shared_address(sh.x), zeros = shared_address(sh.zeros);
  const int gq = lane / 4, q = lane % 4;
  float* tile = sh.tiles + warp * 4 * kTilePitch;

  while (true) {
    int item = 0;
    if (lane == 0) item = atomicAdd(&sh.scratch[0], 1);
    item = __shfl_sync(0xffffffffu, item, 0);
    if (item >= plan.deltas * 2) break;
    // Longest first: the deltas nearest to zero have the most blocks.
    const int order = item / 2, nh = item % 2;
    const int delta_last = plan.delta_first + plan.deltas - 1;
    const int delta = delta_last + plan.delta_first > 0 ? plan.delta_first + order : delta_last - order;
    const int i_lo = max(0, -delta), i_hi = min(g_blocks, x_blocks - delta);

    // The rows whose addresses this lane gives to ldmatrix. g: matrices (k 0-7, t 0-7), (k 0-7, t 8-15), then the same for k 8-15;
    // x: (k 0-7, s 0-7), (k 8-15, s 0-7), then the same for s 8-15.
    const int mat = lane / 8;
    const int gk = mat / 2 * 8 + lane % 8, xk = mat % 2 * 8 + lane % 8;
    const int g_row = gk & (plan.rows - 1), x_row = xk & (plan.rows - 1);
    const uint32_t g_row_base = g_base + g_row * plan.g_pitch, x_row_base = x_base + x_row * plan.x_pitch;
    const unsigned g_limit = g_row < rows ? plan.g_chunks : 0, x_limit = x_row < rows ? plan.x_chunks : 0;
    int g_chunk = (i_lo + (gk >> row_bits)) * (kBlock / kChunk) + mat % 2;
    int x_chunk = (i_lo + delta + (xk >> row_bits)) * (kBlock / kChunk) + nh * kNTiles + mat / 2;

    // fp32: a tensor-core accumulator holds one step, the large product last, and fp32 additions sum the steps; if COMPENSATED by Kahan's
    // rule, with the compensation in `sums`. 16-bit types: it holds all steps.
    float sum[kMTiles][kNTiles][4] = {};
    [[maybe_unused]] float sums[kMTiles][kNTiles][4] = {};
    [[maybe_unused]] int chain = 0;
    for (int i0 = i_lo; i0 < i_hi; i0 += per_step) {
      uint32_t b[kPlanes][kNTiles / 2][4];
#pragma unroll
      for (int n = 0; n < kNTiles / 2; ++n) {
        const uint32_t address =
            static_cast<unsigned>(x_chunk + 2 * n) < x_limit ? x_row_base + chunk_offset<T>(x_chunk + 2 * n, plan.skew) : zeros;
#pragma unroll
        for (int pl = 0; pl < kPlanes; ++pl) ldmatrix_x4_trans(b[pl][n], address + 16 * pl);
      }
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
        uint32_t a[kPlanes][4];
        const uint32_t address =
            static_cast<unsigned>(g_chunk + 2 * m) < g_limit ? g_row_base + chunk_offset<T>(g_chunk + 2 * m, plan.skew) : zeros;
#pragma unroll
        for (int pl = 0; pl < kPlanes; ++pl) ldmatrix_x4_trans(a[pl], address + 16 * pl);
        [[maybe_unused]] float acc[kNTiles][4];
        auto multiply = [&](int pa, int pb, auto first) {
#pragma unroll
          for (int n = 0; n < kNTiles; ++n)
            multiply_add<Elem, decltype(first)::value>(kPlanes == 2 ? acc[n] : sum[m][n], a[pa], b[pb][n / 2][n % 2 * 2],
                                                       b[pb][n / 2][n % 2 * 2 + 1]);
        };
        if constexpr (kPlanes == 2) {
          if constexpr (COMPENSATED) multiply(1, 1, std::true_type{});
          multiply(1, 0, std::bool_constant<!COMPENSATED>{});
          multiply(0, 1, std::false_type{});
        }
        multiply(0, 0, std::false_type{});
        if constexpr (kPlanes == 2) {
#pragma unroll
          for (int n = 0; n < kNTiles; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              if constexpr (COMPENSATED) {
                const float add = __fadd_rn(acc[n][i], sums[m][n][i]), total = __fadd_rn(sum[m][n][i], add);
                sums[m][n][i] = __fsub_rn(add, __fsub_rn(total, sum[m][n][i]));
                sum[m][n][i] = total;
              } else {
                sum[m][n][i] += acc[n][i];
              }
            }
          }
        }
      }
      g_chunk += per_step * (kBlock / kChunk);
      x_chunk += per_step * (kBlock / kChunk);
      if constexpr (kPlanes == 2 && !COMPENSATED) {
        if (++chain == kChain || i0 + per_step >= i_hi) {
          chain = 0;
#pragma unroll
          for (int i = 0; i < kMTiles * kNTiles * 4; ++i) {
            float& from = sum[i / 4 / kNTiles][i / 4 % kNTiles][i % 4];
            sums[i / 4 / kNTiles][i / 4 % kNTiles][i % 4] += from;
            from = 0.f;
          }
        }
      }
    }
    auto& wholes = kPlanes == 2 && !COMPENSATED ? sums : sum;

    // 8x8 pieces with equal column minus row lie on the same diagonals and are added up in registers. That leaves a strip of 8 x 88,
    // [t][s + 56], whose diagonals are summed through shared memory, four rows at a time.
    constexpr int kPieces = kNTiles + 2 * kMTiles - 1;
    float piece[kPieces][2] = {};
    [[maybe_unused]] float rest[kPieces][2] = {};
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kNTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int u = n - 2 * m - i / 2 + 2 * kMTiles - 1;
          if constexpr (COMPENSATED) {
            float lost;
            piece[u][i % 2] = two_sum(piece[u][i % 2], wholes[m][n][i], lost);
            rest[u][i % 2] += __fadd_rn(lost, sums[m][n][i]);
          } else {
            piece[u][i % 2] += wholes[m][n][i];
          }
        }
      }
    }
    double total[kDiagonals / 32] = {};
#pragma unroll
    for (int pass = 0; pass < (COMPENSATED ? 4 : 2); ++pass) {
      const int half = pass % 2;
      __syncwarp();
      if (gq / 4 == half) {
#pragma unroll
        for (int u = 0; u < kPieces; ++u) {
          const float(&two)[2] = pass < 2 ? piece[u] : rest[u];
          *reinterpret_cast<float2*>(tile + gq % 4 * kTilePitch + 8 * u + 2 * q) = make_float2(two[0], two[1]);
        }
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kDiagonals / 32; ++i) {
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          const int column = lane + 32 * i - 7 + 4 * half + t;  // diagonal d = s - t + 63
          if (column >= 0 && column < 8 * kPieces) total[i] += tile[t * kTilePitch + column];
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kDiagonals / 32; ++i) sh.diagonals[item * kDiagonals + lane + 32 * i] = static_cast<float>(total[i]);
  }
  __syncthreads();

  // Tap k gathers its diagonals: s - t = k - left - 64*delta - 32*half.
  const int delta_last = plan.delta_first + plan.deltas - 1;
  const bool ascending = delta_last + plan.delta_first > 0;
  for (int k = threadIdx.x; k < taps; k += blockDim.x) {
    double total = 0;
    const int offset = k - left + kBlock - 1;  // delta*64 + half*32 + d
    for (int delta = max(plan.delta_first, (offset - kHalf - kDiagonals) / kBlock - 1); delta <= delta_last; ++delta) {
      if (delta * kBlock > offset) break;
      const int order = ascending ? delta - plan.delta_first : delta_last - delta;
      for (int nh = 0; nh < 2; ++nh) {
        const int d = offset - delta * kBlock - nh * kHalf;
        if (d >= 0 && d < kDiagonals - 1) total += sh.diagonals[(order * 2 + nh) * kDiagonals + d];
      }
    }
    partial[k] = kPlanes == 2 ? scalbn(total * kTruncationCorrection, -exponent) : total;
  }
#endif
}

}  // namespace fusebackend::causal_conv1d
