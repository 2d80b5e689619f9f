// Launches rolling_window.cuh and rolling_weight_grad.cuh.
#include "depthwise_conv/rolling_window.cuh"

#include "common/device_properties.h"
#include "depthwise_conv/rolling_weight_grad.cuh"

namespace fusebackend::depthwise_conv {
namespace {

Placement placement_of(const void* data, const Strides& s, int64_t channels, int64_t width) { return {s, channels, width, reinterpret_cast<uint64_t>(data)}; }

RollingWindowPlan plan_of(const ForwardParams& p) {
  return rolling_window_plan(p.g, p.dtype, placement_of(p.x, p.x_stride, p.g.channels, p.g.in.w), placement_of(p.y, p.y_stride, p.g.channels, p.g.out.w), false,
                             sm_count());
}
RollingWindowPlan plan_of(const WeightGradParams& p) {
  return rolling_window_plan(p.g, p.dtype, placement_of(p.x, p.x_stride, p.g.channels, p.g.in.w),
                             placement_of(p.grad, p.grad_stride, p.g.channels, p.g.out.w), true, sm_count());
}

RollingSides sides_of(const Geometry& g) { return {int(g.in.h), int(g.in.w), int(g.out.h), int(g.out.w), int(g.pad.h), int(g.pad.w)}; }
RollingIndex index_of(const RollingWindowPlan& p) {
  return {FastDiv(uint32_t(p.groups)), FastDiv(uint32_t(p.channel_tiles)), FastDiv(uint32_t(p.column_strips)), FastDiv(uint32_t(p.row_tiles))};
}

// Calls f(T, taps, whether planes) with constants.
template <typename F>
cudaError_t dispatch(DType dtype, int64_t taps, bool planes, F&& f) {
  const auto by_taps = [&](auto type, auto is_planes) {
    return taps == 3   ? f(type, std::integral_constant<int, 3>{}, is_planes)
           : taps == 5 ? f(type, std::integral_constant<int, 5>{}, is_planes)
                       : f(type, std::integral_constant<int, 7>{}, is_planes);
  };
  if (planes) return by_taps(float{}, std::true_type{});
  return dispatch_dtype(dtype, [&](auto type) { return by_taps(type, std::false_type{}); });
}

}  // namespace

bool can_run_rolling_window(const ForwardParams& p) { return plan_of(p).fits; }
bool can_run_rolling_window(const WeightGradParams& p) { return plan_of(p).fits; }
int rolling_window_splits(const WeightGradParams& p) { return int(plan_of(p).strip_tiles); }

cudaError_t launch_rolling_window(const ForwardParams& f, cudaStream_t stream) {
  RollingWindowParams p = {};
  p.p = f, p.plan = plan_of(f), p.sides = sides_of(f.g), p.index = index_of(p.plan);
  p.x_row = int(f.x_stride.h), p.x_column = int(f.x_stride.w), p.y_row = int(f.y_stride.h), p.y_column = int(f.y_stride.w);
  p.x_step = f.x_stride.w * element_size(f.dtype), p.y_step = f.y_stride.w * element_size(f.dtype);
  const unsigned blocks = unsigned(p.plan.strip_tiles * p.plan.channel_tiles);
  return dispatch(f.dtype, f.g.taps.w, p.plan.planes, [&](auto type, auto taps, auto planes) {
    const int bytes = p.plan.groups * rolling_channels(taps, planes) * taps * taps * 4;
    depthwise_rolling_window<decltype(type), decltype(taps)::value, decltype(planes)::value><<<blocks, kRollingThreads, bytes, stream>>>(p);
    return cudaGetLastError();
  });
}

cudaError_t launch_rolling_window(const WeightGradParams& w, cudaStream_t stream) {
  RollingGradParams p = {};
  p.grad = w.grad, p.x = w.x, p.partial = w.partial, p.grad_stride = w.grad_stride, p.x_stride = w.x_stride;
  p.plan = plan_of(w), p.sides = sides_of(w.g), p.index = index_of(p.plan);
  p.channels = int(w.g.channels), p.need_bias = w.db != nullptr;
  p.x_row = int(w.x_stride.h), p.x_column = int(w.x_stride.w), p.grad_row = int(w.grad_stride.h), p.grad_column = int(w.grad_stride.w);
  p.grad_step = w.grad_stride.w * element_size(w.dtype), p.x_step = w.x_stride.w * element_size(w.dtype);
  const unsigned blocks = unsigned(p.plan.strip_tiles * p.plan.channel_tiles);
  return dispatch(w.dtype, w.g.taps.w, p.plan.planes, [&](auto type, auto taps, auto planes) {
    depthwise_rolling_weight_grad<decltype(type), decltype(taps)::value, decltype(planes)::value><<<blocks, kRollingThreads, 0, stream>>>(p);
    return cudaGetLastError();
  });
}

}  // namespace fusebackend::depthwise_conv
