// The lists of an axis tell which elements of the gradient each element of the result is the sum of, in the order of terms and of these elements, so that
// a sum is always made in the same order (lists.cuh). With them the sums are computed, each in one thread, with neither atomic additions nor zeros before
// them; the forms are described in resample_backward.h.
#include <algorithm>
#include <type_traits>

#include "common/convert.cuh"
#include "common/cuda_common.cuh"
#include "common/places.cuh"
#include "common/programmatic_launch.cuh"
#include "resample_backward/lists.cuh"

namespace fusebackend::resample_backward {
namespace {

template <typename T>
using AccOf = AccumulatorOf<T>;

template <typename Acc>
struct SumArguments {
  const void* grad;
  void* out;
  Axis axis[kMostAxes];
  Lists<Acc> lists[kMostAxes];
  Dim dims[kMostDims];  // of rows: without the lanes
  int count;
  int64_t rows;    // of the last axis, and of all lanes
  uint32_t lanes;  // vectors along the lanes, or, of planes, in a row of the gradient
  FastDiv by_lanes, by_axis[kMostAxes], by_dim[kMostDims];  // the last two where they divide less than 2^31
  int block_rows, block_columns;
};

// Linear interpolation along two axes to twice the size makes an element of a row of the sum of 16 rows of the gradient.
constexpr int kKeptRows = 16;
constexpr int kMostBlockRows = 32;

// Where a row of the last axis lies, and the rows of the gradient that it is the sum of: kept if there are few.
template <typename Acc>
struct Row {
  int64_t out, grad;
  Range outer, middle;
  struct Kept {
    int64_t offset;
    Acc weight;
  } kept[kKeptRows];

  __device__ __forceinline__ int count() const { return outer.count() * middle.count(); }

  // Calls function(offset, weight) for each.
  template <typename Function>
  __device__ __forceinline__ void for_each(const SumArguments<Acc>& p, const Function& function) const {
    const int rows = count();
    if (rows <= kKeptRows) {
#pragma unroll 4
      for (int k = 0; k < rows; ++k) function(kept[k].offset, kept[k].weight);
      return;
    }
    for (int i = outer.begin; i < outer.end; ++i) {
      const Entry<Acc> a = p.lists[0].entries[i];
      for (int j = middle.begin; j < middle.end; ++j) {
        const Entry<Acc> b = p.lists[1].entries[j];
        function(grad + a.place * p.axis[0].grad_stride + b.place * p.axis[1].grad_stride, a.weight * b.weight);
      }
    }
  }
};

// The block's rows, from `first` on. Ends with a barrier.
template <typename Acc>
__device__ __forceinline__ int find_rows(const SumArguments<Acc>& p, int64_t first, Row<Acc>* rows) {
  const int count = int(min(int64_t(p.block_rows), p.rows - first));
  const bool is_small = p.rows <= INT32_MAX;
  for (int r = threadIdx.x; r < count; r += kThreads) {
    int64_t left = first + r;
    const int64_t j = take(left, is_small, p.by_axis[1], p.axis[1].size), i = take(left, is_small, p.by_axis[0], p.axis[0].size);
    const Range outer = range_of(p.lists[0], i), middle = range_of(p.lists[1], j);
    int64_t out = i * p.axis[0].out_stride + j * p.axis[1].out_stride, grad = 0;
#pragma unroll 1
    for (int d = p.count - 1; d >= 0; --d) {
      const int64_t at = take(left, is_small, p.by_dim[d], p.dims[d].size);
      out += at * p.dims[d].out_stride, grad += at * p.dims[d].grad_stride;
    }
    rows[r].out = out, rows[r].grad = grad, rows[r].outer = outer, rows[r].middle = middle;
  }
  __syncthreads();
  for (int item = threadIdx.x; item < count * kKeptRows; item += kThreads) {
    Row<Acc>& row = rows[item / kKeptRows];
    const int k = item % kKeptRows, all = row.count();
    if (k >= all || all > kKeptRows) continue;
    const int i = row.outer.count() == 1 ? 0 : k / row.middle.count(), j = k - i * row.middle.count();
    const Entry<Acc> a = p.lists[0].entries[row.outer.begin + i], b = p.lists[1].entries[row.middle.begin + j];
    row.kept[k] = {row.grad + a.place * p.axis[0].grad_stride + b.place * p.axis[1].grad_stride, a.weight * b.weight};
  }
  __syncthreads();
  return count;
}

// Elements along the last axis that a result is the sum of, of which a thread keeps the first: linear interpolation to twice the size has four.
constexpr int kKept = 4;

template <typename Acc>
struct Column {
  int64_t offset[kKept];
  Acc weight[kKept];
  Range range;

  __device__ __forceinline__ Column(const Lists<Acc>& lists, int64_t k, int64_t step) : range(range_of(lists, k)) {
#pragma unroll
    for (int u = 0; u < kKept; ++u) {
      if (range.begin + u >= range.end) continue;
      const Entry<Acc> entry = lists.entries[range.begin + u];
      offset[u] = entry.place * step, weight[u] = entry.weight;
    }
  }
  // Calls function(offset, weight) for each.
  template <typename Function>
  __device__ __forceinline__ void for_each(const Lists<Acc>& lists, int64_t step, const Function& function) const {
#pragma unroll
    for (int u = 0; u < kKept; ++u)
      if (range.begin + u < range.end) function(offset[u], weight[u]);
    for (int at = range.begin + kKept; at < range.end; ++at) function(lists.entries[at].place * step, lists.entries[at].weight);
  }
};

template <typename T, int kN>
__device__ __forceinline__ Vec<T, kN> load(const T* from) {
  return *reinterpret_cast<const Vec<T, kN>*>(from);
}

// N results along the lanes.
template <typename In, typename Out, int kN>
__global__ void __launch_bounds__(kThreads) resample_backward_lanes(const __grid_constant__ SumArguments<AccOf<In>> p) {
  using Acc = AccOf<In>;
  __shared__ Row<Acc> rows[kMostBlockRows];
  wait_for_previous_kernel();
  const int count = find_rows(p, int64_t(blockIdx.x) * p.block_rows, rows), lane_threads = kThreads / p.block_rows;
  if (int(threadIdx.x) / lane_threads >= count) return;
  const Row<Acc>& row = rows[threadIdx.x / lane_threads];
  const Axis& last = p.axis[2];
  const int64_t columns = last.size * p.lanes, step = int64_t(gridDim.y) * lane_threads;
  for (int64_t at = int64_t(blockIdx.y) * lane_threads + threadIdx.x % lane_threads; at < columns; at += step) {
    int64_t w, lane;
    if (columns >> 31) {
      divide(at, p.lanes, w, lane);
    } else {
      uint32_t quotient, rest;
      p.by_lanes.divmod(uint32_t(at), quotient, rest);
      w = quotient, lane = rest;
    }
    const In* const grad = static_cast<const In*>(p.grad) + lane * kN;
    const Column<Acc> column(p.lists[2], w, last.grad_stride);
    Vec<Acc, kN> sum{};
    row.for_each(p, [&](int64_t row_offset, Acc row_weight) {
      const In* const from = grad + row_offset;
      column.for_each(p.lists[2], last.grad_stride, [&](int64_t offset, Acc weight) {
        const Vec<In, kN> x = load<In, kN>(from + offset);
        const Acc both = row_weight * weight;
#pragma unroll
        for (int n = 0; n < kN; ++n) sum.v[n] += both * widen(x.v[n]);
      });
    });
    Vec<Out, kN> result;
#pragma unroll
    for (int n = 0; n < kN; ++n) narrow(sum.v[n], result.v[n]);
    store_vector_to_global(static_cast<Out*>(p.out) + row.out + w * last.out_stride + lane * kN, result);
  }
}

template <typename In, typename Out, int kN>
__global__ void __launch_bounds__(kThreads) resample_backward_planes(const __grid_constant__ SumArguments<AccOf<In>> p) {
  using Acc = AccOf<In>;
  extern __shared__ __align__(16) char shared[];
  __shared__ Row<Acc> rows[kMostBlockRows];
  Acc* const sums = reinterpret_cast<Acc*>(shared);
  wait_for_previous_kernel();
  const int count = find_rows(p, int64_t(blockIdx.x) * p.block_rows, rows);
  const Axis& last = p.axis[2];
  const int pitch = int(row_pitch(last.length)), vectors = int(p.lanes);
  for (int item = threadIdx.x; item < count * vectors; item += kThreads) {
    uint32_t r, v;
    p.by_lanes.divmod(uint32_t(item), r, v);
    const In* const grad = static_cast<const In*>(p.grad) + v * kN;
    Vec<Acc, kN> sum{};
    rows[r].for_each(p, [&](int64_t offset, Acc weight) {
      const Vec<In, kN> x = load<In, kN>(grad + offset);
#pragma unroll
      for (int n = 0; n < kN; ++n) sum.v[n] += weight * widen(x.v[n]);
    });
    store_vector(sums + int(r) * pitch + int(v) * kN, sum);
  }
  for (int r = threadIdx.x; r < count; r += kThreads) sums[r * pitch + pitch - 1] = 0;
  __syncthreads();
  for (int w = threadIdx.x % p.block_columns; w < last.size; w += p.block_columns) {
    const Range range = range_of(p.lists[2], w);
    int place[kKept];
    Acc weight[kKept];
#pragma unroll
    for (int u = 0; u < kKept; ++u) {  // in place of an entry that is not there the zero behind the row
      const bool is_there = range.begin + u < range.end;
      const Entry<Acc> entry = is_there ? p.lists[2].entries[range.begin + u] : Entry<Acc>{Acc(0), pitch - 1};
      place[u] = entry.place, weight[u] = entry.weight;
    }
    Out* const out = static_cast<Out*>(p.out) + w * last.out_stride;
    const auto sum_of = [&](const Acc* from) {
      Acc sum = 0;
#pragma unroll
      for (int u = 0; u < kKept; ++u) sum += weight[u] * from[place[u]];
      for (int at = range.begin + kKept; at < range.end; ++at) sum += p.lists[2].entries[at].weight * from[p.lists[2].entries[at].place];
      return sum;
    };
    const int step = kThreads / p.block_columns;
#pragma unroll 4
    for (int r = threadIdx.x / p.block_columns; r < count; r += step) narrow(sum_of(sums + r * pitch), out[rows[r].out]);
  }
}

// A result of each of the block's rows.
template <typename In, typename Out>
__global__ void __launch_bounds__(kThreads) resample_backward_columns(const __grid_constant__ SumArguments<AccOf<In>> p) {
  using Acc = AccOf<In>;
  __shared__ Row<Acc> rows[kMostBlockRows];
  wait_for_previous_kernel();
  const int count = find_rows(p, int64_t(blockIdx.x) * p.block_rows, rows);
  const Axis& last = p.axis[2];
  for (int64_t w = int64_t(blockIdx.y) * p.block_columns + threadIdx.x % p.block_columns; w < last.size; w += int64_t(gridDim.y) * p.block_columns) {
    const Column<Acc> column(p.lists[2], w, last.grad_stride);
#pragma unroll 2
    for (int r = threadIdx.x / p.block_columns; r < count; r += kThreads / p.block_columns) {
      Acc sum = 0;
      rows[r].for_each(p, [&](int64_t row_offset, Acc row_weight) {
        const In* const from = static_cast<const In*>(p.grad) + row_offset;
        column.for_each(p.lists[2], last.grad_stride, [&](int64_t offset, Acc weight) { sum += row_weight * weight * widen(from[offset]); });
      });
      narrow(sum, static_cast<Out*>(p.out)[rows[r].out + w * last.out_stride]);
    }
  }
}

template <typename In, typename Out>
__global__ void __launch_bounds__(kThreads) resample_backward_elements(const __grid_constant__ SumArguments<AccOf<In>> p) {
  using Acc = AccOf<In>;
  int64_t left = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const Axis &first = p.axis[0], &second = p.axis[1], &last = p.axis[2];
  const bool is_small = p.rows * last.size <= INT32_MAX;
  if (left >= p.rows * last.size) return;
  const int64_t w = take(left, is_small, p.by_axis[2], last.size), j = take(left, is_small, p.by_axis[1], second.size);
  const int64_t i = take(left, is_small, p.by_axis[0], first.size);
  int64_t out = i * first.out_stride + j * second.out_stride + w * last.out_stride, grad = 0;
#pragma unroll 1
  for (int d = p.count - 1; d >= 0; --d) {
    const int64_t at = take(left, is_small, p.by_dim[d], p.dims[d].size);
    out += at * p.dims[d].out_stride, grad += at * p.dims[d].grad_stride;
  }
  wait_for_previous_kernel();
  const Range rows[2] = {range_of(p.lists[0], i), range_of(p.lists[1], j)};
  const Column<Acc> column(p.lists[2], w, last.grad_stride);
  Acc sum = 0;
  for (int k = rows[0].begin; k < rows[0].end; ++k) {
    const Entry<Acc> a = p.lists[0].entries[k];
    for (int l = rows[1].begin; l < rows[1].end; ++l) {
      const Entry<Acc> b = p.lists[1].entries[l];
      const In* const from = static_cast<const In*>(p.grad) + grad + a.place * first.grad_stride + b.place * second.grad_stride;
      const Acc both = a.weight * b.weight;
      column.for_each(p.lists[2], last.grad_stride, [&](int64_t offset, Acc weight) { sum += both * weight * widen(from[offset]); });
    }
  }
  narrow(sum, static_cast<Out*>(p.out)[out]);
}

constexpr int64_t kMostBlocksAcross = 65535, kEnoughBlocks = 2048;  // of more the threads compute several results of a row, which they find once

template <typename In, typename Out, int kBytes>
cudaError_t launch_sums(const SumArguments<AccOf<In>>& p, const Plan& plan, cudaStream_t stream) {
  constexpr int kN = kBytes / int(sizeof(In));
  const bool single = plan.form == Form::kElements;
  const int64_t blocks = single ? ceil_div(p.rows * p.axis[kMostAxes - 1].size, kThreads) : ceil_div(p.rows, plan.block_rows);
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  if (single) return launch_dependent(resample_backward_elements<In, Out>, dim3(uint32_t(blocks)), dim3(kThreads), 0, true, stream, p);
  if (plan.form == Form::kPlanes) {
    if constexpr (kBytes == 16 || kN == 1)
      return launch_dependent(resample_backward_planes<In, Out, kN>, dim3(uint32_t(blocks)), dim3(kThreads), size_t(plan.shared_bytes), true, stream, p);
    return cudaErrorInvalidValue;
  }
  const int64_t most = std::min(kMostBlocksAcross, ceil_div(kEnoughBlocks, blocks)), columns = p.axis[2].size * p.lanes;
  if (plan.form == Form::kLanes) {
    const int64_t across = std::min(most, ceil_div(columns, kThreads / plan.block_rows));
    return launch_dependent(resample_backward_lanes<In, Out, kN>, dim3(uint32_t(blocks), uint32_t(across)), dim3(kThreads), 0, true, stream, p);
  }
  const int64_t across = std::min(kMostBlocksAcross, ceil_div(columns, plan.block_columns));
  return launch_dependent(resample_backward_columns<In, Out>, dim3(uint32_t(blocks), uint32_t(across)), dim3(kThreads), 0, true, stream, p);
}

template <typename In, typename Out>
cudaError_t launch_all(const Problem& p, const Plan& plan, void* tables, cudaStream_t stream) {
  using Acc = AccOf<In>;
  SumArguments<Acc> sums{};
  const cudaError_t error = launch_lists(p, tables, sums.lists, stream);
  if (error != cudaSuccess) return error;
  sums.grad = p.grad, sums.out = p.out;
  for (int k = 0; k < kMostAxes; ++k) sums.axis[k] = p.axis[k];
  sums.rows = p.axis[0].size * p.axis[1].size;
  for (int d = 0; d < p.count; ++d) {
    if (d == plan.lane) continue;
    sums.dims[sums.count++] = p.dims[d];
    sums.rows *= p.dims[d].size;
  }
  const int64_t in_a_vector = plan.vector_bytes / int64_t(sizeof(In));
  sums.lanes = 1;
  if (plan.form == Form::kLanes) sums.lanes = uint32_t(p.dims[plan.lane].size / in_a_vector);
  if (plan.form == Form::kPlanes) sums.lanes = uint32_t(p.axis[kMostAxes - 1].length / in_a_vector);
  sums.by_lanes = FastDiv(std::max(sums.lanes, 1u));
  if (sums.rows <= INT32_MAX) {
    for (int k = 0; k < kMostAxes; ++k) sums.by_axis[k] = FastDiv(uint32_t(p.axis[k].size));
    for (int d = 0; d < sums.count; ++d) sums.by_dim[d] = FastDiv(uint32_t(sums.dims[d].size));
  }
  sums.block_rows = plan.block_rows, sums.block_columns = plan.block_columns;
  if (plan.vector_bytes == 16) return launch_sums<In, Out, 16>(sums, plan, stream);
  if constexpr (sizeof(In) < 4) {
    if (plan.vector_bytes == 4) return launch_sums<In, Out, 4>(sums, plan, stream);
  }
  return launch_sums<In, Out, int(sizeof(In))>(sums, plan, stream);
}

template <typename In>
cudaError_t launch_from(const Problem& p, const Plan& plan, void* tables, cudaStream_t stream) {
  if constexpr (std::is_same_v<In, double>) {
    return p.out_dtype == DType::kFloat64 ? launch_all<In, double>(p, plan, tables, stream) : cudaErrorInvalidValue;
  } else {
    switch (p.out_dtype) {
      case DType::kFloat32: return launch_all<In, float>(p, plan, tables, stream);
      case DType::kFloat16: return launch_all<In, __half>(p, plan, tables, stream);
      case DType::kBFloat16: return launch_all<In, __nv_bfloat16>(p, plan, tables, stream);
      default: return cudaErrorInvalidValue;
    }
  }
}

}  // namespace

cudaError_t launch(const Problem& p, const Plan& plan, void* tables, cudaStream_t stream) {
  switch (p.dtype) {
    case DType::kFloat64: return launch_from<double>(p, plan, tables, stream);
    case DType::kFloat32: return launch_from<float>(p, plan, tables, stream);
    case DType::kFloat16: return launch_from<__half>(p, plan, tables, stream);
    case DType::kBFloat16: return launch_from<__nv_bfloat16>(p, plan, tables, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace fusebackend::resample_backward
