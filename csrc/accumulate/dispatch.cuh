// From run-time dtype, width and shape to a kernel instance and its grid.
#pragma once

#include <algorithm>

#include "scatter.cuh"

namespace fusebackend::accumulate {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <typename F>
cudaError_t dispatch(DType t, F&& f) {
  switch (t) {
    case DType::kFloat64: return f(double());
    case DType::kFloat32: return f(float());
    case DType::kFloat16: return f(__half());
    case DType::kBFloat16: return f(__nv_bfloat16());
    case DType::kInt64: return f(int64_t());
    case DType::kInt32: return f(int32_t());
    case DType::kInt16: return f(int16_t());
    case DType::kInt8: return f(int8_t());
    case DType::kUInt8: return f(uint8_t());
  }
  return cudaErrorInvalidValue;
}

// Widths, in elements, that a thread may move at once: 16 bytes, a pair of 16-bit elements, one element.
template <typename T>
constexpr int kWide = sizeof(T) >= 2 ? 16 / int(sizeof(T)) : 1;

// The widest that alignment allows along the last slice dimension in the source, and in out if it is written directly.
inline int vector_width(const Params& p, bool out_too) {
  const int size = element_size(p.dtype);
  const SliceDim& last = p.dims[p.n_dims - 1];
  auto fits = [&](int v) {
    const int bytes = v * size;
    auto aligned = [&](const void* base, int64_t row_stride) {
      return reinterpret_cast<uintptr_t>(base) % bytes == 0 && row_stride * size % bytes == 0;
    };
    if (last.size % v || last.source_stride != 1 || !aligned(p.source, p.source_row_stride)) return false;
    if (out_too && (last.out_stride != 1 || !aligned(p.out, p.out_row_stride))) return false;
    for (int d = 0; d + 1 < p.n_dims; ++d)
      if (p.dims[d].source_stride * size % bytes || (out_too && p.dims[d].out_stride * size % bytes)) return false;
    return true;
  };
  if (size == 1) return 1;
  if (fits(16 / size)) return 16 / size;
  return is_half(p.dtype) && fits(2) ? 2 : 1;
}

// About `target_blocks` blocks that share the work evenly: as few tiles each as fit, all of one size.
inline Walk plan_walk(const Params& p, int v, int64_t target_blocks, int max_tile, bool may_interleave) {
  Walk w;
  w.columns = p.columns() / v;
  w.column_blocks = int(ceil_div(w.columns, kThreads));
  w.block_columns = int(ceil_div(w.columns, w.column_blocks));
  w.groups = kThreads / w.block_columns;
  const int64_t blocks = std::max<int64_t>(target_blocks / w.column_blocks, 1), most = std::max(max_tile / w.groups, 1);
  const int64_t tiles_each = ceil_div(p.n, blocks * w.groups * most);
  w.per_group = int(ceil_div(p.n, blocks * w.groups * tiles_each));
  w.tiles = ceil_div(p.n, w.groups * w.per_group);
  w.row_blocks = ceil_div(w.tiles, tiles_each);
  w.interleave = may_interleave && p.dims[p.n_dims - 1].size * element_size(p.dtype) < 128;
  return w;
}

// Dynamic shared memory: what a launch wants, and the most that any may.
struct SharedMemory {
  int bytes = 0, most = 0;
};

template <typename T, typename Out, int V, int U, Flush kFlush>
cudaError_t launch_instance(const Args<Out>& a, SharedMemory shared, cudaStream_t stream) {
  const auto kernel = scatter_kernel<T, Out, V, U, kFlush>;
  static SharedMemoryOptIn opt_in;
  if (shared.bytes > 32 * 1024)  // beside the staged tile
    if (cudaError_t error = opt_in.ensure(kernel, shared.most); error != cudaSuccess) return error;
  kernel<<<unsigned(a.walk.row_blocks * a.walk.column_blocks), kThreads, shared.bytes, stream>>>(a);
  return cudaGetLastError();
}

// V as chosen by vector_width; four 16-byte loads or eight narrower ones in flight a thread.
template <typename T, typename Out, Flush kFlush>
cudaError_t launch_walk(const Args<Out>& a, int v, cudaStream_t stream, SharedMemory shared = {}) {
  constexpr int kUnroll = kFlush == Flush::kTable ? 8 : kFlush == Flush::kOwn && sizeof(T) == 2 ? 2 : 4;
  if constexpr (sizeof(T) > 1)
    if (v == kWide<T>) return launch_instance<T, Out, kWide<T>, kUnroll, kFlush>(a, shared, stream);
  if constexpr (kFlush == Flush::kTable && (sizeof(T) == 2 || sizeof(T) == 4))
    if (v == kWide<T> / 2) return launch_instance<T, Out, kWide<T> / 2, 8, kFlush>(a, shared, stream);
  if constexpr (sizeof(T) == 2)
    if (v == 2) return launch_instance<T, Out, 2, 8, kFlush>(a, shared, stream);
  return launch_instance<T, Out, 1, kFlush == Flush::kTable ? 16 : 8, kFlush>(a, shared, stream);
}

}  // namespace fusebackend::accumulate
