// Launches channel_band.cuh and channel_products.cuh.
#include "common/device_properties.h"
#include "depthwise_conv/channel_band.cuh"
#include "depthwise_conv/channel_products.cuh"

namespace fusebackend::depthwise_conv {
namespace {

ChannelTilePlan plan_of(const ForwardParams& p) {
  ChannelTilePlan plan =
      channel_tile_plan(p.g, placement_of(p.x, p.x_stride, p.g.channels, p.g.in.w), placement_of(p.y, p.y_stride, p.g.outputs(), p.g.out.w), false, sm_count());
  if (p.epilogue.any) plan.shared_bytes += kTileChannels * int(sizeof(StagedAffine));
  return plan;
}
ChannelTilePlan plan_of(const WeightGradParams& p) {
  return channel_tile_plan(p.g, placement_of(p.x, p.x_stride, p.g.channels, p.g.in.w), placement_of(p.grad, p.grad_stride, p.g.outputs(), p.g.out.w), true, sm_count());
}

bool fits(const ChannelTilePlan& p, DType dtype) { return is_half(dtype) && compute_capability_major() >= 8 && p.fits && p.shared_bytes <= max_shared_bytes(); }

ChannelTileIndex index_of(const ChannelTilePlan& p) {
  return {FastDiv(uint32_t(p.channel_tiles)), FastDiv(uint32_t(p.column_tiles)), FastDiv(uint32_t(p.row_tiles)), FastDiv(uint32_t(p.words))};
}
ChannelTileSides sides_of(const Geometry& g) {
  return {int(g.batch), int(g.channels), int(g.in.h), int(g.in.w), int(g.out.h), int(g.out.w), int(g.pad.h), int(g.pad.w)};
}

template <typename T, int kTaps, bool kFinishes>
cudaError_t launch_band(const ChannelBandParams& p, cudaStream_t stream) {
  static SharedMemoryOptIn opt_in;
  const auto kernel = depthwise_channel_band<T, kTaps, kFinishes>;
  const cudaError_t error = opt_in.ensure(kernel, max_shared_bytes());
  if (error != cudaSuccess) return error;
  const unsigned blocks = unsigned(p.plan.groups * p.plan.column_tiles * p.plan.channel_tiles);
  kernel<<<blocks, kChannelTileThreads, p.plan.shared_bytes, stream>>>(p);
  return cudaGetLastError();
}

template <typename T, int kTaps>
cudaError_t launch(const ChannelBandParams& p, cudaStream_t stream) {
  return p.p.epilogue.any ? launch_band<T, kTaps, true>(p, stream) : launch_band<T, kTaps, false>(p, stream);
}

template <typename T, int kTaps>
cudaError_t launch(const ChannelProductsParams& p, cudaStream_t stream) {
  static SharedMemoryOptIn opt_in;
  const cudaError_t error = opt_in.ensure(depthwise_channel_products<T, kTaps>, max_shared_bytes());
  if (error != cudaSuccess) return error;
  depthwise_channel_products<T, kTaps><<<unsigned(p.plan.splits * p.plan.channel_tiles), kChannelTileThreads, p.plan.shared_bytes, stream>>>(p);
  return cudaGetLastError();
}

template <typename Params>
cudaError_t launch(const Params& p, DType dtype, int64_t taps, cudaStream_t stream) {
  return dispatch_16_bits(dtype, [&](auto type) {
    using T = decltype(type);
    return taps == 5 ? launch<T, 5>(p, stream) : launch<T, 7>(p, stream);
  });
}

}  // namespace

bool can_run_channel_band(const ForwardParams& p) { return has_small_steps(p.w_stride) && fits(plan_of(p), p.dtype); }
bool can_run_channel_products(const WeightGradParams& p) { return fits(plan_of(p), p.dtype); }
int channel_products_splits(const WeightGradParams& p) { return plan_of(p).splits; }

cudaError_t launch_channel_band(const ForwardParams& f, cudaStream_t stream) {
  ChannelBandParams p = {};
  p.p = f, p.plan = plan_of(f), p.by = index_of(p.plan), p.sides = sides_of(f.g);
  p.x_row = int(f.x_stride.h), p.x_column = int(f.x_stride.w), p.y_row = int(f.y_stride.h), p.y_column = int(f.y_stride.w);
  p.tap_row = int(f.w_stride.h), p.tap_column = int(f.w_stride.w);
  return launch(p, f.dtype, f.g.taps.w, stream);
}

cudaError_t launch_channel_products(const WeightGradParams& w, cudaStream_t stream) {
  ChannelProductsParams p = {};
  p.grad = static_cast<const uint16_t*>(w.grad), p.x = static_cast<const uint16_t*>(w.x), p.partial = w.partial;
  p.plan = plan_of(w), p.by = index_of(p.plan), p.sides = sides_of(w.g);
  p.grad_image = w.grad_stride.n, p.x_image = w.x_stride.n;
  p.grad_row = int(w.grad_stride.h), p.grad_column = int(w.grad_stride.w), p.x_row = int(w.x_stride.h), p.x_column = int(w.x_stride.w);
  p.need_bias = w.db != nullptr;
  return launch(p, w.dtype, w.g.taps.w, stream);
}

}  // namespace fusebackend::depthwise_conv
