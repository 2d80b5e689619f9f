// The sums on a CPU: threads take chunks of rows. A chunk's rows are added in the element's precision, 16 at a time, and those sums in double,
// compensated where the rows were added in double too.
#include <algorithm>
#include <type_traits>
#include <vector>

#include "column_sum/column_sum.h"
#include "common/compensated_sum.h"
#include "common/cpu_half.h"
#include "common/integer_math.h"

namespace fusebackend::column_sum {
namespace {

constexpr int64_t kLeastColumns = 64;   // of rows that are worth a loop; shorter ones are taken together
constexpr int64_t kRowsOfASum = 16;     // that are added one after the other
constexpr int64_t kMostChunks = 64;     // of a matrix
constexpr int64_t kChunkElements = 1 << 14;  // that a task has at least
constexpr int64_t kTileColumns = 1024;  // whose sums stay in the first-level cache

template <typename In>
float rounded(float x) {
  In narrowed;
  narrow(x, narrowed);
  return widen(narrowed);
}

// Adds the sums of the columns of `rows` rows of x, one behind the other by `stride`, and of products with those of y, to `sums` and `more`.
template <typename In, typename Acc, Form kForm>
void add_rows(const In* x, const In* y, int64_t rows, int64_t stride, int64_t y_stride, int64_t columns, bool rounds, double* sums, double* more) {
  constexpr bool kPlain = kForm == Form::kPlain || sums_two(kForm);
  constexpr bool kCompensated = std::is_same_v<Acc, double>;
  static_assert(!kCompensated || kForm == Form::kPlain, "products are added in float");
  Acc some[kTileColumns], products[kForm == Form::kPlain ? 1 : kTileColumns];
  double lost[kCompensated ? kTileColumns : 1];
  for (int64_t first = 0; first < columns; first += kTileColumns) {
    const int64_t count = std::min(kTileColumns, columns - first);
    if constexpr (kCompensated) std::fill_n(lost, count, 0.0);
    for (int64_t begin = 0; begin < rows; begin += kRowsOfASum) {
      if constexpr (kPlain) std::fill_n(some, count, Acc(0));
      if constexpr (kForm != Form::kPlain) std::fill_n(products, count, Acc(0));
      const In *row = x + begin * stride + first, *other = reads_two(kForm) ? y + begin * y_stride + first : row;
      for (int64_t r = begin; r < std::min(begin + kRowsOfASum, rows); ++r, row += stride, other += reads_two(kForm) ? y_stride : stride) {
        if constexpr (kPlain)
          for (int64_t c = 0; c < count; ++c) some[c] += Acc(widen(row[c]));
        if constexpr (kForm != Form::kPlain) {
          if (rounds)
            for (int64_t c = 0; c < count; ++c) products[c] += rounded<In>(widen(row[c]) * widen(other[c]));
          else
            for (int64_t c = 0; c < count; ++c) products[c] += widen(row[c]) * widen(other[c]);
        }
      }
      double* const to = kPlain ? more : sums;  // products come second
      if constexpr (kCompensated)
        for (int64_t c = 0; c < count; ++c) add_compensated(sums[first + c], lost[c], some[c]);
      else if constexpr (kPlain)
        for (int64_t c = 0; c < count; ++c) sums[first + c] += some[c];
      if constexpr (kForm != Form::kPlain)
        for (int64_t c = 0; c < count; ++c) to[first + c] += products[c];
    }
    if constexpr (kCompensated)
      for (int64_t c = 0; c < count; ++c) sums[first + c] = compensated(sums[first + c], lost[c]);
  }
}

template <typename In, typename Acc, Form kForm>
void sum_chunks(const Problem& p, const CpuPlan& plan, double* partials, int64_t begin, int64_t end) {
  const int64_t rows = p.rows / plan.fold, tail = p.rows % plan.fold * p.columns;
  for (int64_t task = begin; task < end; ++task) {
    const int64_t batch = task / plan.chunks, chunk = task % plan.chunks;
    const In *const matrix = static_cast<const In*>(p.x) + batch * p.batch_stride, *const other = static_cast<const In*>(p.y) + batch * p.y_batch_stride;
    const int64_t first = chunk * plan.chunk_rows, last = std::min(first + plan.chunk_rows, rows);
    const int64_t stride = plan.fold * p.row_stride, y_stride = plan.fold * p.y_row_stride;
    double *const sums = partials + task * plan.width, *const more = sums + (sums_two(kForm) ? p.batch * plan.chunks * plan.width : 0);
    std::fill_n(sums, plan.width, 0.0);
    std::fill_n(more, plan.width, 0.0);
    const auto add = [&](int64_t from, int64_t count, int64_t columns) {
      add_rows<In, Acc, kForm>(matrix + from * stride, other + from * y_stride, count, stride, y_stride, columns, p.rounded, sums, more);
    };
    if (last > first) add(first, last - first, plan.width);
    if (chunk + 1 == plan.chunks && tail > 0) add(rows, 1, tail);
  }
}

template <typename In>
void sum_chunks(const Problem& p, const CpuPlan& plan, double* partials, int64_t begin, int64_t end) {
  switch (p.form) {
    case Form::kSquares: return sum_chunks<In, float, Form::kSquares>(p, plan, partials, begin, end);
    case Form::kPlainAndSquares: return sum_chunks<In, float, Form::kPlainAndSquares>(p, plan, partials, begin, end);
    case Form::kProducts: return sum_chunks<In, float, Form::kProducts>(p, plan, partials, begin, end);
    case Form::kPlainAndProducts: return sum_chunks<In, float, Form::kPlainAndProducts>(p, plan, partials, begin, end);
    default:
      return p.in_fp64() ? sum_chunks<In, double, Form::kPlain>(p, plan, partials, begin, end)
                         : sum_chunks<In, float, Form::kPlain>(p, plan, partials, begin, end);
  }
}

}  // namespace

CpuPlan make_cpu_plan(const Problem& p) {
  CpuPlan plan{};
  const int64_t columns = std::max<int64_t>(p.columns, 1);
  plan.fold = p.gapless() && columns < kLeastColumns ? std::max<int64_t>(std::min(kLeastColumns / columns, p.rows), 1) : 1;
  plan.width = plan.fold * columns;
  const int64_t rows = std::max<int64_t>(p.rows / plan.fold, 1);
  plan.chunk_rows = std::max(ceil_div(kChunkElements, plan.width), ceil_div(rows, kMostChunks));
  plan.chunks = ceil_div(rows, plan.chunk_rows);
  return plan;
}

void sum_chunks_cpu(const Problem& p, const CpuPlan& plan, double* partials, int64_t begin, int64_t end) {
  switch (p.in) {
    case DType::kFloat64: return sum_chunks<double, double, Form::kPlain>(p, plan, partials, begin, end);
    case DType::kFloat16: return sum_chunks<Float16>(p, plan, partials, begin, end);
    case DType::kBFloat16: return sum_chunks<BFloat16>(p, plan, partials, begin, end);
    default: return sum_chunks<float>(p, plan, partials, begin, end);
  }
}

void sum_partials_cpu(const Problem& p, const CpuPlan& plan, const double* partials, int64_t begin, int64_t end) {
  const int64_t terms = plan.chunks * plan.fold, results = p.batch * p.columns;
  for (int64_t task = begin; task < end; ++task) {
    const bool second = task >= results;
    void* const out = second ? p.second_out : p.out;
    const int64_t i = task % results;
    const double* from = partials + (task / p.columns * terms) * p.columns + i % p.columns;
    double sum = 0, lost = 0;
    for (int64_t t = 0; t < terms; ++t, from += p.columns) add_compensated(sum, lost, *from);
    sum = compensated(sum, lost);
    if (second ? p.second_mean : p.mean) sum /= double(p.rows);
    switch (second ? p.second_result : p.result) {
      case DType::kFloat64: static_cast<double*>(out)[i] = sum; break;
      case DType::kFloat16: narrow(float(sum), static_cast<Float16*>(out)[i]); break;
      case DType::kBFloat16: narrow(float(sum), static_cast<BFloat16*>(out)[i]); break;
      default: static_cast<float*>(out)[i] = float(sum);
    }
  }
}

}  // namespace fusebackend::column_sum
