// Means and variances on a CPU: two passes in double precision over the rows of a few columns, first for the mean, then for the distances to it.
// The mean is computed as a distance to the first row, so that of equal numbers it is that number. A few rows are added at a time, and those sums
// are compensated: the results may be in double precision.
#include <algorithm>
#include <cmath>
#include <limits>

#include "column_moments/column_moments.h"
#include "common/compensated_sum.h"
#include "common/cpu_half.h"

namespace fusebackend::column_moments {
namespace {

constexpr int64_t kTileColumns = 64;
constexpr int64_t kRowsOfASum = 16;  // that are added one after the other

void store(void* out, int64_t i, double value, DType type) {
  switch (type) {
    case DType::kFloat64: static_cast<double*>(out)[i] = value; break;
    case DType::kFloat16: narrow(float(value), static_cast<Float16*>(out)[i]); break;
    case DType::kBFloat16: narrow(float(value), static_cast<BFloat16*>(out)[i]); break;
    default: static_cast<float*>(out)[i] = float(value);
  }
}

// Writes the sum of term(r, c) over the rows for each of `count` columns.
template <typename Term>
void add_rows(int64_t rows, int64_t count, const Term& term, double* sums) {
  double some[kTileColumns], lost[kTileColumns] = {};
  std::fill_n(sums, count, 0.0);
  for (int64_t begin = 0; begin < rows; begin += kRowsOfASum) {
    std::fill_n(some, count, 0.0);
    for (int64_t r = begin; r < std::min(begin + kRowsOfASum, rows); ++r)
      for (int64_t c = 0; c < count; ++c) some[c] += term(r, c);
    for (int64_t c = 0; c < count; ++c) add_compensated(sums[c], lost[c], some[c]);
  }
  for (int64_t c = 0; c < count; ++c) sums[c] = compensated(sums[c], lost[c]);
}

// Of columns [first, first + count) of one matrix, whose results begin at `at`.
template <typename In>
void tile(const Problem& p, const In* x, int64_t count, int64_t at) {
  const int64_t rows = p.rows.rows, stride = p.rows.row_stride;
  double first[kTileColumns] = {}, mean[kTileColumns], squares[kTileColumns];
  if (rows > 0)
    for (int64_t c = 0; c < count; ++c) first[c] = double(widen(x[c]));
  const auto value = [&](int64_t r, int64_t c) { return double(widen(x[r * stride + c])); };
  add_rows(rows, count, [&](int64_t r, int64_t c) { return value(r, c) - first[c]; }, mean);
  for (int64_t c = 0; c < count; ++c) mean[c] = first[c] + mean[c] / double(rows);
  const auto square = [&](int64_t r, int64_t c) {
    const double distance = value(r, c) - mean[c];
    return distance * distance;
  };
  add_rows(rows, count, square, squares);
  const double divisor = std::max(double(rows) - p.correction, 0.0);
  for (int64_t c = 0; c < count; ++c) {
    store(p.mean, at + c, mean[c], p.rows.result);
    const double variance = rows > 0 ? squares[c] / divisor : std::numeric_limits<double>::quiet_NaN();
    store(p.variance, at + c, variance, p.rows.result);
    store(p.scale, at + c, 1 / std::sqrt(variance + p.epsilon), p.rows.result);
  }
}

template <typename In>
void moments(const Problem& p, int64_t begin, int64_t end) {
  while (begin < end) {
    const int64_t batch = begin / p.rows.columns, column = begin % p.rows.columns;
    const int64_t count = std::min({kTileColumns, end - begin, p.rows.columns - column});
    tile(p, static_cast<const In*>(p.rows.x) + batch * p.rows.batch_stride + column, count, begin);
    begin += count;
  }
}

}  // namespace

void moments_cpu(const Problem& p, int64_t begin, int64_t end) {
  switch (p.rows.in) {
    case DType::kFloat64: return moments<double>(p, begin, end);
    case DType::kFloat16: return moments<Float16>(p, begin, end);
    case DType::kBFloat16: return moments<BFloat16>(p, begin, end);
    default: return moments<float>(p, begin, end);
  }
}

}  // namespace fusebackend::column_moments
