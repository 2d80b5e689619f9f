// Sums over the rows of matrices whose columns lie side by side: out[b][c] = sum over r of x[b][r][c], or the mean; and of products
// x[b][r][c] * y[b][r][c] in the same pass.
#pragma once

#include <cstdint>

#include "common/dtype.h"

#if __has_include(<cuda_runtime_api.h>)
#include <cuda_runtime_api.h>
#endif

namespace fusebackend::column_sum {

// What is summed: x, products of x with itself or with y, or x and products, in this order. Moments (csrc/column_moments) share the plan alone.
enum class Form { kPlain, kSquares, kPlainAndSquares, kProducts, kPlainAndProducts, kMoments };
constexpr bool reads_two(Form form) { return form == Form::kProducts || form == Form::kPlainAndProducts; }
constexpr bool sums_two(Form form) { return form == Form::kPlainAndSquares || form == Form::kPlainAndProducts; }

// Strides are in elements. The result is contiguous. Sums are made in fp32, or in fp64 where either dtype is that, which those of products
// are not.
struct Problem {
  const void* x;
  void* out;
  int64_t batch, rows, columns;
  int64_t batch_stride, row_stride;
  DType in, result;
  bool mean;

  Form form = Form::kPlain;
  const void* y;    // of the dtype of x
  int64_t y_batch_stride, y_row_stride;
  void* second_out;  // of two sums, that of products
  DType second_result;
  bool second_mean;
  bool rounded;     // products are rounded to `in` before they are added

  int sums() const { return sums_two(form) ? 2 : 1; }
  bool in_fp64() const { return in == DType::kFloat64 || result == DType::kFloat64; }
  int accumulator_bytes() const { return in_fp64() ? 8 : 4; }
  // Whether rows follow one another without a gap.
  bool gapless() const { return row_stride == columns && (!reads_two(form) || y_row_stride == columns); }
};

// How a GPU computes it. The blocks are the same for each of the sums. Where rows are shorter than loads, or do not begin at multiples of them, several rows are read as one long row,
// the columns of which are added together at the end: `fold` of them. A thread reads one vector of each of its rows.
constexpr int kMostThreads = 512;  // of a block
constexpr int kRowsAtOnce = 4;     // loads that a thread has under way

struct Plan {
  int vector_bytes;      // of a load
  int fold;              // rows that are read as one; more than 1 only if rows follow one another without a gap
  int64_t width;         // vectors of such a row
  int tile_vectors;      // of those, that one block sums
  int lanes;             // rows that a block reads at once
  int threads;
  int64_t tiles;         // blocks beside one another
  int64_t splits;        // blocks that share the rows of a matrix: each takes every splits-th group of `lanes` rows

  int64_t blocks(const Problem& p) const { return tiles * splits * p.batch; }
  // What blocks leave of each sum for the second kernel. None where one block sums all the rows of a column.
  int64_t partials(const Problem& p) const { return splits * fold > 1 ? p.batch * splits * fold * p.columns : 0; }
};

Plan make_plan(const Problem& p, int multiprocessors);

#if __has_include(<cuda_runtime_api.h>)
// `partials` has room for as many numbers as the plan says, for each of the sums.
cudaError_t launch(const Problem& p, const Plan& plan, void* partials, cudaStream_t stream);
#endif

// On a CPU rows are summed in chunks, always the same for the same shape.
struct CpuPlan {
  int64_t fold, width, chunk_rows, chunks;
};
CpuPlan make_cpu_plan(const Problem& p);
// The tasks [begin, end) of batch * chunks, which write sums of double precision: all of the first, and then all of the second. Afterwards
// [begin, end) of all columns.
void sum_chunks_cpu(const Problem& p, const CpuPlan& plan, double* partials, int64_t begin, int64_t end);
void sum_partials_cpu(const Problem& p, const CpuPlan& plan, const double* partials, int64_t begin, int64_t end);

}  // namespace fusebackend::column_sum
