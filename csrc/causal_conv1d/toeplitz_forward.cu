// Launches the kernel of toeplitz_forward.cuh.
#include <algorithm>

#include "causal_conv1d/launchers.h"
#include "causal_conv1d/toeplitz_forward.cuh"
#include "common/integer_math.h"

namespace fusebackend::causal_conv1d {
namespace {

// Bytes of shared memory that a block may have if an SM is to hold 16 warps.
int shared_limit(int warps) { return 14 * 1024 * warps; }

template <typename T>
ToeplitzPlan make_plan(const ConvParams& p, int warps) {
  constexpr int kPlanes = Planes<T>::kCount;
  ToeplitzPlan plan;
  plan.chunks = static_cast<int>(ceil_div(p.in_len, kChunk));
  plan.pitch = row_pitch<T>(plan.chunks, 1, kNoSkew);
  // Copy 1 begins 16 banks from copy 0.
  plan.tap_words = static_cast<int>(round_up((p.taps + kFront + kBack + 1) / 2 + 16, 32)) - 16;
  auto rows = [&](int octets) { return static_cast<int>(std::min<int64_t>(octets * 8, p.batch)); };
  auto bytes = [&](int octets) {
    return round_up_32(rows(octets) * plan.pitch, 128) + plan.tap_words * 2 * kPlanes * 4 + 32 + (8 * kMaxOctets + 4) * 4 +
           warps * kTileBytes<T>;
  };
  const int wanted = static_cast<int>(std::min<int64_t>(ceil_div(p.batch, 8), kMaxOctets));
  plan.octets = 1;
  while (plan.octets < wanted && bytes(plan.octets * 2) <= shared_limit(warps)) plan.octets *= 2;
  plan.groups = static_cast<int>(ceil_div(p.batch, plan.octets * 8));
  plan.segments = plan.octets == 1 && p.out_len > kOutputs ? 2 : 1;
  plan.segment_len = static_cast<int>(round_up(ceil_div(p.out_len, plan.segments), kOutputs));
  plan.rows = rows(plan.octets);
  plan.shared_bytes = bytes(plan.octets);
  return plan;
}

// Beyond these limits the plan's 32-bit arithmetic might overflow; shared memory would not hold a row either.
bool small_enough(const ConvParams& p) {
  return p.in_len < (1 << 16) && p.out_len < (1 << 20) && p.taps < (1 << 16) && p.left > -(1 << 20) && p.left < (1 << 20);
}

// Small blocks load while others on the SM multiply, so they are better, unless a channel then needs more of them.
template <typename T>
int choose_warps(const ConvParams& p) {
  const ToeplitzPlan small = make_plan<T>(p, 4);
  return small.shared_bytes <= shared_limit(4) && (sizeof(T) == 2 || small.groups == make_plan<T>(p, 8).groups) ? 4 : 8;
}

template <typename T, int WARPS, int PROMOTE>
cudaError_t launch(const ConvParams& p, cudaStream_t stream) {
  const ToeplitzPlan plan = make_plan<T>(p, WARPS);
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
  if (!small_enough(p) || p.epilogue == Epilogue::kChannel) return false;
  const ToeplitzPlan plan = p.dtype == DType::kFloat32 ? make_plan<float>(p, 8) : make_plan<__half>(p, 8);
  return plan.shared_bytes <= tensor_core_shared_bytes() && p.channels * plan.groups * 4 <= 0x7fffffff;
}

cudaError_t launch_toeplitz_forward(const ConvParams& p, cudaStream_t stream) {
  return dispatch_dtype(p.dtype, [&](auto type) {
    using T = decltype(type);
    const bool small = choose_warps<T>(p) == 4;
    if constexpr (sizeof(T) == 4) {
      // Steps between two promotions: so few that the error stays below that of a chain of fp32 additions, which is small for few taps.
      constexpr int64_t kManyTaps = 256;
      if (std::min(p.taps, p.in_len) < kManyTaps) return small ? launch<T, 4, 1>(p, stream) : launch<T, 8, 1>(p, stream);
      return small ? launch<T, 4, 2>(p, stream) : launch<T, 8, 2>(p, stream);
    } else {
      return small ? launch<T, 4, 0>(p, stream) : launch<T, 8, 0>(p, stream);
    }
  });
}

}  // namespace fusebackend::causal_conv1d
