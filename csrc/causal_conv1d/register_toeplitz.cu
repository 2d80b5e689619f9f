// Launches the kernel of register_toeplitz.cuh.
#include <algorithm>

#include "causal_conv1d/alignment.h"
#include "causal_conv1d/bct_rows.cuh"
#include "causal_conv1d/launchers.h"
#include "causal_conv1d/register_toeplitz.cuh"
#include "common/device_properties.h"
#include "common/integer_math.h"

namespace fusebackend::causal_conv1d {
namespace {

// Rows are cut until there are so many times as many warps as a GPU holds, which evens out when they end. A warp loads the chunks on either
// side of its span, too, so spans are not short.
RegisterToeplitzPlan make_plan(const ConvParams& p, RowAccess access) {
  constexpr int64_t kLeastSpan = 4, kWaves = 4;
  const int64_t chunks = ceil_div(p.out_len + (access == RowAccess::kAligned ? 0 : 7), kChunkSamples), groups = ceil_div(p.batch, kWarpRows);
  const int64_t warps = kWaves * sm_count() * kBlocksPerSm * kWarpsOfBlock;
  const int64_t spans = std::clamp<int64_t>(warps / std::max<int64_t>(p.channels * groups, 1), 1, std::max<int64_t>(chunks / kLeastSpan, 1));
  RegisterToeplitzPlan plan;
  plan.chunks = static_cast<int>(chunks);
  plan.span = static_cast<int>(ceil_div(chunks, spans));
  plan.spans = static_cast<int>(ceil_div(chunks, plan.span));
  plan.items = static_cast<int>(groups) * plan.spans;
  return plan;
}

RowAccess access_of(const ConvParams& p) {
  const RowAccess access = row_access(p.out_len, p.dtype, {{p.x, p.x_stride}, {p.out, p.out_stride}});
  return access == RowAccess::kAligned && p.in_len % 8 ? RowAccess::kMaskedEnds : access;
}

template <typename T, RowAccess ACCESS>
cudaError_t launch(const ConvParams& p, cudaStream_t stream) {
  const RegisterToeplitzPlan plan = make_plan(p, ACCESS);
  const dim3 grid(static_cast<unsigned>(p.channels), static_cast<unsigned>(std::min<int64_t>(ceil_div(plan.items, kWarpsOfBlock), 65535)));
  switch (p.epilogue) {
    case Epilogue::kSilu: register_toeplitz_forward<T, Epilogue::kSilu, ACCESS><<<grid, kWarpsOfBlock * 32, 0, stream>>>(p, plan); break;
    case Epilogue::kChannel: register_toeplitz_forward<T, Epilogue::kChannel, ACCESS><<<grid, kWarpsOfBlock * 32, 0, stream>>>(p, plan); break;
    default: register_toeplitz_forward<T, Epilogue::kNone, ACCESS><<<grid, kWarpsOfBlock * 32, 0, stream>>>(p, plan);
  }
  return cudaGetLastError();
}

}  // namespace

bool register_toeplitz_supported(const ConvParams& p) {
  const bool plain = p.dtype != DType::kFloat32 && p.dtype != DType::kFloat64 && p.x_dtype == p.dtype && p.out_dtype == p.dtype;
  if (!plain || p.epilogue == Epilogue::kSiluGrad || compute_capability_major() < 8) return false;
  if (!is_within_reach(p)) return false;
  const StridedTensors tensors = {{p.x, p.x_stride}, {p.out, p.out_stride}};
  const bool contiguous = all_present(tensors, [](const void*, const Strides& s) { return s.t == 1; });
  const bool small = p.batch * ceil_div(p.out_len, int64_t{kChunkSamples}) < (int64_t{1} << 31) && std::max(p.in_len, p.out_len) < (int64_t{1} << 30);
  return contiguous && small && access_of(p) != RowAccess::kScalar && p.channels <= 0x7fffffff;
}

cudaError_t launch_register_toeplitz_forward(const ConvParams& p, cudaStream_t stream) {
  const auto with_access = [&](auto type) {
    using T = decltype(type);
    return access_of(p) == RowAccess::kAligned ? launch<T, RowAccess::kAligned>(p, stream) : launch<T, RowAccess::kMaskedEnds>(p, stream);
  };
  return p.dtype == DType::kBFloat16 ? with_access(__nv_bfloat16{}) : with_access(__half{});
}

}  // namespace fusebackend::causal_conv1d
