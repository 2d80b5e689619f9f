// The launch configuration of convolutions by one dilated row of taps (dilated_rows.cuh), apart from the kernels.
#pragma once
#include "depthwise_conv/tile_shape.h"

namespace fusebackend::depthwise_conv {

constexpr int kDilatedRowsThreads = 128, kDilatedRowsSumThreads = 256;  // of a block; where it sums up the weight's gradient
constexpr int kDilatedRowsTaps = 8;                                     // at most
constexpr int kDilatedRowsBytes = 16;                                   // of a vector of results

// Vectors of one row that a thread has loads on their way for, and thread blocks that a multiprocessor is to have registers for.
FUSE_HOST_DEVICE constexpr int dilated_rows_vectors(int taps, bool aligned) { return taps > 4 || (taps == 4 && !aligned) ? 1 : 2; }
FUSE_HOST_DEVICE constexpr int dilated_rows_weight_grad_vectors(int taps, bool aligned) { return taps <= 4 && aligned ? 2 : 1; }
FUSE_HOST_DEVICE constexpr int dilated_rows_blocks(int taps, bool aligned) { return taps > 4 ? 4 : aligned ? 8 : 6; }
FUSE_HOST_DEVICE constexpr int dilated_rows_weight_grad_blocks(int taps, bool aligned) { return aligned ? 4 : taps <= 4 ? 3 : 2; }
// Of both gradients at once a thread has one vector at a time.
FUSE_HOST_DEVICE constexpr int dilated_rows_gradients_blocks(int taps, bool aligned, bool half) {
  return taps > 4 ? 2 : aligned ? (taps <= 3 && half ? 5 : 4) : taps <= 3 || half ? 3 : 2;
}

// What a plan is of: forward, and x's gradient as the forward of the incoming gradient, have results in `target`; the weight's gradient reads it.
struct DilatedRowsPlan {
  bool fits;
  bool aligned;   // rows are whole vectors, and these begin at multiples of 16 bytes in the target (and x) and, shifted by any tap, in the source
  int part;       // vectors from one of a thread's to the next; of both gradients, vectors of a row
  int64_t items;  // threads' shares, in all or of a channel
  int splits;     // of a channel's, among blocks (gradients with the weight's)
  // Both gradients: the reversed tap by whose windows the incoming gradient is summed, and the columns of x, and behind it, whose windows have all of it.
  int bias_tap, columns;

  // Of a forward.
  constexpr int64_t grid() const { return ceil_div(items, kDilatedRowsThreads); }
};

DilatedRowsPlan dilated_rows_plan(const Geometry& g, DType dtype, const Placement& source, const Placement& target);
DilatedRowsPlan dilated_rows_weight_grad_plan(const Geometry& g, DType dtype, const Placement& grad, const Placement& x, int sm_count);

// Of both gradients at once, and the bias's if that is needed; `g` is the convolution's.
DilatedRowsPlan dilated_rows_gradients_plan(const Geometry& g, DType dtype, const Placement& grad, const Placement& x, const Placement& dx, bool need_bias, int sm_count);

}  // namespace fusebackend::depthwise_conv
