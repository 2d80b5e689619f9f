// Each element of the result is the sum of the gradients of those windows whose largest element it was. A thread looks at the windows that hold its
// elements, reads what is kept of each, and adds the gradients of those that name its elements: without atomic additions, or zeros before them, and
// always in the same order.
#include "max_pool_backward/max_pool_backward.h"

#include <algorithm>
#include <type_traits>

#include "common/convert.cuh"
#include "common/cuda_common.cuh"
#include "common/places.cuh"
#include "common/programmatic_launch.cuh"

namespace fusebackend::max_pool_backward {
namespace {

struct Windows {
  int size, count;  // elements of the result, and windows
  int kernel, stride, padding, dilation;
  FastDiv by_size, by_stride, by_dilation;
  int64_t out_stride, grad_stride, offset_stride;
};

struct Arguments {
  const void* grad;
  const int8_t* offsets;
  void* out;
  Windows axis[kMostAxes];
  Dim dims[kMostDims];  // without the lanes
  FastDiv by_dim[kMostDims], by_vectors, by_row_threads;
  int count;
  int64_t rows;
  int64_t vectors, lanes;  // of a row, and of those along the lanes
  int row_threads, block_rows, kept;
};

// The windows that may hold the elements from `first` to `last`.
struct Range {
  int begin, end;
};
__device__ __forceinline__ Range range_of(const Windows& a, int first, int last) {
  const int behind = first + a.padding - (a.kernel - 1) * a.dilation;  // where the first window that holds `first` begins, counted from the padding's start
  const int begin = behind <= 0 ? 0 : int(a.by_stride.div(uint32_t(behind + a.stride - 1)));
  return {begin, min(int(a.by_stride.div(uint32_t(last + a.padding))) + 1, a.count)};
}

// Which of the window's elements along an axis the element `i` is; -1 if it stands between them.
__device__ __forceinline__ int place_in(const Windows& a, int window, int i) {
  const uint32_t distance = uint32_t(i + a.padding - window * a.stride), place = a.by_dilation.div(distance);
  return place * a.dilation == distance ? int(place) : -1;
}

// The windows along the two outer axes that hold the elements (i, j): calls function(where the gradient lies, where the offsets lie, the offset of
// the window's row that they are in).
template <typename Function>
__device__ __forceinline__ void for_each_row(const Arguments& p, int i, int j, const Function& function) {
  const Windows &outer = p.axis[0], &middle = p.axis[1];
  const Range a = range_of(outer, i, i), b = range_of(middle, j, j);
  for (int x = a.begin; x < a.end; ++x) {
    const int m = place_in(outer, x, i);
    if (m < 0) continue;
    for (int y = b.begin; y < b.end; ++y) {
      const int n = place_in(middle, y, j);
      if (n < 0) continue;
      function(x * outer.grad_stride + y * middle.grad_stride, x * outer.offset_stride + y * middle.offset_stride,
               (m * middle.kernel + n) * p.axis[2].kernel);
    }
  }
}

// A block's rows, from `first` on, in shared memory. Ends with a barrier.
struct Rows {
  const Row* rows;
  const WindowRow* windows;  // `kept` of each row
  int count;
};
__device__ __forceinline__ Rows find_rows(const Arguments& p, char* shared) {
  Row* const rows = reinterpret_cast<Row*>(shared);
  WindowRow* const windows = reinterpret_cast<WindowRow*>(rows + p.block_rows);
  const int64_t first = int64_t(blockIdx.x) * p.block_rows;
  const int count = int(min(int64_t(p.block_rows), p.rows - first));
  const bool is_small = p.rows <= INT32_MAX;
  for (int r = threadIdx.x; r < count; r += blockDim.x) {
    int64_t left = first + r;
    const int j = int(take(left, is_small, p.axis[1].by_size, p.axis[1].size)), i = int(take(left, is_small, p.axis[0].by_size, p.axis[0].size));
    int64_t out = i * p.axis[0].out_stride + j * p.axis[1].out_stride, grad = 0, offset = 0;
#pragma unroll 1
    for (int d = p.count - 1; d >= 0; --d) {
      const int64_t n = take(left, is_small, p.by_dim[d], p.dims[d].size);
      out += n * p.dims[d].out_stride, grad += n * p.dims[d].grad_stride, offset += n * p.dims[d].offset_stride;
    }
    int found = 0;
    if (p.kept > 0) {
      for_each_row(p, i, j, [&](int64_t grad_row, int64_t offset_row, int row) {
        windows[r * p.kept + found++] = {grad + grad_row, offset + offset_row, row};
      });
    }
    rows[r] = {out, grad, offset, i, j, found, 0};
  }
  __syncthreads();
  return {rows, windows, count};
}

// Calls function(where the gradient lies, where the offsets lie, the offset of the windows' row) for each row of windows that hold a row's elements.
template <typename Function>
__device__ __forceinline__ void for_each_window_row(const Arguments& p, const Rows& of, int r, const Function& function) {
  const Row& row = of.rows[r];
  if (p.kept > 0) {
    for (int k = 0; k < row.count; ++k) {
      const WindowRow& windows = of.windows[r * p.kept + k];
      function(windows.grad, windows.offset, int(windows.first));
    }
  } else {
    for_each_row(p, row.i, row.j, [&](int64_t grad_row, int64_t offset_row, int first) { function(row.grad + grad_row, row.offset + offset_row, first); });
  }
}

// Which of a block's rows a thread begins with, and which vector of each of its rows is its own.
struct Item {
  int row, step;
  int64_t vector;
  bool is_there;
};
__device__ __forceinline__ Item item_of(const Arguments& p) {
  const int row = int(p.by_row_threads.div(threadIdx.x)), at_once = int(p.by_row_threads.div(blockDim.x));
  const int64_t vector = int64_t(blockIdx.y) * p.row_threads + int(threadIdx.x) - row * p.row_threads;
  return {row, at_once, vector, row < at_once && vector < p.vectors};
}

// The offsets of N neighbours, four in a word where they are vectors: one is compared by one instruction then, instead of three.
template <int kN>
struct Offsets {
  using Word = std::conditional_t<kN % 4 == 0, uint32_t, int8_t>;
  static constexpr int kOfWord = kN % 4 == 0 ? 4 : 1;
  Vec<Word, kN / kOfWord> words;

  __device__ __forceinline__ explicit Offsets(const int8_t* from) : words(*reinterpret_cast<const Vec<Word, kN / kOfWord>*>(from)) {}
  Offsets() = default;
  __device__ __forceinline__ bool is(int n, int wanted) const {
    if constexpr (kOfWord == 1) return words.v[n] == wanted;
    return ((words.v[n / 4] ^ uint32_t(wanted) * 0x01010101u) & 0xffu << n % 4 * 8) == 0;
  }
};

// Adds those elements of `x` whose offset is `wanted`.
template <typename T, int kN, typename Acc>
__device__ __forceinline__ void add_where(const Offsets<kN>& offsets, int wanted, const Vec<T, kN>& x, Vec<Acc, kN>& sum) {
#pragma unroll
  for (int n = 0; n < kN; ++n)
    if (offsets.is(n, wanted)) sum.v[n] += widen(x.v[n]);
}

constexpr int kBlocks = 4;  // of a multiprocessor: a thread may have 64 registers then

// N neighbours along the lanes, of each of two neighbours along a row: these mostly stand in the same windows.
template <typename T, int kN, bool kDilated>
__global__ void __launch_bounds__(kThreads, kBlocks) max_pool_backward_lanes(const __grid_constant__ Arguments p) {
  using Acc = AccumulatorOf<T>;
  extern __shared__ __align__(16) char shared[];
  const Rows rows = find_rows(p, shared);
  const Item item = item_of(p);
  if (!item.is_there) return;
  const Windows& last = p.axis[2];
  for (int64_t vector = item.vector; vector < p.vectors; vector += int64_t(gridDim.y) * p.row_threads) {
    int64_t left = vector;
    const int64_t lane = take(left, p.vectors <= INT32_MAX, p.by_vectors, p.lanes);
    const int k = int(left) * kPixels;
    const Range columns = range_of(last, k, min(k + kPixels, last.size) - 1);
    const int64_t grad_first = columns.begin * last.grad_stride + lane * kN, offset_first = columns.begin * last.offset_stride + lane * kN;
    const int distance = k + last.padding - columns.begin * last.stride, count = columns.end - columns.begin;
    T* const out = static_cast<T*>(p.out) + k * last.out_stride + lane * kN;
    wait_for_previous_kernel();
    for (int r = item.row; r < rows.count; r += item.step) {
      Vec<Acc, kN> sum[kPixels] = {};
      for_each_window_row(p, rows, r, [&](int64_t grad_row, int64_t offset_row, int first) {
        const T* grad = static_cast<const T*>(p.grad) + grad_row + grad_first;
        const int8_t* offsets = p.offsets + offset_row + offset_first;
        int place = distance;  // of the first pixel in the window
#pragma unroll 1
        for (int z = 0; z < count; ++z, place -= last.stride, grad += last.grad_stride, offsets += last.offset_stride) {
          const Vec<T, kN> x = *reinterpret_cast<const Vec<T, kN>*>(grad);
          const Offsets<kN> found(offsets);
#pragma unroll
          for (int q = 0; q < kPixels; ++q) {
            uint32_t own = uint32_t(place + q);
            if constexpr (kDilated) {
              const bool is_there = place + q >= 0;
              const uint32_t quotient = is_there ? last.by_dilation.div(own) : 0;
              own = is_there && quotient * last.dilation == own ? quotient : UINT32_MAX;
            }
            if (own < uint32_t(last.kernel)) add_where(found, first + int(own), x, sum[q]);
          }
        }
      });
      T* const to = out + rows.rows[r].out;
#pragma unroll
      for (int q = 0; q < kPixels; ++q) {
        if (k + q >= last.size) break;
        Vec<T, kN> result;
#pragma unroll
        for (int n = 0; n < kN; ++n) narrow(sum[q].v[n], result.v[n]);
        store_vector_to_global(to + q * last.out_stride, result);
      }
    }
  }
}

// N neighbours along a row. With a stride and a kernel that are known, and without dilation, window `t`, counted from that which begins with the
// first of them or before it, has its element c at result t * stride + c - kRest, where kRest is by how much it begins before.
template <typename T, int kN, int kKernel, int kStride, int kRest>
__global__ void __launch_bounds__(kThreads) max_pool_backward_rows(const __grid_constant__ Arguments p) {
  using Acc = AccumulatorOf<T>;
  extern __shared__ __align__(16) char shared[];
  const Rows rows = find_rows(p, shared);
  const Item item = item_of(p);
  if (!item.is_there) return;
  const Windows& last = p.axis[2];
  const bool is_aligned = last.size % kN == 0;  // then all rows begin at a multiple of a vector
  for (int64_t vector = item.vector; vector < p.vectors; vector += int64_t(gridDim.y) * p.row_threads) {
    const int column = int(vector) * kN, size = last.size - column;
    T* const out = static_cast<T*>(p.out) + column * last.out_stride;
    wait_for_previous_kernel();
    for (int r = item.row; r < rows.count; r += item.step) {
      Vec<Acc, kN> sum{};
      if constexpr (kKernel > 0) {
        constexpr int kBefore = (kKernel - 1 - kRest) / kStride, kWindows = kBefore + (kN - 1 + kRest) / kStride + 1;
        const int start = (column + last.padding - kRest) / kStride - kBefore;
        for_each_window_row(p, rows, r, [&](int64_t grad_row, int64_t offset_row, int first) {
          const T* const grad = static_cast<const T*>(p.grad) + grad_row + start;  // their strides along the row are 1
          const int8_t* const offsets = p.offsets + offset_row + start;
          T x[kWindows];
          int place[kWindows];
#pragma unroll
          for (int t = 0; t < kWindows; ++t) {
            const bool is_there = start + t >= 0 && start + t < last.count;
            place[t] = is_there ? offsets[t] - first : -1;
            if (is_there) x[t] = grad[t];
          }
#pragma unroll
          for (int t = 0; t < kWindows; ++t) {
#pragma unroll
            for (int c = 0; c < kKernel; ++c) {
              const int n = (t - kBefore) * kStride + c - kRest;
              if (n >= 0 && n < kN && place[t] == c) sum.v[n] += widen(x[t]);
            }
          }
        });
      } else {
        const Range columns = range_of(last, column, min(column + kN, last.size) - 1);
        for_each_window_row(p, rows, r, [&](int64_t grad_row, int64_t offset_row, int first) {
          for (int z = columns.begin; z < columns.end; ++z) {
            const int place = p.offsets[offset_row + z * last.offset_stride] - first;
            if (place < 0 || place >= last.kernel) continue;
            const int found = z * last.stride - last.padding + place * last.dilation - column;
            const Acc x = widen(static_cast<const T*>(p.grad)[grad_row + z * last.grad_stride]);
#pragma unroll
            for (int n = 0; n < kN; ++n)
              if (n == found) sum.v[n] += x;
          }
        });
      }
      Vec<T, kN> result;
#pragma unroll
      for (int n = 0; n < kN; ++n) narrow(sum.v[n], result.v[n]);
      T* const to = out + rows.rows[r].out;
      if (is_aligned) {
        store_vector_to_global(to, result);
      } else {
#pragma unroll
        for (int n = 0; n < kN; ++n)
          if (n < size) to[n] = result.v[n];
      }
    }
  }
}

// The kernel of rows for the last axis: compiled for its windows, if they are frequent ones and lie side by side.
template <typename T, int kN>
auto* rows_kernel(const Windows& last) {
  auto* found = &max_pool_backward_rows<T, kN, 0, 0, 0>;
  if constexpr (kN > 1) {
    const auto is = [&](int kernel, int stride, int rest) { return last.kernel == kernel && last.stride == stride && last.padding % stride == rest; };
    if (last.dilation == 1 && last.grad_stride == 1 && last.offset_stride == 1) {
      if (is(2, 2, 0)) found = &max_pool_backward_rows<T, kN, 2, 2, 0>;
      if (is(3, 2, 0)) found = &max_pool_backward_rows<T, kN, 3, 2, 0>;
      if (is(3, 2, 1)) found = &max_pool_backward_rows<T, kN, 3, 2, 1>;
      if (is(3, 1, 0)) found = &max_pool_backward_rows<T, kN, 3, 1, 0>;
      if (is(5, 1, 0)) found = &max_pool_backward_rows<T, kN, 5, 1, 0>;
    }
  }
  return found;
}

template <typename T, int kN>
auto* lanes_kernel(const Windows& last) {
  return last.dilation == 1 ? &max_pool_backward_lanes<T, kN, false> : &max_pool_backward_lanes<T, kN, true>;
}

template <typename T>
cudaError_t launch_all(const Problem& p, const Plan& plan, cudaStream_t stream) {
  constexpr int kN = 16 / int(sizeof(T));
  const bool has_lanes = plan.form == Form::kLanes;
  Arguments a{};
  a.grad = p.grad, a.offsets = p.offsets, a.out = p.out;
  a.rows = plan.rows, a.vectors = plan.vectors, a.lanes = plan.lane < 0 ? 1 : p.dims[plan.lane].size / plan.vector;
  a.row_threads = plan.row_threads, a.block_rows = plan.block_rows, a.kept = plan.kept;
  a.by_row_threads = FastDiv(uint32_t(plan.row_threads));
  if (plan.vectors <= INT32_MAX) a.by_vectors = FastDiv(uint32_t(a.lanes));
  for (int k = 0; k < kMostAxes; ++k) {
    const Axis& from = p.axis[k];
    a.axis[k] = {int(from.size), int(from.windows), from.kernel, from.stride, from.padding, from.dilation, FastDiv(uint32_t(from.size)),
                 FastDiv(uint32_t(from.stride)), FastDiv(uint32_t(from.dilation)), from.out_stride, from.grad_stride, from.offset_stride};
  }
  for (int d = 0; d < p.count; ++d) {
    if (d == plan.lane) continue;
    if (plan.rows <= INT32_MAX) a.by_dim[a.count] = FastDiv(uint32_t(p.dims[d].size));
    a.dims[a.count++] = p.dims[d];
  }
  const int64_t blocks = ceil_div(plan.rows, plan.block_rows);
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  const int threads = plan.row_threads * std::min(kThreads / plan.row_threads, plan.block_rows);
  const auto run = [&](auto* kernel) {
    return launch_dependent(kernel, dim3(uint32_t(blocks), uint32_t(plan.row_blocks)), dim3(uint32_t(threads)), size_t(plan.shared_bytes), true, stream, a);
  };
  const Windows& last = a.axis[2];
  if (has_lanes) return plan.vector > 1 ? run(lanes_kernel<T, kN>(last)) : run(lanes_kernel<T, 1>(last));
  if (plan.vector == kN) return run(rows_kernel<T, kN>(last));
  if constexpr (kN >= 4) {
    if (plan.vector == kN / 2) return run(rows_kernel<T, kN / 2>(last));
  }
  if constexpr (kN >= 8) {
    if (plan.vector == kN / 4) return run(rows_kernel<T, kN / 4>(last));
  }
  return run(rows_kernel<T, 1>(last));
}

}  // namespace

cudaError_t launch(const Problem& p, const Plan& plan, cudaStream_t stream) {
  switch (p.dtype) {
    case DType::kFloat64: return launch_all<double>(p, plan, stream);
    case DType::kFloat32: return launch_all<float>(p, plan, stream);
    case DType::kFloat16: return launch_all<__half>(p, plan, stream);
    case DType::kBFloat16: return launch_all<__nv_bfloat16>(p, plan, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace fusebackend::max_pool_backward
