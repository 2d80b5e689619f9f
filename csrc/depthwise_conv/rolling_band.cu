// Launches rolling_band.cuh.
#include "depthwise_conv/rolling_band.cuh"

#include "common/device_properties.h"

namespace fusebackend::depthwise_conv {
namespace {

RollingBandPlan plan_of(const ForwardParams& p) {
  return rolling_band_plan(p.g, placement_of(p.x, p.x_stride, p.g.channels, p.g.in.w), placement_of(p.y, p.y_stride, p.g.outputs(), p.g.out.w), sm_count());
}

template <typename T, int kTapRows>
cudaError_t launch(const RollingBandParams& p, cudaStream_t stream) {
  const unsigned blocks = unsigned(p.plan.grid());
  if (p.plan.words) depthwise_rolling_band<T, kTapRows, true><<<blocks, kRollingBandThreads, 0, stream>>>(p);
  else depthwise_rolling_band<T, kTapRows, false><<<blocks, kRollingBandThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

bool can_run_rolling_band(const ForwardParams& p) {
  return is_half(p.dtype) && compute_capability_major() >= 8 && has_small_steps(p.w_stride) && plan_of(p).fits;
}

cudaError_t launch_rolling_band(const ForwardParams& f, cudaStream_t stream) {
  const Geometry& g = f.g;
  RollingBandParams p = {};
  p.p = f, p.plan = plan_of(f);
  p.channels = FastDiv(uint32_t(g.outputs())), p.groups = FastDiv(uint32_t(p.plan.groups)), p.column_blocks = FastDiv(uint32_t(p.plan.column_blocks));
  p.multiplier = FastDiv(uint32_t(g.multiplier));
  p.batch = int(g.batch), p.in_h = int(g.in.h), p.in_w = int(g.in.w), p.out_h = int(g.out.h), p.out_w = int(g.out.w);
  p.pad_h = int(g.pad.h), p.pad_w = int(g.pad.w), p.taps_w = int(g.taps.w), p.tap_row = int(f.w_stride.h), p.tap_column = int(f.w_stride.w);
  return dispatch_16_bits(f.dtype, [&](auto type) {
    using T = decltype(type);
    return f.g.taps.h == 3 ? launch<T, 3>(p, stream) : f.g.taps.h == 5 ? launch<T, 5>(p, stream) : launch<T, 7>(p, stream);
  });
}

}  // namespace fusebackend::depthwise_conv
