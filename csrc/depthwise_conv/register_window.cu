// Depthwise convolution of fp32 planes, stride 1, and its weight's gradient, with tiles of x in shared memory and windows
// of them in registers. For x's gradient the forward runs on the incoming gradient, with its taps reversed.
//
// Forward: a thread block has a tile of some images of one channel, a thread 4x4 results, so that a window of a row serves four rows of results.
// The weight's gradient: a block goes through tiles of one channel; a thread has eight columns of a row of the gradient at a time and sums all
// taps in registers, the block's threads are added up at the end.
#include "common/cuda_common.cuh"
#include "common/device_properties.h"
#include "common/channel_epilogue.cuh"
#include "depthwise_conv/device_math.cuh"
#include "depthwise_conv/launchers.h"
#include "depthwise_conv/register_window_plan.h"
#include "depthwise_conv/tile.cuh"

namespace fusebackend::depthwise_conv {
namespace {

// Some rows and columns of images, in shared memory; what is outside is zero. Asynchronous. `vectors`: rows, and the first column, begin at
// multiples of 16 bytes.
__device__ __forceinline__ void fill_plane(const float* from, const Strides& stride, int64_t first_image, int batch, int height, int width, int first_row,
                                           int first_column, int images, int rows, int columns, int pitch, bool vectors, float* tile) {
  from += first_image * stride.n;
  const int count = int(min(int64_t{images}, batch - first_image));
  for_each_row(images, rows, vectors ? columns / 4 : columns, [&](int image, int row, int chunk) {
    const int i = first_row + row, j = first_column + (vectors ? chunk * 4 : chunk);
    float* const to = tile + (image * rows + row) * pitch + (vectors ? chunk * 4 : chunk);
    const float* const source = from + image * stride.n + i * stride.h + j * stride.w;
    if (image < count && unsigned(i) < unsigned(height) && unsigned(j) < unsigned(width)) {
      if (vectors) cp_async_16(to, source);
      else cp_async_4(to, source);
    } else if (vectors) {
      *reinterpret_cast<float4*>(to) = {0, 0, 0, 0};
    } else {
      *to = 0;
    }
  });
}

template <int kColumns>
__device__ __forceinline__ void load_window(float (&to)[kColumns], const float* from) {
#pragma unroll
  for (int i = 0; i < kColumns; i += 4) {
    const float4 v = *reinterpret_cast<const float4*>(from + i);
    to[i] = v.x, to[i + 1] = v.y, to[i + 2] = v.z, to[i + 3] = v.w;
  }
}

struct ForwardWindowParams {
  ForwardParams p;
  RegisterWindowPlan plan;
  FastDiv column_groups, row_groups;
  bool vectors;         // of results may be stored
  bool source_vectors;  // x may be loaded by vectors
};

template <int kTaps>
__global__ void __launch_bounds__(256, kTaps == 7 ? 4 : 5) depthwise_window_forward(const __grid_constant__ ForwardWindowParams params) {
  const ForwardParams& p = params.p;
  const Geometry& g = p.g;
  const RegisterWindowPlan& plan = params.plan;
  extern __shared__ __align__(16) float tile[];
  const int taps_h = int(g.taps.h);
  float* const taps = tile + plan.images * plan.x_rows * plan.x_pitch;  // rows of eight

  const int64_t b0 = blockIdx.x, b1 = b0 / g.channels, b2 = b1 / plan.column_tiles, b3 = b2 / plan.row_tiles;
  const int channel = int(b0 - b1 * g.channels), first_column = int(b1 - b2 * plan.column_tiles) * plan.columns;
  const int first_row = int(b2 - b3 * plan.row_tiles) * plan.rows;
  const int64_t first_image = b3 * plan.images;
  constexpr int kWindow = forward_window(kTaps);
  fill_plane(static_cast<const float*>(p.x) + channel * p.x_stride.c, p.x_stride, first_image, int(g.batch), int(g.in.h), int(g.in.w), first_row - int(g.pad.h),
             first_column - int(g.pad.w), plan.images, plan.x_rows, plan.columns - kForwardColumns + kWindow, plan.x_pitch, params.source_vectors, tile);
  cp_async_commit();
  const float* const w = static_cast<const float*>(p.w) + channel * p.w_stride.n;
  for (int i = threadIdx.x; i < taps_h * 8; i += blockDim.x)
    taps[i] = i % 8 < kTaps ? w[i / 8 * p.w_stride.h + i % 8 * p.w_stride.w] : 0.f;
  cp_async_wait<0>();
  __syncthreads();

  const float bias = p.bias ? static_cast<const float*>(p.bias)[channel * p.bias_stride] : 0.f;
  const ChannelAffine affine = affine_of<float>(p.epilogue, channel);
  for (int task = threadIdx.x; task < plan.tasks; task += blockDim.x) {
    uint32_t line, column_group, image, row_group;
    params.column_groups.divmod(uint32_t(task), line, column_group);
    params.row_groups.divmod(line, image, row_group);
    const int row = int(row_group) * kForwardRows, column = int(column_group) * kForwardColumns;
    if (first_image + image >= g.batch || first_row + row >= g.out.h || first_column + column >= g.out.w) continue;
    const float* x = tile + (int(image) * plan.x_rows + row) * plan.x_pitch + column;
    float sums[kForwardRows][kForwardColumns];
#pragma unroll
    for (int i = 0; i < kForwardRows; ++i)
#pragma unroll
      for (int j = 0; j < kForwardColumns; ++j) sums[i][j] = bias;
    for (int r = 0; r < taps_h + kForwardRows - 1; ++r, x += plan.x_pitch) {
      float window[kWindow];
      load_window(window, x);
#pragma unroll
      for (int i = 0; i < kForwardRows; ++i) {
        if (r < i || r - i >= taps_h) continue;
        float tap[8];
        load_window(tap, taps + (r - i) * 8);
#pragma unroll
        for (int b = 0; b < kTaps; ++b)
#pragma unroll
          for (int j = 0; j < kForwardColumns; ++j) sums[i][j] = fmaf(tap[b], window[j + b], sums[i][j]);
      }
    }
    // Zeros beside the image times a tap that is not finite: these products are left out.
    float finite = 0;
#pragma unroll
    for (int i = 0; i < kForwardRows; ++i)
#pragma unroll
      for (int j = 0; j < kForwardColumns; ++j) finite = fmaf(sums[i][j], 0.f, finite);
    if (finite != 0.f) {
      x -= (taps_h + kForwardRows - 1) * plan.x_pitch;
#pragma unroll
      for (int i = 0; i < kForwardRows; ++i) {
#pragma unroll
        for (int j = 0; j < kForwardColumns; ++j) {
          float sum = bias;
          for (int a = 0; a < taps_h; ++a) {
            const int64_t source_row = first_row + row + i - g.pad.h + a;
            if (source_row < 0 || source_row >= g.in.h) continue;
            for (int b = 0; b < kTaps; ++b) {
              const int64_t source_column = first_column + column + j - g.pad.w + b;
              if (source_column >= 0 && source_column < g.in.w && i + a < plan.x_rows - row) sum = fmaf(taps[a * 8 + b], x[(i + a) * plan.x_pitch + j + b], sum);
            }
          }
          sums[i][j] = sum;
        }
      }
    }
    finish<float>(sums, p.epilogue, affine);
    float* y = static_cast<float*>(p.y) + (first_image + image) * p.y_stride.n + channel * p.y_stride.c + int64_t{first_row + row} * p.y_stride.h +
               (first_column + column) * p.y_stride.w;
#pragma unroll
    for (int i = 0; i < kForwardRows; ++i, y += p.y_stride.h) {
      if (first_row + row + i >= g.out.h) break;
      if (params.vectors) {
        *reinterpret_cast<float4*>(y) = {sums[i][0], sums[i][1], sums[i][2], sums[i][3]};
      } else {
#pragma unroll
        for (int j = 0; j < kForwardColumns; ++j)
          if (first_column + column + j < g.out.w) y[j * p.y_stride.w] = sums[i][j];
      }
    }
  }
}

struct GradWindowParams {
  WeightGradParams p;
  RegisterWindowPlan plan;
  FastDiv rows, column_groups;
  bool grad_vectors, x_vectors;  // may be loaded by vectors
};

template <int kTaps>
__global__ void __launch_bounds__(256, 2) depthwise_window_weight_grad(const __grid_constant__ GradWindowParams params) {
  const WeightGradParams& p = params.p;
  const Geometry& g = p.g;
  const RegisterWindowPlan& plan = params.plan;
  extern __shared__ __align__(16) float tile[];
  float* const grads = tile + plan.images * plan.x_rows * plan.x_pitch;
  const int taps_h = int(g.taps.h), channel = int(blockIdx.x % g.channels), split = int(blockIdx.x / g.channels);
  const int64_t all = plan.tiles(), first = all * split / plan.splits, last = all * (split + 1) / plan.splits;
  constexpr int kWindow = grad_window(kTaps);
  float sums[kMaxWindowTaps < kTaps ? kMaxWindowTaps : kTaps][kTaps] = {}, bias_sum = 0;

  for (int64_t t = first; t < last; ++t) {
    const int64_t t1 = t / plan.column_tiles, t2 = t1 / plan.row_tiles, first_image = t2 * plan.images;
    const int first_column = int(t - t1 * plan.column_tiles) * plan.columns, first_row = int(t1 - t2 * plan.row_tiles) * plan.rows;
    fill_plane(static_cast<const float*>(p.grad) + channel * p.grad_stride.c, p.grad_stride, first_image, int(g.batch), int(g.out.h), int(g.out.w), first_row,
               first_column, plan.images, plan.rows, plan.columns, plan.grad_pitch, params.grad_vectors, grads);
    fill_plane(static_cast<const float*>(p.x) + channel * p.x_stride.c, p.x_stride, first_image, int(g.batch), int(g.in.h), int(g.in.w), first_row - int(g.pad.h),
               first_column - int(g.pad.w), plan.images, plan.x_rows, plan.columns - kGradColumns + kWindow, plan.x_pitch, params.x_vectors, tile);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    for (int task = threadIdx.x; task < plan.tasks; task += blockDim.x) {
      // Neighbouring lanes have neighbouring rows, which are in different banks.
      uint32_t rest, row, image, column_group;
      params.rows.divmod(uint32_t(task), rest, row);
      params.column_groups.divmod(rest, image, column_group);
      const int column = int(column_group) * kGradColumns;
      float grad[kGradColumns];
      load_window(grad, grads + (int(image) * plan.rows + int(row)) * plan.grad_pitch + column);
#pragma unroll
      for (int i = 0; i < kGradColumns; ++i) bias_sum += grad[i];
      const float* x = tile + (int(image) * plan.x_rows + int(row)) * plan.x_pitch + column;
#pragma unroll
      for (int a = 0; a < kTaps; ++a, x += plan.x_pitch) {
        if (a >= taps_h) break;
        float window[kWindow];
        load_window(window, x);
#pragma unroll
        for (int b = 0; b < kTaps; ++b)
#pragma unroll
          for (int i = 0; i < kGradColumns; ++i) sums[a][b] = fmaf(grad[i], window[i + b], sums[a][b]);
      }
    }
    __syncthreads();
  }

  // Over the lanes, and then over the warps.
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32, warps = int(blockDim.x) / 32;
  constexpr int kAll = kMaxWindowTaps * kMaxWindowTaps + 1;
  const auto reduce = [&](float sum, int at) {
    for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane == 0) tile[warp * kAll + at] = sum;
  };
  const int count = taps_h * kTaps;
#pragma unroll
  for (int a = 0; a < kTaps; ++a) {
    if (a >= taps_h) break;
#pragma unroll
    for (int b = 0; b < kTaps; ++b) reduce(sums[a][b], a * kTaps + b);
  }
  reduce(bias_sum, count);
  __syncthreads();
  for (int i = threadIdx.x; i <= count; i += blockDim.x) {
    float sum = 0;
    for (int k = 0; k < warps; ++k) sum += tile[k * kAll + i];
    p.partial[(int64_t{split} * g.channels + channel) * (count + 1) + i] = sum;
  }
}

template <typename Kernel, typename Params>
cudaError_t launch(Kernel kernel, SharedMemoryOptIn& opt_in, int64_t blocks, const RegisterWindowPlan& plan, const Params& params, cudaStream_t stream) {
  const cudaError_t error = opt_in.ensure(kernel, max_shared_bytes());
  if (error != cudaSuccess) return error;
  kernel<<<unsigned(blocks), plan.threads, plan.shared_bytes, stream>>>(params);
  return cudaGetLastError();
}

template <int kTaps>
cudaError_t launch_forward(const ForwardWindowParams& params, cudaStream_t stream) {
  static SharedMemoryOptIn opt_in;
  return launch(depthwise_window_forward<kTaps>, opt_in, params.plan.tiles() * params.p.g.channels, params.plan, params, stream);
}
template <int kTaps>
cudaError_t launch_weight_grad(const GradWindowParams& params, cudaStream_t stream) {
  static SharedMemoryOptIn opt_in;
  return launch(depthwise_window_weight_grad<kTaps>, opt_in, params.plan.splits * params.p.g.channels, params.plan, params, stream);
}

bool has_vectors(const void* data, const Strides& s, int64_t width) {
  return s.w == 1 && width % 4 == 0 && s.n % 4 == 0 && s.c % 4 == 0 && s.h % 4 == 0 && reinterpret_cast<uint64_t>(data) % 16 == 0;
}

}  // namespace

bool can_run_register_window(const ForwardParams& p) {
  if (p.dtype != DType::kFloat32 || !has_register_window(p.g)) return false;
  const RegisterWindowPlan plan = register_window_forward_plan(p.g, sm_count());
  return plan.fits && plan.shared_bytes <= max_shared_bytes();
}

cudaError_t launch_register_window(const ForwardParams& p, cudaStream_t stream) {
  ForwardWindowParams params = {p, register_window_forward_plan(p.g, sm_count())};
  params.column_groups = FastDiv(uint32_t(params.plan.columns / kForwardColumns));
  params.row_groups = FastDiv(uint32_t(params.plan.rows / kForwardRows));
  const Strides& s = p.y_stride;
  params.vectors = has_vectors(p.y, s, p.g.out.w);
  params.source_vectors = has_vectors(p.x, p.x_stride, p.g.in.w) && p.g.pad.w % 4 == 0;
  if (params.plan.tiles() == 0) return cudaSuccess;
  return p.g.taps.w == 3 ? launch_forward<3>(params, stream) : p.g.taps.w == 5 ? launch_forward<5>(params, stream) : launch_forward<7>(params, stream);
}

bool can_run_register_window(const WeightGradParams& p) {
  if (p.dtype != DType::kFloat32 || !has_register_window(p.g) || p.g.taps.h > p.g.taps.w) return false;
  const RegisterWindowPlan plan = register_window_weight_grad_plan(p.g, sm_count());
  return plan.fits && plan.shared_bytes <= max_shared_bytes();
}

int register_window_splits(const WeightGradParams& p) { return register_window_weight_grad_plan(p.g, sm_count()).splits; }

cudaError_t launch_register_window(const WeightGradParams& p, cudaStream_t stream) {
  GradWindowParams params = {p, register_window_weight_grad_plan(p.g, sm_count())};
  params.rows = FastDiv(uint32_t(params.plan.rows));
  params.column_groups = FastDiv(uint32_t(params.plan.columns / kGradColumns));
  params.grad_vectors = has_vectors(p.grad, p.grad_stride, p.g.out.w);
  params.x_vectors = has_vectors(p.x, p.x_stride, p.g.in.w) && p.g.pad.w % 4 == 0;
  return p.g.taps.w == 3 ? launch_weight_grad<3>(params, stream) : p.g.taps.w == 5 ? launch_weight_grad<5>(params, stream) : launch_weight_grad<7>(params, stream);
}

}  // namespace fusebackend::depthwise_conv
