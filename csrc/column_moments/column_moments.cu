// Two kernels, as for sums (column_sum.cu): the first streams x, the second adds what its blocks leave. A thread keeps a mean and the squared
// distances to it for each of its columns. It takes four rows at once, while the next four are under way: their distances to the mean of the rows
// before, and the squares of these, tell how both change (Chan, Golub, LeVeque 1979). That is as accurate as Welford's way, which joins single rows,
// and divides once for 32 elements. Of the first four rows distances are taken to the first.
#include <cmath>

#include "column_moments/column_moments.h"
#include "column_sum/rows.cuh"
#include "common/column_partials.cuh"
#include "common/programmatic_launch.cuh"

namespace fusebackend::column_moments {
namespace {

using column_sum::kBlocks;
using column_sum::kMostThreads;
using column_sum::kRowsAtOnce;
using column_sum::load_once;
using column_sum::Plan;
using column_sum::Rows;
using column_sum::store_result;

struct Arguments {
  Rows of;          // its `out` and divisors are not used
  void* variance;   // results, or what a block leaves: squared distances and means, in the accumulator's type
  void* mean;
  void* scale;
  double count;     // rows of a matrix
  double divisor;   // of the squared distances
  double epsilon;
};

__device__ __forceinline__ float reciprocal(float x) { return __frcp_rn(x); }
__device__ __forceinline__ double reciprocal(double x) { return 1 / x; }

// Joins the rows of `mean` and `squares` with `more` others.
template <typename Acc>
__device__ __forceinline__ void join(Acc& mean, Acc& squares, Acc count, Acc more_mean, Acc more_squares, Acc more) {
  const Acc weight = more * reciprocal(count + more), delta = more_mean - mean;
  mean += delta * weight;
  squares += more_squares + delta * (delta * (count * weight));  // where there were no rows before, the square could be out of range
}

template <typename Acc>
__device__ __forceinline__ void finish(const Arguments& p, int64_t at, Acc mean, Acc squares) {
  store_result(p.mean, at, mean, p.of.result);
  const Acc variance = squares / Acc(p.divisor);
  store_result(p.variance, at, variance, p.of.result);
  store_result(p.scale, at, Acc(1) / sqrt(variance + Acc(p.epsilon)), p.of.result);
}

template <typename In, typename Acc, int kBytes>
__global__ void __launch_bounds__(kMostThreads, kBlocks<Acc, column_sum::Form::kMoments>) column_moments_rows(const Arguments arguments) {
  constexpr int kN = kBytes / int(sizeof(In));
  extern __shared__ __align__(16) char shared[];
  const Rows& p = arguments.of;
  launch_dependents();

  const uint32_t tile = blockIdx.x % p.tiles, above = blockIdx.x / p.tiles, split = above % p.splits, batch = above / p.splits;
  const int lane = threadIdx.x / p.tile_vectors, vector = threadIdx.x - lane * p.tile_vectors;
  const int64_t column = int64_t(tile) * p.tile_vectors + vector;  // in vectors
  const bool active = lane < p.lanes && column < p.width;

  Acc mean[kN] = {}, squares[kN] = {}, count = 0;
  int last = 0;  // of the last row, how many of this thread's columns there are
  if (active) {
    const int64_t stride = int64_t(p.lanes) * p.splits, begin = int64_t(split) * p.lanes + lane;  // rows
    const int64_t step = stride * p.row_stride;
    const In* const matrix = static_cast<const In*>(p.x) + batch * p.batch_stride + column * kN;
    const In* from = matrix + begin * p.row_stride;
    int64_t left = p.rows > begin ? (p.rows - begin + stride - 1) / stride : 0;  // rows
    using Step = Vec<In, kN>[kRowsAtOnce];
    const auto load = [&](Step& x) {
#pragma unroll
      for (int u = 0; u < kRowsAtOnce; ++u, from += step) x[u] = load_once<In, kN>(from);
    };
    Step x;
    if (left >= kRowsAtOnce) {
      load(x);
#pragma unroll
      for (int i = 0; i < kN; ++i) mean[i] = Acc(widen(x[0].v[i]));
    }
    while (left >= kRowsAtOnce) {
      left -= kRowsAtOnce;
      Step next;
      if (left >= kRowsAtOnce) load(next);
      count += Acc(kRowsAtOnce);
      const Acc weight = reciprocal(count);
#pragma unroll
      for (int i = 0; i < kN; ++i) {
        Acc moved = 0, square = 0;  // the mean, by distances that are weighed before they are added: their sum could be out of range
#pragma unroll
        for (int u = 0; u < kRowsAtOnce; ++u) {
          const Acc distance = Acc(widen(x[u].v[i])) - mean[i];
          moved += distance * weight;
          square += distance * distance;
        }
        mean[i] += moved;
        squares[i] += square - moved * (moved * count);
      }
#pragma unroll
      for (int u = 0; u < kRowsAtOnce; ++u) x[u] = next[u];
    }
    for (; left > 0; --left, from += step) {
      const Vec<In, kN> row = load_once<In, kN>(from);
#pragma unroll
      for (int i = 0; i < kN; ++i) join(mean[i], squares[i], count, Acc(widen(row.v[i])), Acc(0), Acc(1));
      count += Acc(1);
    }
    if (p.tail > 0 && split + 1 == p.splits && lane == 0) {
      const In* const tail = matrix + p.rows * p.row_stride;
      last = int(min(max(p.tail - column * kN, int64_t(0)), int64_t(kN)));
#pragma unroll
      for (int i = 0; i < kN; ++i)
        if (i < last) join(mean[i], squares[i], count, Acc(widen(tail[i])), Acc(0), Acc(1));
    }
  }
  // The lanes, in a tree: the upper half of them is joined with the lower. The last row's end belongs to the lowest lane, which gives nothing.
  const int given = p.lanes / 2 * p.tile_vectors;  // threads that give theirs at once
  Acc* const means = reinterpret_cast<Acc*>(shared);
  Acc* const distances = means + given * kN;
  Acc* const counts = distances + given * kN;
  for (int lanes = p.lanes; lanes > 1;) {
    const int half = (lanes + 1) / 2;
    if (active && lane >= half && lane < lanes) {
      const int to = threadIdx.x - half * p.tile_vectors;
#pragma unroll
      for (int i = 0; i < kN; ++i) means[i * given + to] = mean[i], distances[i * given + to] = squares[i];
      counts[to] = count;
    }
    __syncthreads();
    if (active && lane < lanes - half && counts[threadIdx.x] > Acc(0)) {
      const Acc more = counts[threadIdx.x];
#pragma unroll
      for (int i = 0; i < kN; ++i) {
        const int from = i * given + threadIdx.x;
        join(mean[i], squares[i], count + (i < last ? Acc(1) : Acc(0)), means[from], distances[from], more);
      }
      count += more;
    }
    __syncthreads();
    lanes = half;
  }
  if (!active || lane != 0) return;
  const int64_t at = (int64_t(batch) * p.splits + split) * p.width * kN + column * kN;
#pragma unroll
  for (int i = 0; i < kN; ++i) {
    if (p.finished) {
      finish(arguments, at + i, arguments.count > 0 ? mean[i] : Acc(NAN), arguments.count > 0 ? squares[i] : Acc(NAN));
    } else {
      static_cast<Acc*>(arguments.mean)[at + i] = mean[i];
      static_cast<Acc*>(arguments.variance)[at + i] = squares[i];
    }
  }
}

struct Terms {
  int64_t columns, tail;  // as in Rows
  int64_t each, rest;     // rows of `fold` times `columns` elements: those that every block has, and others, of which one after the other takes `lanes`
  uint32_t splits, fold, tiles;
  int lanes, column_bits;
};

// How many rows the partial result `term` of a column is of.
__device__ __forceinline__ double count_of(const Terms& p, uint32_t term, int64_t column) {
  const uint32_t split = p.fold == 1 ? term : term / p.fold, part = term - split * p.fold;
  const int64_t rest = p.rest - int64_t(split) * p.lanes;
  const bool has_tail = split + 1 == p.splits && part * p.columns + column < p.tail;
  return double(p.each + min(max(rest, int64_t(0)), int64_t(p.lanes)) + has_tail);
}

// Joins the partial results of a column in fp64, as distances to the first one's mean: of equal numbers the variance is 0. A block has
// 2^column_bits columns, and a thread every n-th term of one, where n such threads share a column.
template <typename Acc>
__global__ void __launch_bounds__(kFinalThreads) column_moments_partials(const Arguments arguments, const Acc* means, const Acc* squares, const Terms p) {
  constexpr int kTermsAtOnce = 8;
  __shared__ double sums[2][kFinalThreads];
  wait_for_previous_kernel();
  const uint32_t tile = blockIdx.x % p.tiles, batch = blockIdx.x / p.tiles, terms = p.splits * p.fold;
  const int block_columns = 1 << p.column_bits, lanes = kFinalThreads >> p.column_bits;
  const int lane = threadIdx.x >> p.column_bits, own = threadIdx.x & (block_columns - 1);
  const int64_t column = int64_t(tile) * block_columns + own, first = int64_t(batch) * terms * p.columns + column;
  double shift = 0, sum = 0, square = 0;
  if (column < p.columns) {
    shift = double(means[first]);
    for (uint32_t begin = lane; begin < terms; begin += kTermsAtOnce * lanes) {
      Acc mean[kTermsAtOnce], distances[kTermsAtOnce];
#pragma unroll
      for (int u = 0; u < kTermsAtOnce; ++u) {
        const int64_t at = first + min(begin + u * lanes, terms - 1) * p.columns;
        mean[u] = means[at], distances[u] = squares[at];
      }
#pragma unroll
      for (int u = 0; u < kTermsAtOnce; ++u) {
        const uint32_t term = begin + u * lanes;
        const double count = term < terms ? count_of(p, term, column) : 0;
        if (count == 0) continue;
        const double distance = double(mean[u]) - shift;
        sum += count * distance;
        square += count * distance * distance + double(distances[u]);
      }
    }
  }
  sums[0][threadIdx.x] = sum, sums[1][threadIdx.x] = square;
  for (int half = lanes / 2; half > 0; half /= 2) {
    __syncthreads();
    if (lane < half) {
      sums[0][threadIdx.x] = sum += sums[0][threadIdx.x + half * block_columns];
      sums[1][threadIdx.x] = square += sums[1][threadIdx.x + half * block_columns];
    }
  }
  if (lane != 0 || column >= p.columns) return;
  const double distance = sum / arguments.count, found = square - sum * distance;
  finish(arguments, int64_t(batch) * p.columns + column, shift + distance, found < 0 ? 0.0 : found);
}

template <typename In, typename Acc, int kBytes>
cudaError_t launch_rows(const Arguments& arguments, const Plan& plan, int64_t blocks, cudaStream_t stream) {
  constexpr size_t kEach = (2 * (kBytes / sizeof(In)) + 1) * sizeof(Acc);  // bytes that a thread gives
  static_assert(kMostThreads / 2 * kEach <= 48 << 10);
  const size_t shared = size_t(plan.lanes / 2) * plan.tile_vectors * kEach;
  column_moments_rows<In, Acc, kBytes><<<uint32_t(blocks), plan.threads, shared, stream>>>(arguments);
  return cudaGetLastError();
}

template <typename In, typename Acc>
cudaError_t launch_both(const Problem& p, const Plan& plan, void* partials, cudaStream_t stream) {
  const column_sum::Problem& rows = p.rows;
  const int64_t terms = plan.splits * plan.fold, left = plan.partials(rows);
  const int bits = final_column_bits(terms);
  const int64_t blocks = plan.blocks(rows), tiles = final_tiles(rows.columns, bits);
  if (blocks > INT32_MAX || tiles * rows.batch > INT32_MAX) return cudaErrorInvalidConfiguration;
  Arguments results{column_sum::rows_of(rows, plan, nullptr), p.variance, p.mean, p.scale, double(rows.rows), 0, p.epsilon};
  results.divisor = results.count > p.correction ? results.count - p.correction : 0;
  Arguments first = results;
  if (left > 0) first.mean = partials, first.variance = static_cast<Acc*>(partials) + left;
  cudaError_t error = cudaErrorInvalidValue;
  if (plan.vector_bytes == 16) error = launch_rows<In, Acc, 16>(first, plan, blocks, stream);
  else if (plan.vector_bytes == sizeof(In)) error = launch_rows<In, Acc, sizeof(In)>(first, plan, blocks, stream);
  else if constexpr (sizeof(In) == 2) {
    if (plan.vector_bytes == 4) error = launch_rows<In, Acc, 4>(first, plan, blocks, stream);
  }
  if (error != cudaSuccess || left == 0) return error;
  const int64_t at_once = int64_t(plan.lanes) * plan.splits, each = results.of.rows / at_once;
  const Terms of{rows.columns, results.of.tail, each * plan.lanes, results.of.rows - each * at_once, uint32_t(plan.splits),
                 uint32_t(plan.fold), uint32_t(tiles), plan.lanes, bits};
  return launch_dependent(column_moments_partials<Acc>, dim3(uint32_t(tiles * rows.batch)), dim3(kFinalThreads), 0, true, stream, results,
                          static_cast<const Acc*>(first.mean), static_cast<const Acc*>(first.variance), of);
}

}  // namespace

cudaError_t launch(const Problem& p, const Plan& plan, void* partials, cudaStream_t stream) {
  const bool wide = p.rows.in_fp64();
  switch (p.rows.in) {
    case DType::kFloat64: return launch_both<double, double>(p, plan, partials, stream);
    case DType::kFloat32: return wide ? launch_both<float, double>(p, plan, partials, stream) : launch_both<float, float>(p, plan, partials, stream);
    case DType::kFloat16: return wide ? launch_both<__half, double>(p, plan, partials, stream) : launch_both<__half, float>(p, plan, partials, stream);
    case DType::kBFloat16:
      return wide ? launch_both<__nv_bfloat16, double>(p, plan, partials, stream) : launch_both<__nv_bfloat16, float>(p, plan, partials, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace fusebackend::column_moments
