// Launches the kernel of toeplitz_weight_grad.cuh.
#include <algorithm>

#include "causal_conv1d/launchers.h"
#include "causal_conv1d/toeplitz_weight_grad.cuh"
#include "common/integer_math.h"

namespace fusebackend::causal_conv1d {
namespace {

int floor_div(int a, int b) { return a / b - (a % b < 0); }

template <typename T>
ToeplitzGradPlan make_plan(const WeightGradParams& p) {
  ToeplitzGradPlan plan;
  plan.warps = kMaxWarps / 2;
  plan.g_chunks = static_cast<int>(ceil_div(p.out_len, kChunk));
  plan.x_chunks = static_cast<int>(ceil_div(p.in_len, kChunk));
  // Deltas that reach a tap, without those that pair no block of g with one of x.
  const int left = static_cast<int>(p.left), taps = static_cast<int>(p.taps);
  const int g_blocks = static_cast<int>(ceil_div(p.out_len, kBlock)), x_blocks = static_cast<int>(ceil_div(p.in_len, kBlock));
  plan.delta_first = std::max(-floor_div(kBlock - 1 + left, kBlock), 1 - g_blocks);
  const int delta_last = std::min(floor_div(taps - 1 + kBlock - 1 - left, kBlock), x_blocks - 1);
  plan.deltas = std::max(0, delta_last - plan.delta_first + 1);
  // A step's 16 rows are batch entries times blocks of 64, and eight of them are read at once: 8 / rows blocks of each batch entry.
  constexpr int kBlockSkew = sizeof(T) == 4 ? 4 : 3;  // log2 of the 16-byte units of 64 samples, all planes
  static_assert((16 << kBlockSkew) == kBlock / kChunk * kChunkBytes<T>);
  auto skew = [](int rows) { return rows < 8 ? kBlockSkew : kNoSkew; };
  auto pitch = [&](int chunks, int rows) { return row_pitch<T>(chunks, std::max(1, 8 / rows) % 8, skew(rows)); };
  auto bytes = [&](int rows) {
    return round_up_32(rows * (pitch(plan.g_chunks, rows) + pitch(plan.x_chunks, rows)), 128) + plan.deltas * 2 * kDiagonals * 4 +
           plan.warps * 4 * kTilePitch * 4 + 32 + (4 * kMaxRows + 4) * 4;
  };
  constexpr int kTwoBlocksPerSm = 113 * 1024;
  plan.rows = 1;
  while (plan.rows < std::min<int64_t>(p.batch, kMaxRows) && bytes(plan.rows * 2) <= kTwoBlocksPerSm) plan.rows *= 2;
  plan.groups = static_cast<int>(ceil_div(p.batch, plan.rows));
  plan.skew = skew(plan.rows);
  plan.g_pitch = pitch(plan.g_chunks, plan.rows);
  plan.x_pitch = pitch(plan.x_chunks, plan.rows);
  if (bytes(plan.rows) > kTwoBlocksPerSm) plan.warps = kMaxWarps;
  plan.shared_bytes = bytes(plan.rows);
  return plan;
}

ToeplitzGradPlan make_plan(const WeightGradParams& p) { return p.dtype == DType::kFloat32 ? make_plan<float>(p) : make_plan<__half>(p); }

}  // namespace

bool toeplitz_weight_grad_supported(const WeightGradParams& p) {
  constexpr int64_t kLimit = 1 << 16;
  if (p.in_len >= kLimit || p.out_len >= kLimit || p.taps >= kLimit || p.left <= -kLimit || p.left >= kLimit) return false;
  const ToeplitzGradPlan plan = make_plan(p);
  return plan.shared_bytes <= tensor_core_shared_bytes() && p.channels * plan.groups <= 0x7fffffff;
}

int toeplitz_weight_grad_splits(const WeightGradParams& p) { return make_plan(p).groups; }

cudaError_t launch_toeplitz_weight_grad(const WeightGradParams& p, cudaStream_t stream) {
  return dispatch_dtype(p.dtype, [&](auto type) {
    using T = decltype(type);
    static SharedMemoryOptIn opt_in[2];
    const ToeplitzGradPlan plan = make_plan<T>(p);
    auto run = [&](auto* kernel, SharedMemoryOptIn& once) {
      if (const cudaError_t e = once.ensure(kernel, tensor_core_shared_bytes()); e != cudaSuccess) return e;
      kernel<<<static_cast<unsigned>(p.channels * plan.groups), plan.warps * 32, plan.shared_bytes, stream>>>(p, plan);
      return cudaGetLastError();
    };
    constexpr int64_t kLongChain = 2048;  // from here on eager mode's errors exceed ours without compensation
    if (sizeof(T) == 4 && eager_chain(p) < kLongChain) return run(toeplitz_weight_grad<T, sizeof(T) == 4>, opt_in[0]);
    return run(toeplitz_weight_grad<T, false>, opt_in[1]);
  });
}

}  // namespace fusebackend::causal_conv1d
