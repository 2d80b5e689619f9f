// Launches outer_products.cuh.
#include "depthwise_conv/outer_products.cuh"

#include "common/device_properties.h"

namespace fusebackend::depthwise_conv {
namespace {

OuterProductsPlan plan_of(const WeightGradParams& p) {
  return outer_products_plan(p.g, placement_of(p.grad, p.grad_stride, p.g.outputs(), p.g.out.w), placement_of(p.x, p.x_stride, p.g.channels, p.g.in.w), sm_count());
}

template <typename T, int kBlocks, int kTapRows, bool kVectors>
cudaError_t launch(const OuterProductsParams& p, cudaStream_t stream) {
  static SharedMemoryOptIn opt_in;
  const cudaError_t error = opt_in.ensure(depthwise_outer_products<T, kBlocks, kTapRows, kVectors>, max_shared_bytes());
  if (error != cudaSuccess) return error;
  depthwise_outer_products<T, kBlocks, kTapRows, kVectors><<<unsigned(p.plan.grid()), p.plan.threads, p.plan.shared_bytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

bool can_run_outer_products(const WeightGradParams& p) {
  if (!is_half(p.dtype) || compute_capability_major() < 8) return false;
  const OuterProductsPlan plan = plan_of(p);
  return plan.fits && plan.shared_bytes <= max_shared_bytes();
}

int outer_products_splits(const WeightGradParams& p) { return plan_of(p).splits; }

cudaError_t launch_outer_products(const WeightGradParams& w, cudaStream_t stream) {
  const Geometry& g = w.g;
  OuterProductsParams p = {};
  p.plan = plan_of(w);
  p.grad = image_of(w.grad, w.grad_stride, g.batch, g.outputs(), g.out);
  p.x = image_of(w.x, w.x_stride, g.batch, g.channels, g.in);
  p.partial = w.partial;
  p.need_weight = w.dw != nullptr, p.need_bias = w.db != nullptr;
  p.multiplier = int(g.multiplier), p.taps_h = int(g.taps.h), p.taps_w = int(g.taps.w);
  p.stride_h = int(g.stride.h), p.stride_w = int(g.stride.w), p.pad_h = int(g.pad.h), p.pad_w = int(g.pad.w);
  p.dilation_h = int(g.dilation.h), p.dilation_w = int(g.dilation.w);
  p.rows_of_plane = FastDiv(uint32_t(p.plan.grad.rows)), p.column_blocks = FastDiv(uint32_t(p.plan.column_blocks));
  return dispatch_16_bits(w.dtype, [&](auto type) {
    using T = decltype(type);
    if (p.plan.vectors)
      return p.plan.blocks == 6 ? launch<T, 6, 4, true>(p, stream) : p.plan.per_warp == 7 ? launch<T, 3, 7, true>(p, stream) : launch<T, 3, 4, true>(p, stream);
    return p.plan.blocks == 6 ? launch<T, 6, 4, false>(p, stream) : p.plan.per_warp == 7 ? launch<T, 3, 7, false>(p, stream) : launch<T, 3, 4, false>(p, stream);
  });
}

}  // namespace fusebackend::depthwise_conv
