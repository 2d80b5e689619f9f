// Launches rolling_window.cuh and rolling_weight_grad.cuh.
#include "depthwise_conv/rolling_window.cuh"

#include "common/device_properties.h"
#include "depthwise_conv/rolling_input_grad.cuh"
#include "depthwise_conv/rolling_weight_grad.cuh"

namespace fusebackend::depthwise_conv {
namespace {

RollingWindowPlan plan_of(const ForwardParams& p) {
  return rolling_window_plan(p.g, p.dtype, placement_of(p.x, p.x_stride, p.g.channels, p.g.in.w), placement_of(p.y, p.y_stride, p.g.channels, p.g.out.w),
                             RollingResult::kForward, sm_count());
}
RollingWindowPlan plan_of(const InputGradParams& p) {
  return rolling_window_plan(p.g, p.dtype, placement_of(p.dx, p.dx_stride, p.g.channels, p.g.in.w),
                             placement_of(p.grad, p.grad_stride, p.g.channels, p.g.out.w), RollingResult::kInputGrad, sm_count());
}
RollingWindowPlan plan_of(const WeightGradParams& p) {
  return rolling_window_plan(p.g, p.dtype, placement_of(p.x, p.x_stride, p.g.channels, p.g.in.w),
                             placement_of(p.grad, p.grad_stride, p.g.channels, p.g.out.w), RollingResult::kWeightGrad, sm_count());
}

RollingSides sides_of(const Geometry& g) { return {int(g.in.h), int(g.in.w), int(g.out.h), int(g.out.w), int(g.pad.h), int(g.pad.w)}; }
RollingIndex index_of(const RollingWindowPlan& p) {
  return {FastDiv(uint32_t(p.groups)), FastDiv(uint32_t(p.channel_tiles)), FastDiv(uint32_t(p.column_strips)), FastDiv(uint32_t(p.row_tiles))};
}

template <Rolling kForm>
using Form = std::integral_constant<Rolling, kForm>;

// Calls f(T, taps, form) with constants.
template <typename F>
cudaError_t dispatch(DType dtype, int64_t taps, Rolling form, F&& f) {
  const auto by_taps = [&](auto type, auto of_form) {
    return taps == 3   ? f(type, std::integral_constant<int, 3>{}, of_form)
           : taps == 5 ? f(type, std::integral_constant<int, 5>{}, of_form)
                       : f(type, std::integral_constant<int, 7>{}, of_form);
  };
  if (form == Rolling::kPlanes) return by_taps(float{}, Form<Rolling::kPlanes>{});
  return dispatch_dtype(dtype, [&](auto type) {
    return form == Rolling::kStrided ? by_taps(type, Form<Rolling::kStrided>{}) : by_taps(type, Form<Rolling::kChannels>{});
  });
}

}  // namespace

bool can_run_rolling_window(const ForwardParams& p) { return plan_of(p).fits; }
bool can_run_rolling_window(const InputGradParams& p) { return plan_of(p).fits; }
bool can_run_rolling_window(const WeightGradParams& p) { return plan_of(p).fits; }
int rolling_window_splits(const WeightGradParams& p) { return int(plan_of(p).strip_tiles); }

cudaError_t launch_rolling_window(const ForwardParams& f, cudaStream_t stream) {
  RollingWindowParams p = {};
  p.p = f, p.plan = plan_of(f), p.sides = sides_of(f.g), p.index = index_of(p.plan);
  p.x_row = int(f.x_stride.h), p.x_column = int(f.x_stride.w), p.y_row = int(f.y_stride.h), p.y_column = int(f.y_stride.w);
  p.x_step = f.x_stride.w * element_size(f.dtype), p.y_step = f.y_stride.w * element_size(f.dtype);
  const unsigned blocks = unsigned(p.plan.strip_tiles * p.plan.channel_tiles);
  const auto launch = [&](auto type, auto taps, auto form) {
    const int bytes = p.plan.groups * rolling_channels(taps, form) * (taps * taps * 4 + int(sizeof(StagedAffine)));
    depthwise_rolling_window<decltype(type), decltype(taps)::value, decltype(form)::value><<<blocks, kRollingThreads, bytes, stream>>>(p);
    return cudaGetLastError();
  };
  if (p.plan.form == Rolling::kWidePlanes) return launch(float{}, std::integral_constant<int, kRollingWideTaps>{}, Form<Rolling::kWidePlanes>{});
  return dispatch(f.dtype, f.g.taps.w, p.plan.form, launch);
}

cudaError_t launch_rolling_window(const InputGradParams& d, cudaStream_t stream) {
  RollingInputParams p = {};
  p.p = d, p.plan = plan_of(d), p.sides = sides_of(d.g), p.index = index_of(p.plan);
  p.grad_row = int(d.grad_stride.h), p.grad_column = int(d.grad_stride.w), p.dx_row = int(d.dx_stride.h), p.dx_column = int(d.dx_stride.w);
  p.grad_step = d.grad_stride.w * element_size(d.dtype), p.dx_step = d.dx_stride.w * element_size(d.dtype);
  const unsigned blocks = unsigned(p.plan.strip_tiles * p.plan.channel_tiles);
  return dispatch_dtype(d.dtype, [&](auto type) {
    using T = decltype(type);
    const int taps = int(d.g.taps.w), bytes = p.plan.groups * rolling_channels(taps, Rolling::kStrided) * taps * taps * 4;
    if (taps == 3) depthwise_rolling_input_grad<T, 3><<<blocks, kRollingThreads, bytes, stream>>>(p);
    else if (taps == 5) depthwise_rolling_input_grad<T, 5><<<blocks, kRollingThreads, bytes, stream>>>(p);
    else depthwise_rolling_input_grad<T, 7><<<blocks, kRollingThreads, bytes, stream>>>(p);
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
  return dispatch(w.dtype, w.g.taps.w, p.plan.form, [&](auto type, auto taps, auto form) {
    depthwise_rolling_weight_grad<decltype(type), decltype(taps)::value, decltype(form)::value><<<blocks, kRollingThreads, 0, stream>>>(p);
    return cudaGetLastError();
  });
}

}  // namespace fusebackend::depthwise_conv
