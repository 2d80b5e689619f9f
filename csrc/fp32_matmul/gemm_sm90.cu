// The product of two split operands on Hopper: TMA feeds shared memory, two consumer warpgroups run bf16 `wgmma`.
//
// A thread block computes 128 x 192 of C, a consumer warpgroup 64 x 192 of that. The six plane products of two k blocks are summed on the
// tensor cores (96 registers), smallest products first, and that sum is added to the fp32 result (96 registers). What rounding takes from
// this addition is not lost: the tensor cores' next sum begins with it instead of zero. So the result is rounded once, whatever K is.
//
// Such an addition takes three operations where a plain one takes one, and the power that they draw slows the tensor cores down: hence two
// k blocks a sum. Both blocks' largest products come last, so hi planes are staged apart and stay longer: each product that is added to a sum
// of full size is one truncation. If the sum exceeds the result, which happens once or twice in an element's life, the three operations let
// it be rounded; where there are few additions that tells, and shallow products take the six operations that are always exact.
//
// The warpgroups take turns at the tensor cores: while one adds, the other multiplies. A finished tile stays in registers and is stored
// while the tensor cores work on the first k of the next one.
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

constexpr int kShallow = 768;        // below this K sums are added exactly; also SHALLOW in patterns/matmul.py
constexpr int kLongPart = 1024;      // of K; parts of split tiles of this length and longer are summed plainly
constexpr int kRaster = 16;          // tile rows that are worked off together
constexpr int kValues = kTileN / 2;         // of C that a lane has: 64 rows by kTileN columns, over 128 lanes
constexpr int kWarpgroup = 128, kConsumers = kPartialFlags, kConsumerThreads = kConsumers * kWarpgroup, kThreads = kConsumerThreads + kWarpgroup;
constexpr int kConsumerRegisters = 240, kProducerRegisters = 24;
constexpr int kAPlane = kTileM * kBlockK * 2, kBPlane = kTileN * kBlockK * 2;     // bytes of one plane of a k block
constexpr int kHiBytes = kAPlane + kBPlane, kRestBytes = 2 * kHiBytes;
constexpr int kHiStages = 4, kRestStages = 3;   // hi planes; mid and lo planes
constexpr int kRings = kHiStages * kHiBytes + kRestStages * kRestBytes;
constexpr int kSmemBytes = kRings + 16 * (kHiStages + kRestStages) + 1024;   // two mbarriers a stage; alignment
constexpr int kMnBlock = 64;                                        // TMA box and swizzle span of an mn-innermost operand
constexpr int kMnBlockBytes = kBlockK * kMnBlock * 2;               // [k][64 mn], 128-byte swizzle
enum { kBarrierTurn = 1, kBarrierWarpgroup = 3 };                   // named barriers: one a warpgroup each

struct GemmParams {
  Problem p;
  int tiles_m, tiles_n, tiles, k_blocks;
  int split_tiles;                   // leading tiles that are split along K ...
  int split_parts, split_share;      // ... each into equal parts, or if parts is 0 all together into shares of this many k blocks
  bool a_batched, b_batched;
  bool exact_sums;                   // the tensor cores' sums are added exactly
  bool exact_parts;                  // parts of split tiles are summed exactly
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
__device__ __forceinline__ void load_plane(uint32_t dst, const CUtensorMap* map, uint32_t bar, int mn, int k, int plane, int batch) {
  if constexpr (kMnInner) {
#pragma unroll
    for (int i = 0; i < kRows / kMnBlock; ++i)
      ptx::tma_load_4d(dst + i * kMnBlockBytes, map, bar, mn + i * kMnBlock, k, plane, batch);
  } else {
    ptx::tma_load_4d(dst, map, bar, k, mn, plane, batch);
  }
}

// Descriptor of a staged plane from k = 16 * step on; `plane` is its first row's address / 16. Nothing but additions of constants: at the
// beginning of a turn the tensor cores soon wait for them.
template <bool kMnInner> __device__ __forceinline__ uint64_t descriptor(uint32_t plane, int step) {
  constexpr uint64_t kFixed = kMnInner ? ptx::wgmma_descriptor_base(kMnBlockBytes, 8 * kMnBlock * 2, ptx::kSwizzle128)
                                       : ptx::wgmma_descriptor_base(16, 8 * kBlockK * 2, ptx::kSwizzle64);
  constexpr int kStep = kMnInner ? 16 * kMnBlock * 2 : 16 * 2;
  return kFixed >> 32 << 32 | (uint32_t(kFixed) + plane + step * kStep / 16);
}
constexpr int kWarpgroupRows = 64 * kBlockK * 2;      // bytes to the second warpgroup's rows of A's plane, in either layout
static_assert(kWarpgroupRows == kMnBlockBytes);

// Where the next k block is in a ring of stages, and the parity of its barriers. Few registers are left to count with.
struct HiRing {
  int block = 0;

  __device__ int stage() const { return block & (kHiStages - 1); }
  __device__ int stage_before() const { return (block - 1) & (kHiStages - 1); }
  __device__ int phase() const { return block / kHiStages & 1; }
  __device__ void advance() { block = (block + 1) & (2 * kHiStages - 1); }
};
static_assert(kHiStages == 4);       // a power of two; two pairs

struct RestRing {
  int stage = 0, phase = 0;

  __device__ void advance() {
    if (++stage == kRestStages) stage = 0, phase ^= 1;
  }
};

// A lane's values: rows lane / 4 + {0, 8} of its warp's 16, columns 8 j + lane % 4 * 2 + {0, 1}; acc[4 j + 2 row + column].
struct LaneAt {
  int m, n;
  __device__ explicit LaneAt(const Origin& at) : m(at.m + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4), n(at.n + threadIdx.x % 4 * 2) {}
};

// acc = alpha * acc + beta * D. Half of D is asked for before any of it is used; beyond the edges it is some element that is there.
__device__ __forceinline__ void scale_tile(const Problem& p, int batch, LaneAt at, float (&acc)[kValues]) {
#pragma unroll
  for (int i = 0; i < kValues; ++i) acc[i] *= p.alpha;
  if (p.beta == 0.f) return;
  const float* const d = p.d.data + batch * p.d.batch;
  const float* const rows[2] = {d + min(int64_t(at.m), p.m - 1) * p.d.row, d + min(int64_t(at.m) + 8, p.m - 1) * p.d.row};
  constexpr int kHalf = kValues / 2;
#pragma unroll
  for (int first = 0; first < kValues; first += kHalf) {
    float added[kHalf];
#pragma unroll
    for (int j = 0; j < kHalf; ++j) {
      const int i = first + j;
      added[j] = __ldg(rows[i >> 1 & 1] + min(int64_t(at.n) + (i >> 2) * 8 + (i & 1), p.n - 1) * p.d.col);
    }
#pragma unroll
    for (int j = 0; j < kHalf; ++j) acc[first + j] = fmaf(p.beta, added[j], acc[first + j]);
  }
}

// Stores a tile while products are under way, so with few registers. Returns whether this lane saw a NaN.
__device__ __forceinline__ bool store_tile(const GemmParams& g, int batch, LaneAt at, const float (&acc)[kValues]) {
  const Problem& p = g.p;
  bool nan = false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int m = at.m + half * 8;
    if (m >= p.m) continue;
    float* c = p.c + c_offset(p, batch, m, at.n);
    const int columns = p.n - at.n;
#pragma unroll
    for (int j = 0; j < kTileN / 8; ++j) {
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
  const uint32_t rest_ring = smem + kHiStages * kHiBytes;
  const uint32_t hi_full = smem + kRings, hi_empty = hi_full + 8 * kHiStages, rest_full = hi_empty + 8 * kHiStages,
                 rest_empty = rest_full + 8 * kRestStages;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0);    // tells the compiler that a warp agrees on it

  if (threadIdx.x == 0) {
    for (int s = 0; s < kHiStages; ++s) ptx::mbar_init(hi_full + 8 * s, 1), ptx::mbar_init(hi_empty + 8 * s, kConsumers);
    for (int s = 0; s < kRestStages; ++s) ptx::mbar_init(rest_full + 8 * s, 1), ptx::mbar_init(rest_empty + 8 * s, kConsumers);
    ptx::mbar_init_fence();
  }
  __syncthreads();
  ptx::wait_for_previous_kernel();

  HiRing hi;
  RestRing rest;

  if (warpgroup == kConsumers) {     // the producer: one thread
    ptx::registers_down_to<kProducerRegisters>();
    if (threadIdx.x == kConsumerThreads) {
      for (Work work(g); work.next(g);) {
        const Origin at(g, work.tile);
#pragma unroll 1
        for (int kb = work.k_begin; kb < work.k_end; ++kb, hi.advance(), rest.advance()) {
          const int k = kb * kBlockK, a_batch = g.a_batched ? at.batch : 0, b_batch = g.b_batched ? at.batch : 0;
          ptx::mbar_wait(hi_empty + 8 * hi.stage(), hi.phase() ^ 1);
          uint32_t to = smem + hi.stage() * kHiBytes, bar = hi_full + 8 * hi.stage();
          ptx::mbar_expect_bytes(bar, kHiBytes);
          load_plane<kAMnInner, kTileM>(to, &a_map, bar, at.m, k, 0, a_batch);
          load_plane<kBMnInner, kTileN>(to + kAPlane, &b_map, bar, at.n, k, 0, b_batch);
          ptx::mbar_wait(rest_empty + 8 * rest.stage, rest.phase ^ 1);
          to = rest_ring + rest.stage * kRestBytes, bar = rest_full + 8 * rest.stage;
          ptx::mbar_expect_bytes(bar, kRestBytes);
#pragma unroll
          for (int plane = 1; plane < kPlanes; ++plane, to += kHiBytes) {
            load_plane<kAMnInner, kTileM>(to, &a_map, bar, at.m, k, plane, a_batch);
            load_plane<kBMnInner, kTileN>(to + kAPlane, &b_map, bar, at.n, k, plane, b_batch);
          }
        }
      }
    }
    return;
  }

  ptx::registers_up_to<kConsumerRegisters>();
  const int thread = threadIdx.x % kWarpgroup;
  const int turn = kBarrierTurn + warpgroup, other_turn = kBarrierTurn + (warpgroup ^ 1);
  if (warpgroup == 1) ptx::bar_arrive(other_turn, kConsumerThreads);

  float acc[kValues], sum[kValues];  // the result, and the tensor cores' sum or what rounding left of it
  const int zero = g.tiles >> 31;
  int finished = -1;                 // the tile that acc still holds ...
  bool nan = false;                  // ... and whether this lane stored a NaN of it
  const auto recompute_finished = [&] {
    if (!__any_sync(~0u, nan)) return;
    const Origin at(g, finished);
    recompute_nans<16, kTileN>(g.p, at.batch, at.m + threadIdx.x / 32 * 16, at.n, threadIdx.x % 32);
  };

  const auto clear_sum = [&] {
#pragma unroll
    for (int i = 0; i < kValues; ++i) sum[i] = 0.f;
  };

  // A turn at the tensor cores takes in one k block; the second of a pair also adds both to the result. A tile's first turn stores the tile
  // before.
  enum Turn { kSingle, kPairFirst, kPairSecond };
  const auto take_turn = [&](auto which, auto first) {
    constexpr Turn kTurn = decltype(which)::value;
    // Addresses / 16 of the hi planes, and of where they would be before the mid and lo planes.
    const uint32_t at_hi = (smem + hi.stage() * kHiBytes) / 16, at_rest = (rest_ring + rest.stage * kRestBytes - kHiBytes) / 16;
    const uint32_t at_hi_before = (smem + hi.stage_before() * kHiBytes) / 16;
    ptx::mbar_wait(hi_full + 8 * hi.stage(), hi.phase());
    ptx::mbar_wait(rest_full + 8 * rest.stage, rest.phase);
    ptx::bar_sync(turn, kConsumerThreads);
    ptx::wgmma_fence();
    const auto multiply = [&](uint32_t a, uint32_t b) {
#pragma unroll
      for (int step = 0; step < kBlockK / 16; ++step)
        ptx::wgmma_m64n192k16<kAMnInner, kBMnInner>(sum, descriptor<kAMnInner>(a + warpgroup * (kWarpgroupRows / 16), step),
                                                    descriptor<kBMnInner>(b + kAPlane / 16, step));
    };
#pragma unroll
    for (int i = 0; i < kProducts - 1; ++i) {
      if (kTurn == kPairFirst && i == kProducts - 2) ptx::wgmma_commit();
      multiply((kProductA[i] ? at_rest : at_hi) + kProductA[i] * (kHiBytes / 16),
               (kProductB[i] ? at_rest : at_hi) + kProductB[i] * (kHiBytes / 16));
    }
    if (kTurn == kPairSecond) multiply(at_hi_before, at_hi_before);
    if (kTurn != kPairFirst) {
      ptx::wgmma_commit();
      multiply(at_hi, at_hi);
    }
    ptx::wgmma_commit();
    // The turn ends as the last product begins. Were it to end here, both warpgroups' products would share the tensor cores and be done at
    // the same time, and nobody would multiply while they add.
    ptx::wgmma_wait<1>();
    ptx::bar_arrive(other_turn, kConsumerThreads);
    if (first && finished >= 0) {
      const Origin at(g, finished);
      nan |= store_tile(g, at.batch, LaneAt(at), acc);
    }
    ptx::wgmma_wait<0>();
    if (thread == 0) {
      ptx::mbar_arrive(rest_empty + 8 * rest.stage);
      if (kTurn == kPairSecond) ptx::mbar_arrive(hi_empty + 8 * hi.stage_before());
      if (kTurn != kPairFirst) ptx::mbar_arrive(hi_empty + 8 * hi.stage());
    }
    hi.advance(), rest.advance();
    if (kTurn == kPairFirst) return;
    if constexpr (first) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) acc[i] = sum[i];
    } else if (g.exact_sums) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) ptx::two_sum_in_place(acc[i], sum[i], zero);
    } else {
#pragma unroll
      for (int i = 0; i < kValues; ++i) ptx::fast_two_sum_in_place(acc[i], sum[i], zero);
    }
  };
  const std::integral_constant<Turn, kSingle> single;
  const std::integral_constant<Turn, kPairFirst> pair_first;
  const std::integral_constant<Turn, kPairSecond> pair_second;

  for (Work work(g); work.next(g);) {
    clear_sum();
    take_turn(single, std::true_type());
    recompute_finished();
    nan = false, finished = -1;
    clear_sum();                     // here, not above, so that it takes no registers across the call
    int left = work.k_end - work.k_begin - 1;
#pragma unroll 1
    for (; left > 1; left -= 2) {
      take_turn(pair_first, std::false_type());
      take_turn(pair_second, std::false_type());
    }
    if (left > 0) take_turn(single, std::false_type());

    if (work.k_end < g.k_blocks) {   // an earlier part of a split tile: hand it to the block that ends the tile
      float* out = g.partial + size_t(blockIdx.x) * (kTileM * kTileN) + threadIdx.x;
#pragma unroll
      for (int i = 0; i < kValues; ++i) __stcg(out + i * kConsumerThreads, acc[i]);
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
      if (g.exact_parts) {
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
          float part = __ldcg(in + i * kConsumerThreads);
          ptx::two_sum_in_place(acc[i], part, zero);
          sum[i] += part;
        }
      } else {
#pragma unroll
        for (int i = 0; i < kValues; ++i) sum[i] = __ldcg(in + i * kConsumerThreads);
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
          acc[i] += sum[i];
          sum[i] = 0.f;
        }
      }
    }
    if (work.k_begin > 0) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) acc[i] += sum[i];
    }
    finished = work.tile;
    const Origin at(g, finished);
    scale_tile(g.p, at.batch, LaneAt(at), acc);
  }

  if (finished >= 0) {
    const Origin at(g, finished);
    nan |= store_tile(g, at.batch, LaneAt(at), acc);
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
  const cuuint32_t box[] = {cuuint32_t(op.mn_inner ? kMnBlock : kBlockK), cuuint32_t(op.mn_inner ? kBlockK : rows), 1, 1};
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
  g.exact_sums = p.k < kShallow;
  g.exact_parts = (plan.split_parts ? g.k_blocks / plan.split_parts : plan.split_share) < kLongPart / kBlockK;
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
