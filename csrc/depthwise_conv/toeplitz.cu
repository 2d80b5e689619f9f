// Launches toeplitz.cuh.
#include "depthwise_conv/toeplitz.cuh"

#include "common/device_properties.h"

namespace fusebackend::depthwise_conv {
namespace {

Placement placement_of(const Image& i) { return placement_of(i.data, i.stride, i.channels, i.width); }

ToeplitzParams params_of(const Geometry& g, bool transposed, const Image& source, const Image& target, const void* w, const Strides& w_stride) {
  ToeplitzParams p = {};
  p.source = source, p.target = target;
  p.w = w, p.w_channel = w_stride.n, p.w_row = w_stride.h, p.w_column = w_stride.w;
  p.multiplier = int(g.multiplier), p.taps_h = int(g.taps.h), p.taps_w = int(g.taps.w);
  p.stride_h = int(g.stride.h), p.stride_w = int(g.stride.w), p.pad_h = int(g.pad.h), p.pad_w = int(g.pad.w);
  p.dilation_h = int(g.dilation.h), p.dilation_w = int(g.dilation.w);
  p.transposed = transposed;
  p.plan = toeplitz_plan(g, transposed, placement_of(source), placement_of(target), sm_count());
  if (p.plan.fits) {
    p.segments = FastDiv(uint32_t(p.plan.segments));
    const int rows = p.plan.target.rows / p.plan.phases;
    p.rows_of_plane = FastDiv(uint32_t(rows));
    p.strips = FastDiv(uint32_t(ceil_div(p.plan.target.images * rows * p.plan.segments, 16)));
    p.channel_tiles = FastDiv(uint32_t(p.plan.channel_tiles)), p.column_tiles = FastDiv(uint32_t(p.plan.column_tiles));
    p.row_tiles = FastDiv(uint32_t(p.plan.row_tiles));
    p.window_columns = FastDiv(uint32_t(p.taps_w)), p.window_rows = FastDiv(uint32_t(p.taps_h));
  }
  return p;
}

ToeplitzParams params_of(const ForwardParams& p) {
  ToeplitzParams t = params_of(p.g, false, image_of(p.x, p.x_stride, p.g.batch, p.g.channels, p.g.in),
                               image_of(p.y, p.y_stride, p.g.batch, p.g.outputs(), p.g.out), p.w, p.w_stride);
  t.bias = p.bias, t.bias_stride = p.bias_stride, t.epilogue = p.epilogue;
  return t;
}
ToeplitzParams params_of(const InputGradParams& p) {
  return params_of(p.g, true, image_of(p.grad, p.grad_stride, p.g.batch, p.g.outputs(), p.g.out),
                   image_of(p.dx, p.dx_stride, p.g.batch, p.g.channels, p.g.in), p.w, p.w_stride);
}

template <typename T, ColumnStep kStep, int kSpan, int kBlocks>
cudaError_t launch(const ToeplitzParams& p, cudaStream_t stream) {
  static SharedMemoryOptIn opt_in;
  const cudaError_t error = opt_in.ensure(depthwise_toeplitz<T, kStep, kSpan, kBlocks>, max_shared_bytes());
  if (error != cudaSuccess) return error;
  depthwise_toeplitz<T, kStep, kSpan, kBlocks><<<unsigned(p.plan.grid()), p.plan.threads, p.plan.shared_bytes, stream>>>(p);
  return cudaGetLastError();
}

template <typename T, ColumnStep kStep, int kSpan>
cudaError_t launch_blocks(const ToeplitzParams& p, cudaStream_t stream) {
  if constexpr (kStep == ColumnStep::kOne)
    if (p.plan.blocks == 8) return launch<T, kStep, kSpan, 8>(p, stream);
  return p.plan.blocks == 2 ? launch<T, kStep, kSpan, 2>(p, stream) : launch<T, kStep, kSpan, 4>(p, stream);
}

cudaError_t launch_any(const ToeplitzParams& p, DType dtype, cudaStream_t stream) {
  if (p.plan.grid() == 0) return cudaSuccess;
  return dispatch_16_bits(dtype, [&](auto type) {
    using T = decltype(type);
    const int span = p.plan.span;
    switch (p.plan.step) {
      case ColumnStep::kHalf: return span == 2 ? launch_blocks<T, ColumnStep::kHalf, 2>(p, stream) : launch_blocks<T, ColumnStep::kHalf, 3>(p, stream);
      case ColumnStep::kTwo: return span == 3 ? launch_blocks<T, ColumnStep::kTwo, 3>(p, stream) : launch_blocks<T, ColumnStep::kTwo, 6>(p, stream);
      default:
        return span == 2   ? launch_blocks<T, ColumnStep::kOne, 2>(p, stream)
               : span == 3 ? launch_blocks<T, ColumnStep::kOne, 3>(p, stream)
                           : launch_blocks<T, ColumnStep::kOne, 5>(p, stream);
    }
  });
}

bool can_run(const ToeplitzParams& p) { return p.plan.fits && p.plan.shared_bytes <= max_shared_bytes(); }

}  // namespace

bool can_run_toeplitz(const ForwardParams& p) { return is_half(p.dtype) && compute_capability_major() >= 8 && can_run(params_of(p)); }
bool can_run_toeplitz(const InputGradParams& p) { return is_half(p.dtype) && compute_capability_major() >= 8 && can_run(params_of(p)); }
cudaError_t launch_toeplitz(const ForwardParams& p, cudaStream_t stream) { return launch_any(params_of(p), p.dtype, stream); }
cudaError_t launch_toeplitz(const InputGradParams& p, cudaStream_t stream) { return launch_any(params_of(p), p.dtype, stream); }

}  // namespace fusebackend::depthwise_conv
