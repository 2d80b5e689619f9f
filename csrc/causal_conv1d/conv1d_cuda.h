// Launchers of the CUDA kernels. Each checks nothing but what selects a kernel; the binding checks shapes.
#pragma once
#include <cuda_runtime_api.h>

#include "conv1d.h"

namespace fusebackend::conv1d {

constexpr int kMinShortTaps = 2, kMaxShortTaps = 4;

// One pass in registers, taps 2..4. Time-contiguous or channel-contiguous tensors (all of one kind; forwards, where short_turns says
// so, from the latter to the former; backwards, where short_backward_turns says so, x of the latter and gradients of the former).
bool short_turns(const ConvParams&);
cudaError_t launch_short_forward(const ConvParams&, cudaStream_t);
bool short_backward_turns(const BackwardParams&);
int short_backward_splits(const BackwardParams&);
cudaError_t launch_short_backward(const BackwardParams&, cudaStream_t);

// Up to some tens of taps (weight gradients: 150) in registers. All tensors channel-contiguous, or all time-contiguous. Weight
// gradients of fp32 are sums of sums, not correctly rounded as those of the other kernels.
bool taps_supported(const ConvParams&);
int64_t taps_with_lead(const ConvParams&);  // those that time-contiguous windows cost, zeros in front included
cudaError_t launch_taps_forward(const ConvParams&, cudaStream_t);
bool taps_weight_grad_supported(const WeightGradParams&);
int taps_weight_grad_splits(const WeightGradParams&);
cudaError_t launch_taps_weight_grad(const WeightGradParams&, cudaStream_t);

// Any taps, any strides: shared memory and FFMA.
cudaError_t launch_window_forward(const ConvParams&, cudaStream_t);
int window_weight_grad_splits(const WeightGradParams&);
cudaError_t launch_window_weight_grad(const WeightGradParams&, cudaStream_t);

// Long kernels on tensor cores (sm_80 and later).
bool toeplitz_supported(const ConvParams&);
cudaError_t launch_toeplitz_forward(const ConvParams&, cudaStream_t);
bool toeplitz_weight_grad_supported(const WeightGradParams&);
int toeplitz_weight_grad_splits(const WeightGradParams&);
// Samples whose products a warp of ATen's kernel adds up for a weight gradient: the longer, the larger its rounding errors.
inline int64_t eager_chain(const WeightGradParams& p) { return (p.in_len < p.out_len ? p.in_len : p.out_len) * ((p.batch + 7) / 8); }
cudaError_t launch_toeplitz_weight_grad(const WeightGradParams&, cudaStream_t);

// Rows of thousands of samples with as many taps, by FFT. Scratch is in fp32 numbers; 0 if the case is not supported.
int64_t fft_forward_scratch(const ConvParams&);
cudaError_t launch_fft_forward(const ConvParams&, float* scratch, cudaStream_t);

// The same for weight gradients, in double: in fp32 they would err 2.5 times as much as a sum of products does.
bool fft_weight_grad_supported(const WeightGradParams&);
int64_t fft_weight_grad_points(const WeightGradParams&);  // of a channel's transforms
int fft_weight_grad_splits(const WeightGradParams&);
int64_t fft_weight_grad_scratch(const WeightGradParams&);  // numbers of 8 bytes
cudaError_t launch_fft_weight_grad(const WeightGradParams&, double* scratch, cudaStream_t);

// dw, db <- the sum over splits of partial[split][channel][taps+1] (the last is db).
cudaError_t launch_reduce_partials(const double* partial, int splits, int64_t channels, int64_t taps, void* dw, void* db,
                                   Dtype, cudaStream_t);

}  // namespace fusebackend::conv1d
