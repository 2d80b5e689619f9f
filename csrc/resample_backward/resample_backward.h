// resample_backward: sums along up to three axes by an index of each, as the gradients of interpolations are. Knows nothing of torch.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/integer_math.h"

#if __has_include(<cuda_runtime_api.h>)
#include <cuda_runtime_api.h>
#endif

namespace fusebackend::resample_backward {

constexpr int kMostAxes = 3;
constexpr int kMostTerms = 4;  // of an axis: bicubic interpolation has four
constexpr int kMostDims = 8;   // of a tensor

// One term of an axis: element i of the gradient is added to element index[i] of the result, `weight[i]` times.
struct Term {
  const void* index;
  const void* weight;  // in the accumulator's type; null: 1
};

struct Axis {
  int64_t size, length;  // elements of the result, and of the gradient
  int64_t out_stride, grad_stride;
  int terms;  // 0: element i of the one is element i of the other
  Term term[kMostTerms];
};

struct Dim {
  int64_t size, out_stride, grad_stride;
};

struct Problem {
  const void* grad;
  void* out;
  DType dtype, out_dtype;
  bool index_is_64;
  Axis axis[kMostAxes];  // those that are not there come first, of one element and no terms
  Dim dims[kMostDims];   // the others, from the outermost to the innermost in the result's memory; never of one element
  int count;
};

// How the result is computed:
// kLanes: a thread computes some neighbours along a dim that is no axis and has stride 1 in both tensors (channels last).
// kPlanes: a block sums rows of the gradient to rows of shared memory, along all axes but the last, and then along these.
// kColumns: a thread computes an element of each of some rows, which are too long for that.
// kElements: a thread computes an element, where rows are short.
enum class Form { kLanes, kPlanes, kColumns, kElements };

struct Plan {
  Form form;
  int lane;          // which of Problem::dims the lanes are; -1 if there are none
  int vector_bytes;  // of the gradient that a thread loads at once
  int block_rows;     // rows of the result's last axis in a block; with lanes, each has as many threads
  int block_columns;  // neighbouring threads along a row, without lanes
  int64_t shared_bytes;
  int64_t table_bytes;  // of memory for the lists of all axes
};

constexpr int kThreads = 256;

// Elements from a row in shared memory, of so many, to the next: there is at least one behind the row, which is zero.
FUSE_HOST_DEVICE constexpr int64_t row_pitch(int64_t length) { return round_up(length + 1, 4); }

Plan make_plan(const Problem& p, int multiprocessors);

#if __has_include(<cuda_runtime_api.h>)
// On `stream` of the current device; captured into a CUDA graph if the stream is. `tables` has Plan::table_bytes.
cudaError_t launch(const Problem& p, const Plan& plan, void* tables, cudaStream_t stream);
#endif

}  // namespace fusebackend::resample_backward
