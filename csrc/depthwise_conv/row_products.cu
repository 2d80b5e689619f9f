// Launches row_products.cuh.
#include "depthwise_conv/row_products.cuh"

#include "common/device_properties.h"

namespace fusebackend::depthwise_conv {
namespace {

RowProductsPlan plan_of(const WeightGradParams& p) {
  return row_products_plan(p.g, placement_of(p.grad, p.grad_stride, p.g.outputs(), p.g.out.w), placement_of(p.x, p.x_stride, p.g.channels, p.g.in.w), sm_count());
}

template <typename T, int kTaps>
void launch(const RowProductsParams& p, cudaStream_t stream) {
  const unsigned blocks = unsigned(p.channels * p.plan.splits);
  if (p.plan.columns == 4) depthwise_row_products<T, kTaps, 4><<<blocks, kRowProductsThreads, 0, stream>>>(p);
  else if (p.plan.columns == 2) depthwise_row_products<T, kTaps, 2><<<blocks, kRowProductsThreads, 0, stream>>>(p);
  else depthwise_row_products<T, kTaps, 1><<<blocks, kRowProductsThreads, 0, stream>>>(p);
}

}  // namespace

bool can_run_row_products(const WeightGradParams& p) { return is_half(p.dtype) && compute_capability_major() >= 8 && plan_of(p).fits; }

int row_products_splits(const WeightGradParams& p) { return plan_of(p).splits; }

cudaError_t launch_row_products(const WeightGradParams& w, cudaStream_t stream) {
  const Geometry& g = w.g;
  RowProductsParams p = {};
  p.plan = plan_of(w);
  p.grad = static_cast<const uint16_t*>(w.grad), p.x = static_cast<const uint16_t*>(w.x), p.partial = w.partial;
  p.chunks = FastDiv(uint32_t(p.plan.chunks)), p.bands = FastDiv(uint32_t(p.plan.bands));
  p.grad_channel = w.grad_stride.c, p.x_channel = w.x_stride.c;
  p.grad_image = uint32_t(w.grad_stride.n), p.x_image = uint32_t(w.x_stride.n);
  p.grad_row = int(w.grad_stride.h), p.x_row = int(w.x_stride.h);
  p.channels = int(g.channels), p.in_h = int(g.in.h), p.in_w = int(g.in.w), p.out_h = int(g.out.h), p.out_w = int(g.out.w);
  p.pad_h = int(g.pad.h), p.taps_h = int(g.taps.h);
  p.need_bias = w.db != nullptr;
  return dispatch_16_bits(w.dtype, [&](auto type) {
    using T = decltype(type);
    g.taps.w == 3 ? launch<T, 3>(p, stream) : g.taps.w == 5 ? launch<T, 5>(p, stream) : launch<T, 7>(p, stream);
    return cudaGetLastError();
  });
}

}  // namespace fusebackend::depthwise_conv
