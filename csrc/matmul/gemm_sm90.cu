// The product of two split operands on Hopper: TMA feeds shared memory, two consumer warpgroups run bf16 `wgmma`.
//
// A thread block computes 128 x 256 of C, a consumer warpgroup 64 x 256 of that in two slices of 128 columns. For every kBlockK of K and
// every slice the six plane products go into one fresh tensor-core accumulator (64 registers), smallest products first; it is then added
// to the slice's fp32 result (64 registers a slice). The warpgroups take turns at the tensor cores: while one adds, the other multiplies.
// A finished tile stays in registers and is stored while the tensor cores work on the first k of the next one.
//
// The grid is persistent. The tiles of a last wave that would not fill the multiprocessors are split along K: the block that holds a
// tile's last k waits for the others' partial tiles and adds them in a fixed order, so results do not vary from run to run. It waits for
// blocks of lower index only, which hand over before all else: whatever part of the grid the GPU runs at a time, none waits in vain.
#include <algorithm>
#include <type_traits>

#include "../common/cuda_common.cuh"
#include "epilogue.cuh"
#include "launch.h"
#include "ptx_sm90.cuh"

namespace fusebackend::matmul {
namespace {

constexpr int kSliceN = 128, kStages = 3;
constexpr int kRaster = 16;          // tile rows that are worked off together
constexpr int kSlices = kTileN / kSliceN;
constexpr int kWarpgroup = 128, kConsumers = kPartialFlags, kConsumerThreads = kConsumers * kWarpgroup, kThreads = kConsumerThreads + kWarpgroup;
constexpr int kConsumerRegisters = 240, kProducerRegisters = 24;
constexpr int kABytes = kPlanes * kTileM * kBlockK * 2, kBBytes = kPlanes * kTileN * kBlockK * 2, kStageBytes = kABytes + kBBytes;
constexpr int kSmemBytes = kStages * (kStageBytes + 16) + 1024;     // two mbarriers a stage; alignment
constexpr int kMnBlock = 64;                                        // TMA box and swizzle span of an mn-innermost operand
constexpr int kMnBlockBytes = kPlanes * kBlockK * kMnBlock * 2;     // [plane][k][64 mn], 128-byte swizzle
enum { kBarrierTurn = 1, kBarrierWarpgroup = 3 };                   // named barriers: one a warpgroup each

struct GemmParams {
  Problem p;
  int tiles_m, tiles_n, tiles, k_blocks;
  int split_tiles;                   // leading tiles that are split along K ...
  int split_parts, split_share;      // ... each into equal parts, or if parts is 0 all together into shares of this many k blocks
  bool a_batched, b_batched;
  bool c_pairs;                      // C can be stored two columns at a time
  float* partial;                    // [thread block][accumulator register][consumer thread]
  int* ready;                        // [thread block][warpgroup]
};

// The thread block's list of work: its share of the split tiles' k blocks, from the last on, then whole tiles.
struct Work {
  int tile, k_begin, k_end;          // k in blocks

  __device__ explicit Work(const GemmParams& g)
      : begin_(share_start(g, blockIdx.x)), left_(share_start(g, blockIdx.x + 1)), next_tile_(g.split_tiles + blockIdx.x) {}

  __device__ bool next(const GemmParams& g) {
    if (left_ > begin_) {
      tile = (left_ - 1) / g.k_blocks;
      const int tile_begin = tile * g.k_blocks;
      k_begin = max(begin_ - tile_begin, 0);
      k_end = left_ - tile_begin;
      left_ = tile_begin + k_begin;
      return true;
    }
    if (next_tile_ >= g.tiles) return false;
    tile = next_tile_, k_begin = 0, k_end = g.k_blocks;
    next_tile_ += gridDim.x;
    return true;
  }

  // Where a block's share begins, counted in k blocks over the split tiles.
  __device__ static int share_start(const GemmParams& g, int block) {
    const int begin = g.split_parts ? block / g.split_parts * g.k_blocks + block % g.split_parts * g.k_blocks / g.split_parts
                                    : block * g.split_share;
    return min(g.split_tiles * g.k_blocks, begin);
  }

 private:
  int begin_, left_, next_tile_;
};

struct Origin {                      // a tile's; m and n in elements
  int batch, m, n;
  __device__ Origin(const GemmParams& g, int tile) {
    const TileAt<kRaster> at(tile, g.tiles_m, g.tiles_n);
    batch = at.batch, m = at.m * kTileM, n = at.n * kTileN;
  }
};

template <bool kMnInner, int kRows>
__device__ __forceinline__ void load_operand(uint32_t dst, const CUtensorMap* map, uint32_t bar, int mn, int k, int batch) {
  if constexpr (kMnInner) {
#pragma unroll
    for (int i = 0; i < kRows / kMnBlock; ++i)
      ptx::tma_load_4d(dst + i * kMnBlockBytes, map, bar, mn + i * kMnBlock, k, 0, batch);
  } else {
    ptx::tma_load_4d(dst, map, bar, k, mn, 0, batch);
  }
}

// Descriptor of rows [mn, mn + 64 or 128), k [16 * step, +16) of one plane of a staged operand with kRows rows.
template <bool kMnInner, int kRows> __device__ __forceinline__ uint64_t descriptor(uint32_t base, int plane, int mn, int step) {
  constexpr uint64_t kFixed = kMnInner ? ptx::wgmma_descriptor_base(kMnBlockBytes, 8 * kMnBlock * 2, ptx::kSwizzle128)
                                       : ptx::wgmma_descriptor_base(16, 8 * kBlockK * 2, ptx::kSwizzle64);
  const uint32_t offset = kMnInner ? (mn / kMnBlock) * kMnBlockBytes + plane * (kBlockK * kMnBlock * 2) + step * (16 * kMnBlock * 2)
                                   : (plane * kRows + mn) * (kBlockK * 2) + step * (16 * 2);
  return kFixed | ((base + offset) & 0x3ffff) >> 4;
}

// A lane's elements of a slice: rows lane / 4 + {0, 8} of its warp's 16, columns 8 j + lane % 4 * 2 + {0, 1}; acc[4 j + 2 row + column].
struct LaneAt {
  int m, n;
  __device__ LaneAt(const Origin& at, int slice)
      : m(at.m + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4), n(at.n + slice * kSliceN + threadIdx.x % 4 * 2) {}
};

// acc = alpha * acc + beta * D. All of D is asked for before any of it is used; beyond the edges it is some element that is there.
__device__ __forceinline__ void scale_slice(const Problem& p, int batch, LaneAt at, float (&acc)[64]) {
#pragma unroll
  for (int i = 0; i < 64; ++i) acc[i] *= p.alpha;
  if (p.beta == 0.f) return;
  const float* const d = p.d.data + batch * p.d.batch;
  const float* const rows[2] = {d + min(int64_t(at.m), p.m - 1) * p.d.row, d + min(int64_t(at.m) + 8, p.m - 1) * p.d.row};
  float added[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) added[i] = __ldg(rows[i >> 1 & 1] + min(int64_t(at.n) + (i >> 2) * 8 + (i & 1), p.n - 1) * p.d.col);
#pragma unroll
  for (int i = 0; i < 64; ++i) acc[i] = fmaf(p.beta, added[i], acc[i]);
}

// Stores a slice while products are under way, so with few registers. Returns whether this lane saw a NaN.
__device__ __forceinline__ bool store_slice(const GemmParams& g, int batch, LaneAt at, const float (&acc)[64]) {
  const Problem& p = g.p;
  bool nan = false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int m = at.m + half * 8;
    if (m >= p.m) continue;
    float* c = p.c + c_offset(p, batch, m, at.n);
    const int columns = p.n - at.n;
#pragma unroll
    for (int j = 0; j < kSliceN / 8; ++j) {
      const float x = acc[j * 4 + half * 2], y = acc[j * 4 + half * 2 + 1];
      nan |= x != x || y != y;
      if (g.c_pairs) {
        if (j * 8 < columns) *reinterpret_cast<float2*>(c + j * 8) = make_float2(x, y);
      } else {
        if (j * 8 < columns) *c = x;
        if (j * 8 + 1 < columns) c[p.c_col] = y;
        c += 8 * p.c_col;
      }
    }
  }
  return nan;
}

template <bool kAMnInner, bool kBMnInner>
__global__ void __launch_bounds__(kThreads, 1)
    gemm_kernel(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
                const __grid_constant__ GemmParams g) {
  extern __shared__ char smem_raw[];
  const uint32_t smem = (ptx::smem_addr(smem_raw) + 1023) & ~1023u;     // the swizzle pattern repeats every 1024 bytes
  const uint32_t full = smem + kStages * kStageBytes, empty = full + 8 * kStages;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0);    // tells the compiler that a warp agrees on it

  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      ptx::mbar_init(full + 8 * s, 1);
      ptx::mbar_init(empty + 8 * s, kConsumers);
    }
    ptx::mbar_init_fence();
  }
  __syncthreads();
  ptx::wait_for_previous_kernel();

  int stage = 0, phase = 0;
  const auto advance = [&] {
    if (++stage == kStages) stage = 0, phase ^= 1;
  };

  if (warpgroup == kConsumers) {     // the producer: one thread
    ptx::registers_down_to<kProducerRegisters>();
    if (threadIdx.x == kConsumerThreads) {
      for (Work work(g); work.next(g);) {
        const Origin at(g, work.tile);
#pragma unroll 1
        for (int kb = work.k_begin; kb < work.k_end; ++kb, advance()) {
          ptx::mbar_wait(empty + 8 * stage, phase ^ 1);
          const uint32_t a = smem + stage * kStageBytes, bar = full + 8 * stage;
          ptx::mbar_expect_bytes(bar, kStageBytes);
          load_operand<kAMnInner, kTileM>(a, &a_map, bar, at.m, kb * kBlockK, g.a_batched ? at.batch : 0);
          load_operand<kBMnInner, kTileN>(a + kABytes, &b_map, bar, at.n, kb * kBlockK, g.b_batched ? at.batch : 0);
        }
      }
    }
    return;
  }

  ptx::registers_up_to<kConsumerRegisters>();
  const int thread = threadIdx.x % kWarpgroup;
  const int turn = kBarrierTurn + warpgroup, other_turn = kBarrierTurn + (warpgroup ^ 1);
  if (warpgroup == 1) ptx::bar_arrive(other_turn, kConsumerThreads);

  float acc[kSlices][64];
  int finished = -1;                 // the tile that acc still holds ...
  bool nan = false;                  // ... and whether this lane stored a NaN of it
  const auto recompute_finished = [&] {
    if (!__any_sync(~0u, nan)) return;
    const Origin at(g, finished);
    recompute_nans<16, kTileN>(g.p, at.batch, at.m + threadIdx.x / 32 * 16, at.n, threadIdx.x % 32);
  };

  // Takes in one k block. The first of a tile also stores the tile before.
  const auto multiply = [&](auto first) {
    const uint32_t a = smem + stage * kStageBytes, b = a + kABytes;
    ptx::mbar_wait(full + 8 * stage, phase);
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      float sum[64];
      ptx::bar_sync(turn, kConsumerThreads);
      ptx::wgmma_fence();
#pragma unroll
      for (int i = 0; i < kProducts; ++i)
#pragma unroll
        for (int step = 0; step < kBlockK / 16; ++step)
          ptx::wgmma_m64n128k16<kAMnInner, kBMnInner>(sum, descriptor<kAMnInner, kTileM>(a, kProductA[i], warpgroup * 64, step),
                                                      descriptor<kBMnInner, kTileN>(b, kProductB[i], slice * kSliceN, step), i + step > 0);
      ptx::wgmma_commit();
      ptx::bar_arrive(other_turn, kConsumerThreads);
      if (first && finished >= 0) {
        const Origin at(g, finished);
        nan |= store_slice(g, at.batch, LaneAt(at, slice), acc[slice]);
      }
      ptx::wgmma_wait_all();
      if (slice == kSlices - 1 && thread == 0) ptx::mbar_arrive(empty + 8 * stage);
#pragma unroll
      for (int i = 0; i < 64; ++i) {
        if (first) acc[slice][i] = 0.f;
        ptx::add_in_place(acc[slice][i], sum[i]);
      }
    }
    advance();
  };

  for (Work work(g); work.next(g);) {
    multiply(std::true_type());
    recompute_finished();
    nan = false, finished = -1;
#pragma unroll 1
    for (int kb = work.k_begin + 1; kb < work.k_end; ++kb) multiply(std::false_type());

    if (work.k_end < g.k_blocks) {   // an earlier part of a split tile: hand it to the block that ends the tile
      float* out = g.partial + size_t(blockIdx.x) * (kTileM * kTileN) + threadIdx.x;
#pragma unroll
      for (int i = 0; i < kSlices * 64; ++i) __stcg(out + i * kConsumerThreads, acc[i / 64][i % 64]);
      __threadfence();
      ptx::bar_sync(kBarrierWarpgroup + warpgroup, kWarpgroup);
      if (thread == 0) ptx::flag_raise(g.ready + blockIdx.x * kConsumers + warpgroup);
      continue;
    }
    for (int block = blockIdx.x, k_missing = work.k_begin; k_missing > 0;) {
      k_missing = Work::share_start(g, --block) - work.tile * g.k_blocks;
      if (thread == 0) ptx::flag_wait(g.ready + block * kConsumers + warpgroup);
      ptx::bar_sync(kBarrierWarpgroup + warpgroup, kWarpgroup);
      const float* in = g.partial + size_t(block) * (kTileM * kTileN) + threadIdx.x;
#pragma unroll
      for (int i = 0; i < kSlices * 64; ++i) acc[i / 64][i % 64] += __ldcg(in + i * kConsumerThreads);
    }
    finished = work.tile;
    const Origin at(g, finished);
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) scale_slice(g.p, at.batch, LaneAt(at, slice), acc[slice]);
  }

  if (finished >= 0) {
    const Origin at(g, finished);
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) nan |= store_slice(g, at.batch, LaneAt(at, slice), acc[slice]);
    recompute_finished();
  }
}

// Host --------------------------------------------------------------------------------------------------------------------------------

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

EncodeTiled encode_tiled() {
  static const EncodeTiled fn = [] {
    void* p = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t err = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &p, 12000, cudaEnableDefault, &found);
    return err == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<EncodeTiled>(p) : nullptr;
  }();
  return fn;
}

cudaError_t tensor_map(CUtensorMap* map, const void* planes, const Operand& op, int rows) {
  const PlaneLayout layout(op);
  const cuuint64_t pitch = cuuint64_t(layout.pitch) * 2, plane = cuuint64_t(layout.plane()) * 2;
  const cuuint64_t size[] = {cuuint64_t(layout.inner), cuuint64_t(layout.outer), kPlanes, cuuint64_t(layout.batch)};
  const cuuint64_t stride[] = {pitch, plane, plane * kPlanes};
  const cuuint32_t box[] = {cuuint32_t(op.mn_inner ? kMnBlock : kBlockK), cuuint32_t(op.mn_inner ? kBlockK : rows), kPlanes, 1};
  const cuuint32_t step[] = {1, 1, 1, 1};
  if (!encode_tiled()) return cudaErrorNotSupported;
  const CUresult result = encode_tiled()(
      map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, const_cast<void*>(planes), size, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
      op.mn_inner ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

template <bool kAMnInner, bool kBMnInner>
cudaError_t launch_gemm(const CUtensorMap& a, const CUtensorMap& b, const GemmParams& g, int grid, bool after_split, cudaStream_t stream) {
  constexpr auto kernel = gemm_kernel<kAMnInner, kBMnInner>;
  static SharedMemoryOptIn opt_in;
  if (cudaError_t err = opt_in.ensure(kernel, kSmemBytes)) return err;
  cudaLaunchAttribute overlap;       // set up barriers while the split kernel drains
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid, config.blockDim = kThreads, config.dynamicSmemBytes = kSmemBytes, config.stream = stream;
  config.attrs = &overlap, config.numAttrs = after_split;
  return cudaLaunchKernelEx(&config, kernel, a, b, g);
}

}  // namespace

cudaError_t launch_wgmma(const Problem& p, const Plan& plan, const Split& split, const Partials& partials, bool after_split,
                         cudaStream_t stream) {
  const Operand &a = split.a, &b = split.b;
  const int64_t tiles = ceil_div(p.m, kTileM) * ceil_div(p.n, kTileN) * p.batch;
  if (tiles > INT32_MAX) return cudaErrorInvalidValue;
  GemmParams g = {};
  g.p = p;
  g.tiles_m = int(ceil_div(p.m, kTileM));
  g.tiles_n = int(ceil_div(p.n, kTileN));
  g.tiles = int(tiles);
  g.k_blocks = int(ceil_div(p.k, kBlockK));
  g.split_tiles = plan.split_tiles, g.split_parts = plan.split_parts, g.split_share = plan.split_share;
  g.a_batched = a.batched, g.b_batched = b.batched;
  g.c_pairs = stores_pairs(p);
  g.partial = partials.sums;
  g.ready = partials.ready;

  CUtensorMap a_map, b_map;
  if (cudaError_t err = tensor_map(&a_map, split.a_planes, a, kTileM)) return err;
  if (cudaError_t err = tensor_map(&b_map, split.b_planes, b, kTileN)) return err;
  const auto run = a.mn_inner ? (b.mn_inner ? launch_gemm<true, true> : launch_gemm<true, false>)
                              : (b.mn_inner ? launch_gemm<false, true> : launch_gemm<false, false>);
  return run(a_map, b_map, g, plan.grid, after_split, stream);
}

}  // namespace fusebackend::matmul
