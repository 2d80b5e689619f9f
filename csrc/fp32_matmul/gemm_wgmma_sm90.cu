// The product of two split operands on Hopper: TMA feeds shared memory, two consumer warpgroups run bf16 `wgmma`.
//
// A thread block computes 128 x 192 of C, a consumer warpgroup 64 x 192 of that. The tensor cores sum the six plane products of two k
// blocks (96 registers), smallest products first, and that sum is added to the fp32 result (96 registers). The rounding error of the
// addition is the first term of the tensor cores' next sum. So the result is rounded once, whatever K is.
//
// An addition that keeps its rounding error takes four instructions (Fast2Sum) instead of one, and their power draw lowers the tensor cores'
// clock: hence one addition for two k blocks. The largest products of both blocks come last, so that few products meet a sum of full size,
// each of which is one truncation. Fast2Sum is exact while the result exceeds the sum. Otherwise, once or twice in an element's life, the
// addition is rounded. Products of small K have so few additions that this matters: they use TwoSum, which is always exact.
//
// The consumers ping-pong: while one warpgroup adds, the other multiplies. A finished tile stays in registers and is stored while the
// tensor cores work on the first k block of the next one.
//
// The grid is persistent. The tiles of a last wave that would not fill the multiprocessors are split along K: the thread block that
// computes a tile's last k waits for the partial tiles of the others and adds them in a fixed order, so that results do not vary from run
// to run. It waits only for thread blocks of lower index, which hand over before all else. So there is no deadlock, whichever thread blocks
// the GPU runs at a time.
#include <type_traits>

#include "common/cuda_common.cuh"
#include "common/encode_tiled_sm90.h"
#include "common/mbarrier_sm90.cuh"
#include "common/programmatic_launch.cuh"
#include "fp32_matmul/wgmma_stages.cuh"
#include "fp32_matmul/wgmma_work.cuh"

namespace fusebackend::fp32_matmul {
namespace {

constexpr int kExactPartsBelowK = 1024;     // parts of split tiles that are shorter than this are added without error
constexpr int kWarpgroup = 128, kConsumers = kPartialFlags, kConsumerThreads = kConsumers * kWarpgroup, kThreads = kConsumerThreads + kWarpgroup;
constexpr int kConsumerRegisters = 240, kProducerRegisters = 24;
enum { kBarrierTensorCores = 1, kBarrierWarpgroup = 3 };            // named barriers: one a warpgroup each

template <bool kAMnInner, bool kBMnInner>
__global__ void __launch_bounds__(kThreads, 1)
    gemm_kernel(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
                const __grid_constant__ GemmParams g) {
  extern __shared__ char smem_raw[];
  const uint32_t smem = (shared_address(smem_raw) + 1023) & ~1023u;     // the swizzle pattern repeats every 1024 bytes
  const uint32_t rest_ring = smem + kHiStages * kHiBytes;
  const uint32_t hi_full = smem + kRingBytes, hi_empty = hi_full + 8 * kHiStages, rest_full = hi_empty + 8 * kHiStages,
                 rest_empty = rest_full + 8 * kRestStages;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0);    // shows the compiler that it is uniform in a warp

  if (threadIdx.x == 0) {
    for (int s = 0; s < kHiStages; ++s) mbarrier::init(hi_full + 8 * s, 1), mbarrier::init(hi_empty + 8 * s, kConsumers);
    for (int s = 0; s < kRestStages; ++s) mbarrier::init(rest_full + 8 * s, 1), mbarrier::init(rest_empty + 8 * s, kConsumers);
    mbarrier::init_fence();
  }
  __syncthreads();
  wait_for_previous_kernel();

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
          mbarrier::wait(hi_empty + 8 * hi.stage(), hi.phase() ^ 1);
          uint32_t to = smem + hi.stage() * kHiBytes, bar = hi_full + 8 * hi.stage();
          mbarrier::expect_bytes(bar, kHiBytes);
          load_plane<kAMnInner, kTileM>(to, &a_map, bar, at.m, k, 0, a_batch);
          load_plane<kBMnInner, kTileN>(to + kAPlaneBytes, &b_map, bar, at.n, k, 0, b_batch);
          mbarrier::wait(rest_empty + 8 * rest.stage, rest.phase ^ 1);
          to = rest_ring + rest.stage * kRestBytes, bar = rest_full + 8 * rest.stage;
          mbarrier::expect_bytes(bar, kRestBytes);
#pragma unroll
          for (int plane = 1; plane < kPlanes; ++plane, to += kHiBytes) {
            load_plane<kAMnInner, kTileM>(to, &a_map, bar, at.m, k, plane, a_batch);
            load_plane<kBMnInner, kTileN>(to + kAPlaneBytes, &b_map, bar, at.n, k, plane, b_batch);
          }
        }
      }
    }
    return;
  }

  ptx::registers_up_to<kConsumerRegisters>();
  const int thread = threadIdx.x % kWarpgroup;
  // The barrier at which a warpgroup waits for the tensor cores; the other warpgroup arrives there when it has issued its products.
  const int my_barrier = kBarrierTensorCores + warpgroup, other_barrier = kBarrierTensorCores + (warpgroup ^ 1);
  if (warpgroup == 1) ptx::bar_arrive(other_barrier, kConsumerThreads);

  float acc[kValues], sum[kValues];  // the result; the tensor cores' sum or, after the addition, its rounding error
  const int zero = g.tiles >> 31;    // see two_sum_in_place
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

  // Multiplies one k block: the only one of a sum, or the first or second of two. The last of a sum also adds it to the result. `first`:
  // the tile's first k block, during which the finished tile is stored.
  enum Position { kSingle, kPairFirst, kPairSecond };
  const auto multiply_k_block = [&](auto position, auto first) {
    constexpr Position kPosition = decltype(position)::value;
    // Addresses / 16 of the hi planes, and of the mid and lo planes as if a stage of hi planes preceded them.
    const uint32_t at_hi = (smem + hi.stage() * kHiBytes) / 16, at_rest = (rest_ring + rest.stage * kRestBytes - kHiBytes) / 16;
    const uint32_t at_previous_hi = (smem + hi.previous_stage() * kHiBytes) / 16;
    mbarrier::wait(hi_full + 8 * hi.stage(), hi.phase());
    mbarrier::wait(rest_full + 8 * rest.stage, rest.phase);
    ptx::bar_sync(my_barrier, kConsumerThreads);
    ptx::wgmma_fence();
    const auto multiply = [&](uint32_t a, uint32_t b) {
#pragma unroll
      for (int step = 0; step < kBlockK / 16; ++step)
        ptx::wgmma_m64n192k16<kAMnInner, kBMnInner>(sum, descriptor<kAMnInner>(a + warpgroup * (kWarpgroupRowBytes / 16), step),
                                                    descriptor<kBMnInner>(b + kAPlaneBytes / 16, step));
    };
#pragma unroll
    for (int i = 0; i < kProducts - 1; ++i) {
      if (kPosition == kPairFirst && i == kProducts - 2) ptx::wgmma_commit();
      multiply((kProductA[i] ? at_rest : at_hi) + kProductA[i] * (kHiBytes / 16),
               (kProductB[i] ? at_rest : at_hi) + kProductB[i] * (kHiBytes / 16));
    }
    if (kPosition == kPairSecond) multiply(at_previous_hi, at_previous_hi);
    if (kPosition != kPairFirst) {
      ptx::wgmma_commit();
      multiply(at_hi, at_hi);
    }
    ptx::wgmma_commit();
    // The other warpgroup may start when the last product of this one has begun. If it started earlier, both warpgroups would share the
    // tensor cores, finish at the same time and then add at the same time, with the tensor cores idle.
    ptx::wgmma_wait<1>();
    ptx::bar_arrive(other_barrier, kConsumerThreads);
    if (first && finished >= 0) {
      const Origin at(g, finished);
      nan |= store_tile(g, at.batch, LaneAt(at), acc);
    }
    ptx::wgmma_wait<0>();
    if (thread == 0) {
      mbarrier::arrive(rest_empty + 8 * rest.stage);
      if (kPosition == kPairSecond) mbarrier::arrive(hi_empty + 8 * hi.previous_stage());
      if (kPosition != kPairFirst) mbarrier::arrive(hi_empty + 8 * hi.stage());
    }
    hi.advance(), rest.advance();
    if (kPosition == kPairFirst) return;
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
  const std::integral_constant<Position, kSingle> single;
  const std::integral_constant<Position, kPairFirst> pair_first;
  const std::integral_constant<Position, kPairSecond> pair_second;

  for (Work work(g); work.next(g);) {
    clear_sum();
    multiply_k_block(single, std::true_type());
    recompute_finished();
    nan = false, finished = -1;
    clear_sum();                     // after the call, so that it takes no registers across it
    int blocks = work.k_end - work.k_begin - 1;
#pragma unroll 1
    for (; blocks > 1; blocks -= 2) {
      multiply_k_block(pair_first, std::false_type());
      multiply_k_block(pair_second, std::false_type());
    }
    if (blocks > 0) multiply_k_block(single, std::false_type());

    if (work.k_end < g.k_blocks) {   // an earlier part of a split tile: hand it to the block that computes the tile's last part
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
  return launch_dependent(kernel, grid, kThreads, kSmemBytes, after_split, stream, a, b, g);  // barriers are set up while the split ends
}

}  // namespace

cudaError_t launch_wgmma(const Problem& p, const WgmmaPlan& plan, const SplitOperands& split, const Partials& partials, bool after_split,
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
  g.exact_sums = p.k < kExactSumsBelowK;
  g.exact_parts = (plan.split_parts ? g.k_blocks / plan.split_parts : plan.split_share) < kExactPartsBelowK / kBlockK;
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

}  // namespace fusebackend::fp32_matmul
