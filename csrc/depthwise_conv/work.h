// What a convolution makes a GPU do, for estimates of its time.
#pragma once
#include <string>

#include "depthwise_conv/params.h"

namespace fusebackend::depthwise_conv {

// A convolution of tensors that need not exist: strides tell memory orders, and all are taken for aligned.
struct WorkParams {
  Geometry g;
  Strides x_stride, y_stride, dx_stride;  // y's are the incoming gradient's too
  DType dtype;
};

// "name=value" pairs, separated by spaces.
//   band, channel, dilated,     1 for the kind of kernel (rolling_band.cuh, channel_band.cuh, dilated_rows.cuh, rolling_window.cuh, toeplitz.cuh,
//   rolling, toeplitz, window   register_window.cu); none for direct.cu
//   blocks                      thread blocks
//   shared_bytes                that a block has in shared memory
//   loaded                      elements that all blocks load, with their halos
//   products                    multiplications in all: on tensor cores with those by the zeros of the band
//   rows_of_taps                whatever is looked up for each row of taps and strip of results: on tensor cores only
//   ring_rows                   of results, that a block of channel_ring_sm90.cuh has, which compute capability 9.0 has instead of channel_band.cuh; else 0
//   transposes                  1 if tiles are transposed between memory orders, by vectors; elements: 1 if element by element
std::string forward_work(const WorkParams& p, int sm_count);
std::string input_grad_work(const WorkParams& p, int sm_count);

// The same, where `channel` stands for channel_products.cuh, `rows` for row_products.cuh and `outer` for outer_products.cuh, with `partial_bytes` of sums between the kernels.
std::string weight_grad_work(const WorkParams& p, int sm_count);

// Of the kernel that computes both gradients: nothing but zeros where that of x and that of the weight are described by themselves. So are kernels that are
// described as others.
std::string gradients_work(const WorkParams& p, int sm_count);

}  // namespace fusebackend::depthwise_conv
