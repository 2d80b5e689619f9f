// What the CUDA kernels are launched by. Each launcher takes what its `can_` (or plan) accepted.
#pragma once
#include <cstdint>

#include "depthwise_conv/params.h"

#if __has_include(<cuda_runtime_api.h>)
#include <cuda_runtime_api.h>

namespace fusebackend::depthwise_conv {

// Any convolution, any strides.
cudaError_t launch_direct_forward(const ForwardParams& p, cudaStream_t stream);
cudaError_t launch_direct_input_grad(const InputGradParams& p, cudaStream_t stream);
int direct_weight_grad_splits(const WeightGradParams& p);
cudaError_t launch_direct_weight_grad(const WeightGradParams& p, cudaStream_t stream);

// 16-bit floats on tensor cores, forward and x's gradient (toeplitz.cuh). False if the convolution does not fit.
bool can_run_toeplitz(const ForwardParams& p);
bool can_run_toeplitz(const InputGradParams& p);
cudaError_t launch_toeplitz(const ForwardParams& p, cudaStream_t stream);
cudaError_t launch_toeplitz(const InputGradParams& p, cudaStream_t stream);

// 16-bit planes on tensor cores, from registers (rolling_band.cuh). For x's gradient, of the incoming gradient with reversed taps.
bool can_run_rolling_band(const ForwardParams& p);
cudaError_t launch_rolling_band(const ForwardParams& p, cudaStream_t stream);

// Such planes, from a ring in shared memory that bulk copies fill (plane_ring_sm90.cuh). For x's gradient alone, of the incoming gradient with reversed taps;
// both gradients are one kernel.
bool can_run_plane_ring(const ForwardParams& p);
cudaError_t launch_plane_ring(const ForwardParams& p, cudaStream_t stream);
bool can_run_plane_ring(const InputGradParams& input, const WeightGradParams& p);
int plane_ring_splits(const InputGradParams& input, const WeightGradParams& p);
cudaError_t launch_plane_ring(const InputGradParams& input, const WeightGradParams& p, cudaStream_t stream);

// Such planes with strides of 2, 3x3 and 5x5 (strided_ring_sm90.cuh): the forward, or both gradients in one kernel. False in libraries without code for
// sm_90a.
bool can_run_strided_ring(const ForwardParams& p);
cudaError_t launch_strided_ring(const ForwardParams& p, cudaStream_t stream);
bool can_run_strided_ring(const InputGradParams& input, const WeightGradParams& p);
int strided_ring_splits(const InputGradParams& input, const WeightGradParams& p);
cudaError_t launch_strided_ring(const InputGradParams& input, const WeightGradParams& p, cudaStream_t stream);

// The weight's gradient of 16-bit floats on tensor cores (outer_products.cuh).
bool can_run_outer_products(const WeightGradParams& p);
int outer_products_splits(const WeightGradParams& p);
cudaError_t launch_outer_products(const WeightGradParams& p, cudaStream_t stream);

// The weight's gradient of 16-bit planes on tensor cores, from registers (row_products.cuh).
bool can_run_row_products(const WeightGradParams& p);
int row_products_splits(const WeightGradParams& p);
cudaError_t launch_row_products(const WeightGradParams& p, cudaStream_t stream);

// 16-bit channels-last tensors on tensor cores, from planes in shared memory (channel_band.cuh, channel_products.cuh). For x's gradient, of the incoming
// gradient with reversed taps.
bool can_run_channel_band(const ForwardParams& p);
cudaError_t launch_channel_band(const ForwardParams& p, cudaStream_t stream);
bool can_run_channel_products(const WeightGradParams& p);
int channel_products_splits(const WeightGradParams& p);
cudaError_t launch_channel_products(const WeightGradParams& p, cudaStream_t stream);

// The same, of pixels that tensor copies bring and take (channel_ring_sm90.cuh). False in libraries without code for sm_90a.
bool can_run_channel_ring(const ForwardParams& p);
cudaError_t launch_channel_ring(const ForwardParams& p, cudaStream_t stream);

// Windows that roll down columns (rolling_window.cuh): channels-last tensors, and fp32 planes. For x's gradient with a stride of two; with one, of the
// incoming gradient with reversed taps.
bool can_run_rolling_window(const ForwardParams& p);
cudaError_t launch_rolling_window(const ForwardParams& p, cudaStream_t stream);
bool can_run_rolling_window(const InputGradParams& p);
cudaError_t launch_rolling_window(const InputGradParams& p, cudaStream_t stream);
bool can_run_rolling_window(const WeightGradParams& p);
int rolling_window_splits(const WeightGradParams& p);
cudaError_t launch_rolling_window(const WeightGradParams& p, cudaStream_t stream);

// Dense channels-last images, 3x3, stride 1, padded to the same size: rows wait in shared memory (row_ring_sm90.cuh). The gradients of x and the weight
// together, or the forward; for x's gradient alone that of the incoming gradient with reversed taps. False in libraries without code for sm_90a.
bool can_run_row_ring(const ForwardParams& p);
cudaError_t launch_row_ring(const ForwardParams& p, cudaStream_t stream);
bool can_run_row_ring(const InputGradParams& input, const WeightGradParams& weight);
int row_ring_splits(const InputGradParams& input, const WeightGradParams& weight);
cudaError_t launch_row_ring(const InputGradParams& input, const WeightGradParams& weight, cudaStream_t stream);

// fp32 in (batch, channels, height, width) order: windows of a tile in registers (register_window.cuh).
bool can_run_register_window(const ForwardParams& p);
cudaError_t launch_register_window(const ForwardParams& p, cudaStream_t stream);
bool can_run_register_window(const WeightGradParams& p);
int register_window_splits(const WeightGradParams& p);
cudaError_t launch_register_window(const WeightGradParams& p, cudaStream_t stream);

// One row of a few dilated taps, of contiguous rows (dilated_rows.cuh). For x's gradient alone, of the incoming gradient with reversed taps; both gradients
// are one kernel.
bool can_run_dilated_rows(const ForwardParams& p);
cudaError_t launch_dilated_rows(const ForwardParams& p, cudaStream_t stream);
bool can_run_dilated_rows(const WeightGradParams& p);
int dilated_rows_splits(const WeightGradParams& p);
cudaError_t launch_dilated_rows(const WeightGradParams& p, cudaStream_t stream);
bool can_run_dilated_rows(const InputGradParams& input, const WeightGradParams& p);
int dilated_rows_splits(const InputGradParams& input, const WeightGradParams& p);
cudaError_t launch_dilated_rows(const InputGradParams& input, const WeightGradParams& p, cudaStream_t stream);

// Adds up the partial sums, in a fixed order.
cudaError_t launch_reduce(const WeightGradParams& p, cudaStream_t stream);

}  // namespace fusebackend::depthwise_conv
#endif
