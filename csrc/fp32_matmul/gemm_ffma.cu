// The product on the ordinary fp32 units, for GPUs whose tensor cores are too slow for six bf16 products: register tiles from shared memory,
// without bank conflicts, for any strides.
//
// A block of 256 threads computes 128 x 256 of C, a thread 8 x 16 of that, in squares of 4 x 4 that lie 64 apart, so that consecutive
// threads of a warp (4 x 8) read consecutive 16-byte vectors. A thread tile of 8 x 8 would read shared memory a third more often for each
// multiplication and be limited by that. 16 of K are staged at a time, k outermost: stage[k][mn]. While one stage is multiplied, the next
// one is loaded to registers. An operand whose k is contiguous is transposed as it is stored. Column mn of row k is kept at
// mn ^ 8 (k / 4), so that neither these stores nor the reads have bank conflicts.
#include "common/cuda_common.cuh"
#include "fp32_matmul/epilogue.cuh"
#include "fp32_matmul/launch.h"
#include "fp32_matmul/tile_order.cuh"

namespace fusebackend::fp32_matmul {
namespace {

constexpr int kRows = kFfmaTileM, kColumns = kFfmaTileN, kDepth = kFfmaBlockK, kThreads = 256;
constexpr int kVector = 4, kApart = 64;      // a thread's squares: elements a side, and the distance from one to the next
constexpr int kSquaresM = kRows / kApart, kSquaresN = kColumns / kApart;
constexpr int kRaster = 16;                  // see TileAt

__device__ __forceinline__ int swizzle(int k, int mn) { return mn ^ (k / 4 * 8); }

// What a thread moves of one operand's tile. As in planes.h, mn is the operand's free index.
template <int kTile> struct Source {
  using Stage = float[kDepth][kTile];
  static constexpr int kLoads = kTile * kDepth / kVector / kThreads;        // vectors a stage
  using Registers = float[kLoads][kVector];

  bool mn_inner;                     // a vector runs along mn, else along k
  bool fast;                         // 16-byte loads, in stages that lie within K
  int mn, k;                         // position of the first vector in a stage; the others follow at equal distances
  int mn_left, k_left;               // elements from there to the operand's end
  int64_t mn_stride, k_stride, load_stride;
  const float* at;

  __device__ Source(const float* data, int64_t mn_stride, int64_t k_stride, int mn_size, int k_size, int mn0, bool mn_inner, bool wide)
      : mn_inner(mn_inner), fast(wide && mn0 + kTile <= mn_size), mn_stride(mn_stride), k_stride(k_stride) {
    constexpr int kAlongMn = kTile / kVector, kAlongK = kDepth / kVector;
    mn = mn_inner ? threadIdx.x % kAlongMn * kVector : threadIdx.x / kAlongK;
    k = mn_inner ? threadIdx.x / kAlongMn : threadIdx.x % kAlongK * kVector;
    load_stride = mn_inner ? kDepth / kLoads * k_stride : kTile / kLoads * mn_stride;
    mn_left = mn_size - mn0 - mn, k_left = k_size - k;
    at = data + (mn0 + mn) * mn_stride + k * k_stride;
  }

  // Loads the next stage, from which on `depth` of K are left.
  __device__ __forceinline__ void load(int depth, Registers& x) {
    if (fast && depth >= kDepth) {
#pragma unroll
      for (int l = 0; l < kLoads; ++l) {
        const float4 v = __ldg(reinterpret_cast<const float4*>(at + l * load_stride));
        x[l][0] = v.x, x[l][1] = v.y, x[l][2] = v.z, x[l][3] = v.w;
      }
    } else {
#pragma unroll
      for (int l = 0; l < kLoads; ++l) {
        const int mn_there = mn_left - (mn_inner ? 0 : l * kTile / kLoads), k_there = k_left - (mn_inner ? l * kDepth / kLoads : 0);
        const int there = mn_inner ? (k_there > 0 ? mn_there : 0) : (mn_there > 0 ? k_there : 0);
#pragma unroll
        for (int i = 0; i < kVector; ++i) x[l][i] = i < there ? __ldg(at + l * load_stride + i * (mn_inner ? mn_stride : k_stride)) : 0.f;
      }
    }
    at += kDepth * k_stride;
    k_left -= kDepth;
  }

  __device__ __forceinline__ void store(const Registers& x, Stage& stage) const {
    if (mn_inner) {
#pragma unroll
      for (int l = 0; l < kLoads; ++l) {
        const int row = k + l * kDepth / kLoads;
        *reinterpret_cast<float4*>(&stage[row][swizzle(row, mn)]) = make_float4(x[l][0], x[l][1], x[l][2], x[l][3]);
      }
    } else {
#pragma unroll
      for (int l = 0; l < kLoads; ++l)
#pragma unroll
        for (int i = 0; i < kVector; ++i) stage[k + i][swizzle(k, mn + l * kTile / kLoads)] = x[l][i];
    }
  }
};

struct Params {
  Problem p;
  int tiles_m, tiles_n;
  bool a_wide, b_wide, c_wide;     // whether it can be moved in 16 bytes
};

using SourceA = Source<kRows>;
using SourceB = Source<kColumns>;

template <int kSquares, int kTile>
__device__ __forceinline__ void load_fragment(float (&x)[kSquares * kVector], const float (&row)[kTile], int k, int mn) {
#pragma unroll
  for (int square = 0; square < kSquares; ++square) {
    const float4 v = *reinterpret_cast<const float4*>(&row[swizzle(k, mn) + square * kApart]);
    x[4 * square] = v.x, x[4 * square + 1] = v.y, x[4 * square + 2] = v.z, x[4 * square + 3] = v.w;
  }
}

__global__ void __launch_bounds__(kThreads, 1) ffma_kernel(const __grid_constant__ Params g) {
  __shared__ __align__(16) SourceA::Stage a_stages[2];
  __shared__ __align__(16) SourceB::Stage b_stages[2];
  const Problem& p = g.p;
  const TileAt<kRaster> at(blockIdx.x, g.tiles_m, g.tiles_n);
  const int m0 = at.m * kRows, n0 = at.n * kColumns;
  SourceA a(p.a.data + at.batch * p.a.batch, p.a.row, p.a.col, int(p.m), int(p.k), m0, p.a.row == 1 && p.a.col != 1, g.a_wide);
  SourceB b(p.b.data + at.batch * p.b.batch, p.b.col, p.b.row, int(p.n), int(p.k), n0, p.b.col == 1, g.b_wide);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int m_thread = warp / 2 * 16 + lane / 8 * 4, n_thread = warp % 2 * 32 + lane % 8 * 4;
  float acc[kSquaresM * kVector][kSquaresN * kVector] = {};
  SourceA::Registers next_a;
  SourceB::Registers next_b;

  a.load(int(p.k), next_a);
  b.load(int(p.k), next_b);
#pragma unroll 1
  for (int left = int(p.k), now = 0; left > 0; left -= kDepth, now ^= 1) {
    a.store(next_a, a_stages[now]);
    b.store(next_b, b_stages[now]);
    __syncthreads();                 // one a stage is enough: with two stages, no thread is more than one ahead
    if (left > kDepth) {
      a.load(left - kDepth, next_a);
      b.load(left - kDepth, next_b);
    }
#pragma unroll
    for (int k = 0; k < kDepth; ++k) {
      float x[kSquaresM * kVector], y[kSquaresN * kVector];
      load_fragment<kSquaresM>(x, a_stages[now][k], k, m_thread);
      load_fragment<kSquaresN>(y, b_stages[now][k], k, n_thread);
#pragma unroll
      for (int i = 0; i < kSquaresM * kVector; ++i)
#pragma unroll
        for (int j = 0; j < kSquaresN * kVector; ++j) acc[i][j] = fmaf(x[i], y[j], acc[i][j]);
    }
  }

#pragma unroll
  for (int i = 0; i < kSquaresM * kVector; ++i) {
    const int m = m0 + m_thread + i / kVector * kApart + i % kVector;
    if (m >= p.m) continue;
#pragma unroll
    for (int j = 0; j < kSquaresN * kVector; j += kVector) {
      const int n = n0 + n_thread + j / kVector * kApart;
      float* const c = p.c + c_offset(p, at.batch, m, n);
      if (g.c_wide && p.beta == 0.f && n + kVector <= p.n) {
        *reinterpret_cast<float4*>(c) = make_float4(p.alpha * acc[i][j], p.alpha * acc[i][j + 1], p.alpha * acc[i][j + 2], p.alpha * acc[i][j + 3]);
      } else {
#pragma unroll
        for (int l = 0; l < kVector; ++l)
          if (n + l < p.n) c[l * p.c_col] = scale(p, at.batch, m, n + l, acc[i][j + l]);
      }
    }
  }
}

bool is_wide(const Matrix& x) {
  const int64_t outer = x.row == 1 && x.col != 1 ? x.col : x.row;
  return (x.row == 1 || x.col == 1) && outer % kVector == 0 && x.batch % kVector == 0 && reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
}

}  // namespace

cudaError_t launch_ffma(const Problem& p, cudaStream_t stream) {
  const Params g{p, int(ceil_div(p.m, kRows)), int(ceil_div(p.n, kColumns)), is_wide(p.a), is_wide(p.b),
                 p.c_col == 1 && is_wide(Matrix{p.c, p.c_row, p.c_col, p.c_batch})};
  const int64_t tiles = p.batch * g.tiles_m * g.tiles_n;
  if (tiles > INT32_MAX) return cudaErrorInvalidValue;
  ffma_kernel<<<unsigned(tiles), kThreads, 0, stream>>>(g);
  return cudaGetLastError();
}

}  // namespace fusebackend::fp32_matmul
