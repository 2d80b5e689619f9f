// Launches channel_ring_sm90.cuh.
#include "depthwise_conv/channel_ring_sm90.cuh"

#include "common/device_properties.h"
#include "common/encode_tiled_sm90.h"

namespace fusebackend::depthwise_conv {
namespace {

ChannelRingPlan plan_of(const ForwardParams& p) {
  return channel_ring_plan(p.g, placement_of(p.x, p.x_stride, p.g.channels, p.g.in.w), placement_of(p.y, p.y_stride, p.g.channels, p.g.out.w), sm_count());
}

// Of boxes of so many columns of two rows of a block's channels and images. Neighbouring blocks have the other channels of a cache line.
bool make_map(CUtensorMap& to, const void* data, const Strides& stride, const Geometry& g, const Pair& sides, int columns, int images) {
  constexpr cuuint64_t kAnyStride = 16;  // of dimensions of one element
  const auto bytes = [](int64_t s, int64_t size) { return size == 1 ? kAnyStride : cuuint64_t(s) * 2; };
  const cuuint64_t sizes[4] = {cuuint64_t(g.channels), cuuint64_t(sides.w), cuuint64_t(sides.h), cuuint64_t(g.batch)};
  const cuuint64_t strides[3] = {bytes(stride.w, sides.w), bytes(stride.h, sides.h), bytes(stride.n, g.batch)};
  const cuuint32_t box[4] = {kChannelRingChannels, cuuint32_t(columns), kChannelRingRows, cuuint32_t(images)}, every[4] = {1, 1, 1, 1};
  return encode_tiled()(&to, CU_TENSOR_MAP_DATA_TYPE_UINT16, 4, const_cast<void*>(data), sizes, strides, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE,
                        CU_TENSOR_MAP_SWIZZLE_32B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <typename T, int kTaps, bool kFinishes>
cudaError_t launch_kernel(const ChannelRingParams& p, cudaStream_t stream) {
  static SharedMemoryOptIn opt_in;
  const auto kernel = depthwise_channel_ring<T, kTaps, kFinishes>;
  const cudaError_t error = opt_in.ensure(kernel, max_shared_bytes() - 1024);  // the rest is for its barriers
  if (error != cudaSuccess) return error;
  kernel<<<unsigned(p.plan.thread_blocks()), kChannelRingThreads, p.plan.shared_bytes, stream>>>(p);
  return cudaGetLastError();
}

template <typename T, int kTaps>
cudaError_t launch_taps(const ChannelRingParams& p, cudaStream_t stream) {
  return p.p.epilogue.any ? launch_kernel<T, kTaps, true>(p, stream) : launch_kernel<T, kTaps, false>(p, stream);
}

cudaError_t launch(const ForwardParams& f, const ChannelRingPlan& plan, cudaStream_t stream) {
  const Geometry& g = f.g;
  ChannelRingParams p = {};
  p.p = f, p.plan = plan;
  if (!make_map(p.from, f.x, f.x_stride, g, g.in, 8 * plan.blocks, plan.segments)) return cudaErrorInvalidValue;
  if (!make_map(p.to, f.y, f.y_stride, g, g.out, 8 * plan.strips, plan.segments)) return cudaErrorInvalidValue;
  p.channel_tiles = FastDiv(uint32_t(plan.channel_tiles)), p.column_tiles = FastDiv(uint32_t(plan.column_tiles)), p.row_tiles = FastDiv(uint32_t(plan.row_tiles));
  p.by_segment_blocks = small_divisor(kChannelRingRows * plan.blocks), p.by_strips = small_divisor(plan.strips);
  p.channels = int(g.channels), p.batch = int(g.batch), p.out_h = int(g.out.h), p.pad_h = int(g.pad.h), p.pad_w = int(g.pad.w);
  p.tap_row = int(f.w_stride.h), p.tap_column = int(f.w_stride.w);
  return dispatch_16_bits(f.dtype, [&](auto type) {
    using T = decltype(type);
    return g.taps.w == 5 ? launch_taps<T, 5>(p, stream) : launch_taps<T, 7>(p, stream);
  });
}

}  // namespace

bool can_run_channel_ring(const ForwardParams& p) {
  const bool taken = is_half(p.dtype) && has_small_steps(p.w_stride) && compute_capability_major() == 9 && compute_capability_minor() == 0;
  return taken && encode_tiled() && plan_of(p).fits;
}

cudaError_t launch_channel_ring(const ForwardParams& p, cudaStream_t stream) { return launch(p, plan_of(p), stream); }

}  // namespace fusebackend::depthwise_conv
