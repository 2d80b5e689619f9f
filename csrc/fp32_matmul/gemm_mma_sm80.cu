// The product of two split operands on the tensor cores of compute capability 8.0 and later: cp.async feeds shared memory, warps run
// bf16 `mma.sync`.
//
// A block of 8 warps computes 128 x 128 of C, a warp 64 x 32 of that. kDepth of K are staged at a time, in all three planes. For every 16
// of K the tensor cores sum the six plane products, smallest first, and the sum is added to an fp32 result. The rounding error of that
// addition is the first term of the tensor cores' next sum.
#include "common/cuda_common.cuh"
#include "common/device_properties.h"
#include "fp32_matmul/epilogue.cuh"
#include "fp32_matmul/launch.h"
#include "fp32_matmul/tile_order.cuh"

namespace fusebackend::fp32_matmul {
namespace {

constexpr int kTile = kMmaTileM, kDepth = kMmaBlockK, kThreads = 256;
static_assert(kMmaTileM == kMmaTileN);
constexpr int kRaster = 8;                                           // see TileAt
constexpr int kWarpM = 64, kWarpN = 32, kFragmentsM = kWarpM / 16, kFragmentsN = kWarpN / 8;
constexpr int kChunk = 8;                                            // elements in 16 bytes, which cp.async and ldmatrix move
constexpr int kPlaneChunks = kTile * kDepth / kChunk, kPlaneBytes = kPlaneChunks * 16, kOperandBytes = kPlanes * kPlaneBytes;
constexpr int kStageBytes = 2 * kOperandBytes;

// Copies `bytes` bytes and zeroes the rest of 16.
__device__ __forceinline__ void cp_async_zero_filled(uint32_t shared, const void* global, int bytes) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
#endif
}

template <bool kTransposed> __device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t shared) {
  if constexpr (kTransposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared));
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared));
}

// d (16 x 8) += a (16 x 16) @ b (16 x 8)
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t* b) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// The position of chunk (row, column) of a staged plane. The 8 chunks that ldmatrix reads at a time lie in different banks.
template <bool kMnInner> __device__ __forceinline__ int chunk_at(int row, int column) {
  constexpr int kColumns = (kMnInner ? kTile : kDepth) / kChunk;
  return row * kColumns + (kMnInner ? column ^ (row & 7) : column ^ (row >> 1 & 3));
}

struct Source {                      // the planes of one batch element
  const uint16_t* planes;
  int64_t pitch, plane;              // elements
  int mn_size, k_size, mn0;
};

template <bool kMnInner> __device__ __forceinline__ void stage_operand(uint32_t shared, const Source& s, int k0) {
  constexpr int kColumns = (kMnInner ? kTile : kDepth) / kChunk;
  const int outer0 = kMnInner ? k0 : s.mn0, inner0 = kMnInner ? s.mn0 : k0;
  const int outers = kMnInner ? s.k_size : s.mn_size, inners = kMnInner ? s.mn_size : s.k_size;
#pragma unroll
  for (int i = 0; i < kPlaneChunks / kThreads; ++i) {
    const int chunk = threadIdx.x + i * kThreads, row = chunk / kColumns, column = chunk % kColumns;
    const int outer = outer0 + row, inner = inner0 + column * kChunk;
    const int valid = outer < outers ? max(0, min(kChunk, inners - inner)) : 0;
    const uint16_t* const at = s.planes + (valid ? outer * s.pitch + inner : 0);
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane)
      cp_async_zero_filled(shared + plane * kPlaneBytes + chunk_at<kMnInner>(row, column) * 16, at + plane * s.plane, valid * 2);
  }
}

// Loads 16 x 16 of an operand at (mn, k) in mma's register layout: four 8 x 8 matrices, for which each lane gives ldmatrix one row's address.
// A: (mn, k), (mn + 8, k), (mn, k + 8), (mn + 8, k + 8); B, two fragments of 8 columns: (mn, k), (mn, k + 8), (mn + 8, k), (mn + 8, k + 8).
template <bool kMnInner, bool kIsA> __device__ __forceinline__ void load_fragment(uint32_t (&r)[4], uint32_t plane, int mn, int k) {
  const int lane = threadIdx.x % 32, row = lane % 8, matrix = lane / 8;
  const int mn_matrix = mn + (kIsA ? matrix % 2 : matrix / 2) * 8, k_matrix = k + (kIsA ? matrix / 2 : matrix % 2) * 8;
  const int chunk = kMnInner ? chunk_at<true>(k_matrix + row, mn_matrix / kChunk) : chunk_at<false>(mn_matrix + row, k_matrix / kChunk);
  load_matrices<kMnInner>(r, plane + chunk * 16);
}

struct Params {
  Problem p;
  int tiles_m, tiles_n, stages;
  const uint16_t *a, *b;             // planes
  int64_t a_pitch, a_plane, a_batch, b_pitch, b_plane, b_batch;
  bool c_pairs;
};

template <bool kAMnInner, bool kBMnInner>
__global__ void __launch_bounds__(kThreads, 1) mma_kernel(const __grid_constant__ Params g) {
  extern __shared__ __align__(128) char smem_raw[];
  const uint32_t smem = shared_address(smem_raw);
  const Problem& p = g.p;
  const TileAt<kRaster> at(blockIdx.x, g.tiles_m, g.tiles_n);
  const Source a{g.a + at.batch * g.a_batch, g.a_pitch, g.a_plane, int(p.m), int(p.k), at.m * kTile};
  const Source b{g.b + at.batch * g.b_batch, g.b_pitch, g.b_plane, int(p.n), int(p.k), at.n * kTile};
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int m_warp = warp / 4 * kWarpM, n_warp = warp % 4 * kWarpN;
  const int steps = int(ceil_div(p.k, kDepth));

  const uint32_t end = smem + g.stages * kStageBytes;
  uint32_t filling = smem, multiplying = smem;
  const auto next = [&](uint32_t stage) { return stage + kStageBytes == end ? smem : stage + kStageBytes; };
  const auto fill = [&](int step) {
    if (step < steps) {
      stage_operand<kAMnInner>(filling, a, step * kDepth);
      stage_operand<kBMnInner>(filling + kOperandBytes, b, step * kDepth);
    }
    cp_async_commit();               // also an empty group, so that cp_async_wait counts stages
    filling = next(filling);
  };

  float acc[kFragmentsM][kFragmentsN][4] = {}, sum[kFragmentsM][kFragmentsN][4] = {};

  for (int step = 0; step < g.stages - 1; ++step) fill(step);
  for (int step = 0; step < steps; ++step, multiplying = next(multiplying)) {
    if (g.stages == 3)
      cp_async_wait<1>();
    else
      cp_async_wait<0>();
    __syncthreads();                 // all threads see this stage, and none still reads the one that is filled next
    fill(step + g.stages - 1);
    const uint32_t a_planes = multiplying, b_planes = multiplying + kOperandBytes;
#pragma unroll
    for (int k = 0; k < kDepth; k += 16) {
      uint32_t y[kPlanes][kFragmentsN / 2][4];
#pragma unroll
      for (int plane = 0; plane < kPlanes; ++plane)
#pragma unroll
        for (int j = 0; j < kFragmentsN / 2; ++j)
          load_fragment<kBMnInner, false>(y[plane][j], b_planes + plane * kPlaneBytes, n_warp + j * 16, k);
#pragma unroll
      for (int i = 0; i < kFragmentsM; ++i) {
        uint32_t x[kPlanes][4];
#pragma unroll
        for (int plane = 0; plane < kPlanes; ++plane)
          load_fragment<kAMnInner, true>(x[plane], a_planes + plane * kPlaneBytes, m_warp + i * 16, k);
#pragma unroll
        for (int product = 0; product < kProducts; ++product)
#pragma unroll
          for (int j = 0; j < kFragmentsN; ++j) mma(sum[i][j], x[kProductA[product]], &y[kProductB[product]][j / 2][j % 2 * 2]);
#pragma unroll
        for (int j = 0; j < kFragmentsN; ++j)
#pragma unroll
          for (int r = 0; r < 4; ++r) {
            const float total = acc[i][j][r] + sum[i][j][r];
            sum[i][j][r] -= total - acc[i][j][r];
            acc[i][j][r] = total;
          }
      }
    }
  }

  // A lane holds rows lane / 4 + {0, 8} and columns lane % 4 * 2 + {0, 1} of a fragment.
  bool nan = false;
#pragma unroll
  for (int i = 0; i < kFragmentsM; ++i)
#pragma unroll
    for (int j = 0; j < kFragmentsN; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int m = a.mn0 + m_warp + i * 16 + half * 8 + lane / 4, n = b.mn0 + n_warp + j * 8 + lane % 4 * 2;
        if (m >= p.m || n >= p.n) continue;
        const float x = scale(p, at.batch, m, n, acc[i][j][half * 2]);
        const float y = n + 1 < p.n ? scale(p, at.batch, m, n + 1, acc[i][j][half * 2 + 1]) : 0.f;
        nan |= x != x || y != y;
        float* const c = p.c + c_offset(p, at.batch, m, n);
        if (g.c_pairs) {
          *reinterpret_cast<float2*>(c) = make_float2(x, y);
        } else {
          *c = x;
          if (n + 1 < p.n) c[p.c_col] = y;
        }
      }
  if (__any_sync(~0u, nan)) recompute_nans<kWarpM, kWarpN>(p, at.batch, a.mn0 + m_warp, b.mn0 + n_warp, lane);
}

template <bool kAMnInner, bool kBMnInner> cudaError_t run(Params g, unsigned tiles, cudaStream_t stream) {
  constexpr auto kernel = mma_kernel<kAMnInner, kBMnInner>;
  static SharedMemoryOptIn opt_in;
  g.stages = max_shared_bytes() >= 3 * kStageBytes ? 3 : 2;  // compute capability 8.6 and 8.9 have room for two
  if (cudaError_t err = opt_in.ensure(kernel, g.stages * kStageBytes)) return err;
  kernel<<<tiles, kThreads, g.stages * kStageBytes, stream>>>(g);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_mma(const Problem& p, const SplitOperands& split, cudaStream_t stream) {
  const PlaneLayout a(split.a), b(split.b);
  const Params g{p, int(ceil_div(p.m, kTile)), int(ceil_div(p.n, kTile)), 0, static_cast<const uint16_t*>(split.a_planes),
           static_cast<const uint16_t*>(split.b_planes), a.pitch, a.plane(), split.a.batched ? kPlanes * a.plane() : 0,
           b.pitch, b.plane(), split.b.batched ? kPlanes * b.plane() : 0, stores_pairs(p)};
  const int64_t tiles = p.batch * g.tiles_m * g.tiles_n;
  if (tiles > INT32_MAX) return cudaErrorInvalidValue;
  const auto launch = split.a.mn_inner ? (split.b.mn_inner ? run<true, true> : run<true, false>)
                                       : (split.b.mn_inner ? run<false, true> : run<false, false>);
  return launch(g, unsigned(tiles), stream);
}

}  // namespace fusebackend::fp32_matmul
