// max_pool_backward: the gradient of the largest element of each window, along up to three axes, where the forward kept each one's place in its window.
// Knows nothing of torch.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/integer_math.h"

#if __has_include(<cuda_runtime_api.h>)
#include <cuda_runtime_api.h>
#endif

namespace fusebackend::max_pool_backward {

constexpr int kMostAxes = 3;
constexpr int kMostDims = 8;         // of a tensor
constexpr int kMostElements = 128;  // of a window: places are numbers of 8 bits
constexpr int64_t kMostPlaces = int64_t(1) << 29, kMostSteps = int64_t(1) << 22;  // of sizes, and of strides and dilations: kernels count in 32 bits

struct Axis {
  int64_t size, windows;  // elements of the result, and of the gradient
  int64_t out_stride, grad_stride, offset_stride;
  int kernel, stride, padding, dilation;
};

struct Dim {
  int64_t size, out_stride, grad_stride, offset_stride;
};

struct Problem {
  const void* grad;
  const int8_t* offsets;  // of the gradient's sizes: of each window, row by row
  void* out;
  DType dtype;
  Axis axis[kMostAxes];  // those that are not there come first, of one element and one window
  Dim dims[kMostDims];   // the others, from the outermost to the innermost in the result's memory; never of one element
  int count;
};

// What a thread computes of each of its rows, which lie along the last axis:
// kLanes: neighbours along a dim that is no axis and has stride 1 in all tensors (channels last).
// kRows: neighbours along the row.
enum class Form { kLanes, kRows };

struct Plan {
  Form form;
  int lane;        // which of Problem::dims the lanes are; -1 if there are none
  int vector;      // results of a thread side by side
  int64_t rows;    // of all lanes
  int64_t vectors; // of a row; with lanes, of pairs of pixels
  int row_threads, block_rows;  // of a block: threads of a row, and rows, which the threads take in turns
  int row_blocks;  // blocks of a row
  int kept;        // rows of windows that hold a row's elements, at the most, if a block notes them; 0 if they are too many
  int shared_bytes;
};

constexpr int kThreads = 256;
constexpr int kPixels = 2;  // neighbours along a row, of each of which a thread computes a vector of lanes

// A row of windows that hold a row's elements: where it lies, and the offset in a window of its own row's first element.
struct WindowRow {
  int64_t grad, offset;
  int64_t first;
};
struct Row {
  int64_t out, grad, offset;  // the last two without the axes
  int32_t i, j, count, unused;  // along the axes, and how many rows of windows are noted
};

Plan make_plan(const Problem& p, int multiprocessors);

#if __has_include(<cuda_runtime_api.h>)
// On `stream` of the current device; captured into a CUDA graph if the stream is.
cudaError_t launch(const Problem& p, const Plan& plan, cudaStream_t stream);
#endif

}  // namespace fusebackend::max_pool_backward
