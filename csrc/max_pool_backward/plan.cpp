#include <algorithm>
#include <numeric>

#include "max_pool_backward/max_pool_backward.h"

namespace fusebackend::max_pool_backward {
namespace {

constexpr int kVectorBytes = 16;
constexpr int kMostKept = 16;
constexpr int64_t kMostSharedBytes = 24 << 10;  // so that eight blocks have room in a multiprocessor
constexpr int64_t kRowsOfThread = 4;            // that share what a thread finds out about a row
constexpr int64_t kBlocksOfMultiprocessor = 8;  // at least, before a thread has several rows

bool is_aligned(const void* memory, int64_t bytes) { return reinterpret_cast<uintptr_t>(memory) % bytes == 0; }

// Whether vectors of n along a dim are aligned in all tensors.
bool has_vectors(const Problem& p, int lane, int n) {
  bool fits = p.dims[lane].size % n == 0 && is_aligned(p.grad, kVectorBytes) && is_aligned(p.out, kVectorBytes) && is_aligned(p.offsets, n);
  const auto check = [&](int64_t out, int64_t grad, int64_t offset) { fits = fits && out % n == 0 && grad % n == 0 && offset % n == 0; };
  for (const Axis& a : p.axis) check(a.size == 1 ? 0 : a.out_stride, a.windows == 1 ? 0 : a.grad_stride, a.windows == 1 ? 0 : a.offset_stride);
  for (int d = 0; d < p.count; ++d)
    if (d != lane) check(p.dims[d].out_stride, p.dims[d].grad_stride, p.dims[d].offset_stride);
  return fits;
}

}  // namespace

Plan make_plan(const Problem& p, int multiprocessors) {
  const int n = kVectorBytes / element_size(p.dtype);
  const Axis& last = p.axis[kMostAxes - 1];
  Plan plan{Form::kRows, -1, 1, 1, 1, 1, 1, 1, 1, 0};
  if (last.out_stride == 1) {
    plan.vector = n;
    while (plan.vector > 2 && last.size % plan.vector != 0) plan.vector /= 2;
    if (last.size % plan.vector != 0) plan.vector = n;  // stored element by element
  }
  for (int d = 0; d < p.count; ++d)
    if (p.dims[d].out_stride == 1 && p.dims[d].grad_stride == 1 && p.dims[d].offset_stride == 1) plan.lane = d;
  plan.vectors = ceil_div(last.size, plan.vector);
  if (plan.lane >= 0) {
    plan.form = Form::kLanes, plan.vector = has_vectors(p, plan.lane, n) ? n : 1;
    plan.vectors = ceil_div(last.size, int64_t(kPixels)) * (p.dims[plan.lane].size / plan.vector);
  }
  for (int k = 0; k < kMostAxes - 1; ++k) {
    plan.rows *= p.axis[k].size;
    // Every so manieth of a window's elements may be the same element of the tensor in another window.
    const int64_t step = p.axis[k].stride / std::gcd(p.axis[k].stride, p.axis[k].dilation);
    plan.kept = int(std::min<int64_t>(plan.kept * ceil_div(p.axis[k].kernel, step), kMostKept + 1));
  }
  if (plan.kept > kMostKept) plan.kept = 0;
  for (int d = 0; d < p.count; ++d)
    if (d != plan.lane) plan.rows *= p.dims[d].size;
  plan.row_blocks = int(std::min<int64_t>(ceil_div(plan.vectors, kThreads), 65535));
  plan.row_threads = int(std::min<int64_t>(ceil_div(plan.vectors, plan.row_blocks), kThreads));
  const int64_t row_bytes = sizeof(Row) + plan.kept * sizeof(WindowRow), at_once = kThreads / plan.row_threads;
  const int64_t enough = plan.rows * plan.row_blocks / (kBlocksOfMultiprocessor * multiprocessors);
  const int64_t rows = at_once * std::clamp<int64_t>(enough / at_once, 1, kRowsOfThread);
  plan.block_rows = int(std::clamp<int64_t>(rows, 1, kMostSharedBytes / row_bytes));
  plan.shared_bytes = int(plan.block_rows * row_bytes);
  return plan;
}

}  // namespace fusebackend::max_pool_backward
