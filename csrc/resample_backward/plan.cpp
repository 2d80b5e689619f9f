#include <algorithm>

#include "resample_backward/resample_backward.h"
#include "resample_backward/tables.h"

namespace fusebackend::resample_backward {
namespace {

constexpr int64_t kMostSharedBytes = 32 << 10;  // seven blocks of so much fit into a multiprocessor, and as many of their threads
constexpr int kMostRows = 32;
constexpr int64_t kShortRow = 24;           // elements, of which the threads of a block would share too few
constexpr int kBlocksOfMultiprocessor = 4;  // at least, before a block has several rows

int64_t power_of_two_from(int64_t n, int64_t most) {
  int64_t found = 1;
  while (found < n && found < most) found *= 2;
  return found;
}

// The longest of 16 and 4 bytes, or an element, at whose multiples the gradient's memory is read if vectors lie along a dim of `elements`.
int vector_of(const Problem& p, int64_t elements, const Dim* along_dim, const Axis* along_axis) {
  const int size = element_size(p.dtype);
  for (const int bytes : {16, 4}) {
    const int64_t n = bytes / size;
    bool aligned = n > 1 && elements % n == 0 && reinterpret_cast<uintptr_t>(p.grad) % bytes == 0;
    for (const Axis& a : p.axis) aligned = aligned && (&a == along_axis || a.length == 1 || a.grad_stride % n == 0);
    for (int d = 0; d < p.count; ++d) aligned = aligned && (&p.dims[d] == along_dim || p.dims[d].grad_stride % n == 0);
    if (!aligned) continue;
    if (along_axis != nullptr) return bytes;
    // The results of a vector are one as well.
    const int64_t out_bytes = n * element_size(p.out_dtype);
    bool out_aligned = reinterpret_cast<uintptr_t>(p.out) % std::min<int64_t>(out_bytes, 16) == 0;
    for (const Axis& a : p.axis) out_aligned = out_aligned && (a.size == 1 || a.out_stride % n == 0);
    for (int d = 0; d < p.count; ++d) out_aligned = out_aligned && (&p.dims[d] == along_dim || p.dims[d].out_stride % n == 0);
    if (out_aligned) return bytes;
  }
  return size;
}

}  // namespace

Plan make_plan(const Problem& p, int multiprocessors) {
  Plan plan{Form::kElements, -1, element_size(p.dtype), 1, 1, 0, 0};
  plan.table_bytes = kFlagBytes;
  for (const Axis& a : p.axis) plan.table_bytes += table_bytes(a, p.dtype);
  const Axis& last = p.axis[kMostAxes - 1];
  for (int d = 0; d < p.count; ++d)
    if (p.dims[d].out_stride == 1 && p.dims[d].grad_stride == 1) plan.lane = d;
  const int64_t accumulator = p.dtype == DType::kFloat64 ? 8 : 4, row_bytes = row_pitch(last.length) * accumulator;
  int64_t columns = last.size, rows = p.axis[0].size * p.axis[1].size;
  for (int d = 0; d < p.count; ++d) rows *= p.dims[d].size;
  // So many that there are enough blocks, where a row takes `parts` of them.
  const auto rows_of_a_block = [&](int64_t parts) { return std::clamp<int64_t>(rows * parts / (int64_t(kBlocksOfMultiprocessor) * multiprocessors), 1, kMostRows); };
  if (plan.lane >= 0) {
    const Dim& lanes = p.dims[plan.lane];
    plan.form = Form::kLanes;
    plan.vector_bytes = vector_of(p, lanes.size, &lanes, nullptr);
    columns *= lanes.size * element_size(p.dtype) / plan.vector_bytes;
  } else if (last.size < kShortRow && last.length < kShortRow) {
    plan.form = Form::kElements;
  } else if (last.grad_stride == 1 && last.length >= kShortRow && row_bytes <= kMostSharedBytes) {
    plan.form = Form::kPlanes;
    plan.vector_bytes = vector_of(p, last.length, nullptr, &last);
    if (plan.vector_bytes < 16) plan.vector_bytes = element_size(p.dtype);
    plan.block_rows = int(std::min(rows_of_a_block(1), kMostSharedBytes / row_bytes));
    plan.shared_bytes = plan.block_rows * row_bytes;
  } else if (last.size < kShortRow) {
    plan.form = Form::kElements;
  } else {
    plan.form = Form::kColumns;
    plan.block_rows = int(rows_of_a_block(ceil_div(columns, kThreads)));
  }
  plan.block_columns = int(power_of_two_from(columns, kThreads));
  if (plan.form == Form::kLanes) plan.block_rows = int(std::min<int64_t>(kThreads / plan.block_columns, kMostRows));
  return plan;
}

}  // namespace fusebackend::resample_backward
