// The sums on a CPU: threads take chunks of rows. A chunk's rows are added in the element's precision, 16 at a time, and those sums in double.
#include <algorithm>
#include <vector>

#include "column_sum/column_sum.h"
#include "common/cpu_half.h"
#include "common/integer_math.h"

namespace fusebackend::column_sum {
namespace {

constexpr int64_t kLeastColumns = 64;   // of rows that are worth a loop; shorter ones are taken together
constexpr int64_t kRowsOfASum = 16;     // that are added one after the other
constexpr int64_t kMostChunks = 64;     // of a matrix
constexpr int64_t kChunkElements = 1 << 14;  // that a task has at least
constexpr int64_t kTileColumns = 1024;  // whose sums stay in the first-level cache

// The sums of the columns of `rows` rows, one behind the other by `stride`, added to `sums`.
template <typename In, typename Acc>
void add_rows(const In* x, int64_t rows, int64_t stride, int64_t columns, double* sums) {
  Acc some[kTileColumns];
  for (int64_t first = 0; first < columns; first += kTileColumns) {
    const int64_t count = std::min(kTileColumns, columns - first);
    for (int64_t begin = 0; begin < rows; begin += kRowsOfASum) {
      std::fill_n(some, count, Acc(0));
      const In* row = x + begin * stride + first;
      for (int64_t r = begin; r < std::min(begin + kRowsOfASum, rows); ++r, row += stride)
        for (int64_t c = 0; c < count; ++c) some[c] += Acc(widen(row[c]));
      for (int64_t c = 0; c < count; ++c) sums[first + c] += some[c];
    }
  }
}

template <typename In, typename Acc>
void sum_chunks(const Problem& p, const CpuPlan& plan, double* partials, int64_t begin, int64_t end) {
  const int64_t rows = p.rows / plan.fold, tail = p.rows % plan.fold * p.columns;
  for (int64_t task = begin; task < end; ++task) {
    const int64_t batch = task / plan.chunks, chunk = task % plan.chunks;
    const In* const matrix = static_cast<const In*>(p.x) + batch * p.batch_stride;
    const int64_t first = chunk * plan.chunk_rows, last = std::min(first + plan.chunk_rows, rows), stride = plan.fold * p.row_stride;
    double* const sums = partials + task * plan.width;
    std::fill_n(sums, plan.width, 0.0);
    if (last > first) add_rows<In, Acc>(matrix + first * stride, last - first, stride, plan.width, sums);
    if (chunk + 1 == plan.chunks && tail > 0) add_rows<In, Acc>(matrix + rows * stride, 1, stride, tail, sums);
  }
}

}  // namespace

CpuPlan make_cpu_plan(const Problem& p) {
  CpuPlan plan{};
  const int64_t columns = std::max<int64_t>(p.columns, 1);
  plan.fold = p.row_stride == p.columns && columns < kLeastColumns ? std::max<int64_t>(std::min(kLeastColumns / columns, p.rows), 1) : 1;
  plan.width = plan.fold * columns;
  const int64_t rows = std::max<int64_t>(p.rows / plan.fold, 1);
  plan.chunk_rows = std::max(ceil_div(kChunkElements, plan.width), ceil_div(rows, kMostChunks));
  plan.chunks = ceil_div(rows, plan.chunk_rows);
  return plan;
}

void sum_chunks_cpu(const Problem& p, const CpuPlan& plan, double* partials, int64_t begin, int64_t end) {
  const bool wide = p.in_fp64();
  switch (p.in) {
    case DType::kFloat64: return sum_chunks<double, double>(p, plan, partials, begin, end);
    case DType::kFloat16:
      return wide ? sum_chunks<Float16, double>(p, plan, partials, begin, end) : sum_chunks<Float16, float>(p, plan, partials, begin, end);
    case DType::kBFloat16:
      return wide ? sum_chunks<BFloat16, double>(p, plan, partials, begin, end) : sum_chunks<BFloat16, float>(p, plan, partials, begin, end);
    default: return wide ? sum_chunks<float, double>(p, plan, partials, begin, end) : sum_chunks<float, float>(p, plan, partials, begin, end);
  }
}

void sum_partials_cpu(const Problem& p, const CpuPlan& plan, const double* partials, int64_t begin, int64_t end) {
  const int64_t terms = plan.chunks * plan.fold;
  for (int64_t i = begin; i < end; ++i) {
    const double* from = partials + i / p.columns * terms * p.columns + i % p.columns;
    double sum = 0;
    for (int64_t t = 0; t < terms; ++t, from += p.columns) sum += *from;
    if (p.mean) sum /= double(p.rows);
    switch (p.result) {
      case DType::kFloat64: static_cast<double*>(p.out)[i] = sum; break;
      case DType::kFloat16: narrow(float(sum), static_cast<Float16*>(p.out)[i]); break;
      case DType::kBFloat16: narrow(float(sum), static_cast<BFloat16*>(p.out)[i]); break;
      default: static_cast<float*>(p.out)[i] = float(sum);
    }
  }
}

}  // namespace fusebackend::column_sum
