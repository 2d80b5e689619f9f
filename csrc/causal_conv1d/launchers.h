// Launchers of the CUDA kernels, a group for each kind of kernel. Those named `*_supported` say what a kernel can do; what is fastest of
// that is decided in routes_cuda.cpp.
//
// `*_splits` is how many partial sums of the weight gradient a launch leaves in p.partial, for launch_reduce_partials.
#pragma once
#include <cuda_runtime_api.h>

#include <algorithm>

#include "causal_conv1d/params.h"

namespace fusebackend::causal_conv1d {

// Short causal convolutions, taps kept in registers, forward or backward in one pass over the tensors. All tensors are in one memory order,
// or x is (batch, time, channel) and the others (batch, channel, time). The backward launcher also adds up its partial sums.
bool short_forward_supported(const ConvParams&);
cudaError_t launch_short_forward(const ConvParams&, cudaStream_t);
bool short_backward_supported(const BackwardParams&);
int short_backward_splits(const BackwardParams&);
cudaError_t launch_short_backward(const BackwardParams&, cudaStream_t);

// Some tens of taps (weight gradients: up to 160) with windows of samples in registers; all tensors in one memory order. Weight gradients
// of fp32 are sums of sums in fp32, not correctly rounded as those of the other kernels.
bool register_window_supported(const ConvParams&);
int64_t register_window_taps(const ConvParams&);  // what (batch, channel, time) costs: zero taps in front included
cudaError_t launch_register_window_forward(const ConvParams&, cudaStream_t);
bool register_window_weight_grad_supported(const WeightGradParams&);
int register_window_weight_grad_splits(const WeightGradParams&);
cudaError_t launch_register_window_weight_grad(const WeightGradParams&, cudaStream_t);

// Any taps, any strides, any GPU: tiles in shared memory, fused multiply-adds.
cudaError_t launch_shared_tile_forward(const ConvParams&, cudaStream_t);
int shared_tile_weight_grad_splits(const WeightGradParams&);
bool shared_tile_weight_grad_skips_padding(const WeightGradParams&);
cudaError_t launch_shared_tile_weight_grad(const WeightGradParams&, cudaStream_t);

// Many taps: products with Toeplitz matrices on tensor cores (sm_80 and later).
bool toeplitz_supported(const ConvParams&);
cudaError_t launch_toeplitz_forward(const ConvParams&, cudaStream_t);
bool toeplitz_weight_grad_supported(const WeightGradParams&);
int toeplitz_weight_grad_splits(const WeightGradParams&);
// Samples whose products a warp of ATen's kernel adds up for a weight gradient: the more, the larger eager mode's rounding errors.
inline int64_t eager_chain(const WeightGradParams& p) { return std::min(p.in_len, p.out_len) * ((p.batch + 7) / 8); }
cudaError_t launch_toeplitz_weight_grad(const WeightGradParams&, cudaStream_t);

// Taps at most 32 samples from their output, of 16-bit types: the same in registers. Rows may begin anywhere, x's and the result's equally far from
// 16-byte boundaries.
bool register_toeplitz_supported(const ConvParams&);
cudaError_t launch_register_toeplitz_forward(const ConvParams&, cudaStream_t);

// Rows of thousands of samples with about as many taps, by FFT in fp32. Scratch is in floats; 0 if the case is not supported.
int64_t fft_forward_scratch(const ConvParams&);
cudaError_t launch_fft_forward(const ConvParams&, float* scratch, cudaStream_t);
// Weight gradients by FFT, in double: in fp32 they would err 2.5 times as much as a sum of products does. Scratch is in doubles.
bool fft_weight_grad_supported(const WeightGradParams&);
int64_t fft_weight_grad_points(const WeightGradParams&);  // of all transforms of a channel
int fft_weight_grad_splits(const WeightGradParams&);
int64_t fft_weight_grad_scratch(const WeightGradParams&);
cudaError_t launch_fft_weight_grad(const WeightGradParams&, double* scratch, cudaStream_t);

// dw, db <- the sum over p.splits of p.partial[split][channel][taps+1] (the last is db), and of the products that they lack if p.skips_padding.
cudaError_t launch_reduce_partials(const WeightGradParams&, cudaStream_t);
cudaError_t launch_reduce_partials(const BackwardParams&, cudaStream_t);

}  // namespace fusebackend::causal_conv1d
