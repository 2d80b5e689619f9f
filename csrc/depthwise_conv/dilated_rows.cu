// Launches dilated_rows.cuh.
#include "depthwise_conv/dilated_rows.cuh"

#include "common/device_properties.h"

namespace fusebackend::depthwise_conv {
namespace {

DilatedRowsPlan plan_of(const ForwardParams& p) {
  return dilated_rows_plan(p.g, p.dtype, placement_of(p.x, p.x_stride, p.g.channels, p.g.in.w), placement_of(p.y, p.y_stride, p.g.outputs(), p.g.out.w));
}

DilatedRowsPlan plan_of(const WeightGradParams& p) {
  return dilated_rows_weight_grad_plan(p.g, p.dtype, placement_of(p.grad, p.grad_stride, p.g.outputs(), p.g.out.w),
                                       placement_of(p.x, p.x_stride, p.g.channels, p.g.in.w), sm_count());
}

DilatedRowsPlan plan_of(const InputGradParams& input, const WeightGradParams& p) {
  const Geometry& g = p.g;
  return dilated_rows_gradients_plan(g, p.dtype, placement_of(p.grad, p.grad_stride, g.channels, g.out.w), placement_of(p.x, p.x_stride, g.channels, g.in.w),
                                     placement_of(input.dx, input.dx_stride, g.channels, g.in.w), p.db != nullptr, sm_count());
}

// Calls f(element, taps that registers are for, whether all is aligned), each as a type.
template <typename F>
cudaError_t dispatch(DType dtype, int taps, bool aligned, F&& f) {
  return dispatch_dtype(dtype, [&](auto type) {
    const auto with_taps = [&](auto most) {
      aligned ? f(type, most, std::true_type{}) : f(type, most, std::false_type{});
      return cudaGetLastError();
    };
    if (taps <= 3) return with_taps(std::integral_constant<int, 3>{});
    return taps == 4 ? with_taps(std::integral_constant<int, 4>{}) : with_taps(std::integral_constant<int, kDilatedRowsTaps>{});
  });
}

}  // namespace

bool can_run_dilated_rows(const ForwardParams& p) { return plan_of(p).fits; }

cudaError_t launch_dilated_rows(const ForwardParams& f, cudaStream_t stream) {
  const Geometry& g = f.g;
  const DilatedRowsPlan plan = plan_of(f);
  DilatedRowsParams p = {};
  p.p = f, p.items = int(plan.items), p.part = plan.part;
  p.parts = FastDiv(uint32_t(plan.part)), p.rows = FastDiv(uint32_t(g.out.h)), p.channels = FastDiv(uint32_t(g.channels));
  p.in_w = int(g.in.w), p.out_w = int(g.out.w), p.pad = int(g.pad.w), p.dilation = int(g.dilation.w), p.taps = int(g.taps.w);
  const unsigned blocks = unsigned(plan.grid());
  return dispatch(f.dtype, p.taps, plan.aligned, [&](auto type, auto taps, auto aligned) {
    depthwise_dilated_rows<decltype(type), decltype(taps)::value, decltype(aligned)::value><<<blocks, kDilatedRowsThreads, 0, stream>>>(p);
  });
}

bool can_run_dilated_rows(const WeightGradParams& p) { return plan_of(p).fits; }

int dilated_rows_splits(const WeightGradParams& p) { return plan_of(p).splits; }

cudaError_t launch_dilated_rows(const WeightGradParams& w, cudaStream_t stream) {
  const Geometry& g = w.g;
  const DilatedRowsPlan plan = plan_of(w);
  DilatedRowsWeightGradParams p = {};
  p.grad = w.grad, p.x = w.x, p.partial = w.partial;
  p.grad_stride = w.grad_stride, p.x_stride = w.x_stride;
  p.parts = FastDiv(uint32_t(plan.part)), p.rows = FastDiv(uint32_t(g.out.h));
  p.items = plan.items, p.part = plan.part, p.splits = plan.splits, p.channels = int(g.channels);
  p.in_w = int(g.in.w), p.out_w = int(g.out.w), p.pad = int(g.pad.w), p.dilation = int(g.dilation.w), p.taps = int(g.taps.w);
  p.need_weight = w.dw != nullptr;
  const unsigned blocks = unsigned(g.channels * plan.splits);
  return dispatch(w.dtype, p.taps, plan.aligned, [&](auto type, auto taps, auto aligned) {
    depthwise_dilated_rows_weight_grad<decltype(type), decltype(taps)::value, decltype(aligned)::value><<<blocks, kDilatedRowsSumThreads, 0, stream>>>(p);
  });
}

// Without the weight's gradient x need not be read.
bool can_run_dilated_rows(const InputGradParams& input, const WeightGradParams& p) { return p.dw && plan_of(input, p).fits; }

int dilated_rows_splits(const InputGradParams& input, const WeightGradParams& p) { return plan_of(input, p).splits; }

cudaError_t launch_dilated_rows(const InputGradParams& input, const WeightGradParams& w, cudaStream_t stream) {
  const DilatedRowsPlan plan = plan_of(input, w);
  DilatedRowsGradientsParams p = {};
  p.p = reversed(input), p.x = w.x, p.partial = w.partial, p.x_stride = w.x_stride;
  const Geometry& g = p.p.g;
  p.parts = FastDiv(uint32_t(plan.part)), p.rows = FastDiv(uint32_t(g.out.h));
  p.items = plan.items, p.splits = plan.splits, p.channels = int(g.channels);
  p.in_w = int(g.in.w), p.out_w = int(g.out.w), p.columns = plan.columns, p.pad = int(g.pad.w), p.dilation = int(g.dilation.w), p.taps = int(g.taps.w);
  p.bias_tap = plan.bias_tap;
  const unsigned blocks = unsigned(g.channels * plan.splits);
  return dispatch(w.dtype, p.taps, plan.aligned, [&](auto type, auto taps, auto aligned) {
    depthwise_dilated_rows_gradients<decltype(type), decltype(taps)::value, decltype(aligned)::value><<<blocks, kDilatedRowsSumThreads, 0, stream>>>(p);
  });
}

}  // namespace fusebackend::depthwise_conv
