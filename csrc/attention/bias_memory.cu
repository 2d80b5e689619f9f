// Copies of biases in which rows can be read in vectors, and the second step of their gradients' sums.
#include "attention/fragments.cuh"
#include "attention/launchers.h"
#include "common/programmatic_launch.cuh"

namespace fusebackend::attention {
namespace {

constexpr int kThreads = 256;

constexpr int kVectorBytes = 16;

// An aligned vector, of which nothing behind `end` is read.
template <typename E>
__device__ __forceinline__ uint4 load_up_to(const uint4* from, const char* end) {
  if (reinterpret_cast<const char*>(from + 1) <= end) return __ldcs(from);
  constexpr int kElements = kVectorBytes / sizeof(E);
  union {
    E elements[kElements];
    uint4 vector;
  } read{};
#pragma unroll
  for (int e = 0; e < kElements; ++e) {
    const E* const element = reinterpret_cast<const E*>(from) + e;
    if (reinterpret_cast<const char*>(element + 1) <= end) read.elements[e] = *element;
  }
  return read.vector;
}

// 16 bytes that begin at any element, of which `bytes` are the row's: zeros take the place of the others. They are read as the aligned vectors
// in which they lie, and so is what lies beside the row there, but nothing behind `end`, the tensor's.
template <typename E>
__device__ __forceinline__ uint4 load_anywhere(const char* from, int bytes, const char* end) {
  const int offset = int(reinterpret_cast<uintptr_t>(from) % kVectorBytes);
  const uint4* const aligned = reinterpret_cast<const uint4*>(from - offset);
  const uint4 low = load_up_to<E>(aligned, end), high = offset + bytes > kVectorBytes ? load_up_to<E>(aligned + 1, end) : uint4{};
  uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  if (offset & 8) {
#pragma unroll
    for (int w = 0; w < 6; ++w) words[w] = words[w + 2];
  }
  if (offset & 4) {
#pragma unroll
    for (int w = 0; w < 5; ++w) words[w] = words[w + 1];
  }
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    if constexpr (sizeof(E) < 4) words[w] = __funnelshift_r(words[w], words[w + 1], offset % 4 * 8);
    const int kept = bytes - 4 * w;
    if (kept < 4) words[w] &= kept > 0 ? (1u << 8 * kept) - 1 : 0u;
  }
  return {words[0], words[1], words[2], words[3]};
}

// A warp copies up to 32 rows: each of its threads finds out where one of them begins, which takes divisions. Of rows whose elements are adjacent
// a thread copies 16 bytes at once, whichever row they are of.
template <typename E, bool kAdjacent>
__global__ __launch_bounds__(kThreads) void attention_align_bias(const __grid_constant__ BiasCopy copy, int rows_of_warp, FastDiv vectors) {
  const int64_t rows = copy.size[0] * copy.size[1] * copy.size[2] * copy.size[3];
  const int lane = threadIdx.x % 32;
  const int64_t first = (blockIdx.x * int64_t(kThreads / 32) + threadIdx.x / 32) * rows_of_warp;
  if (first >= rows) return;
  int64_t rest = first + lane, begins = 0;
#pragma unroll
  for (int d = 3; d >= 0; --d) {
    begins += rest % copy.size[d] * copy.stride[d];
    rest /= copy.size[d];
  }
  const int count = int(rows - first < rows_of_warp ? rows - first : rows_of_warp);
  const E* const from = static_cast<const E*>(copy.from);
  E* const to = static_cast<E*>(copy.to) + first * copy.pitch;
  if constexpr (kAdjacent) {
    constexpr int kElements = kVectorBytes / sizeof(E);
    const int length = int(copy.size[4]);
    int64_t last = length;
#pragma unroll
    for (int d = 0; d < 4; ++d) last += (copy.size[d] - 1) * copy.stride[d];
    const char* const end = reinterpret_cast<const char*>(from + last);
#pragma unroll 4
    for (int i = 0; i < count * int(vectors.d); i += 32) {
      const int row = int(vectors.div(uint32_t(i + lane))), column = (i + lane - row * int(vectors.d)) * kElements;
      const int64_t begin = __shfl_sync(0xffffffff, begins, row % 32);
      if (row >= count) continue;
      uint4 vector{};
      if (column < length) {
        const int bytes = min(length - column, kElements) * int(sizeof(E));
        vector = load_anywhere<E>(reinterpret_cast<const char*>(from + begin + column), bytes, end);
      }
      reinterpret_cast<uint4*>(to)[i + lane] = vector;
    }
  } else {
    for (int row = 0; row < count; ++row) {
      const E* const begin = from + __shfl_sync(0xffffffff, begins, row);
#pragma unroll 4
      for (int64_t s = lane; s < copy.pitch; s += 32) to[row * copy.pitch + s] = s < copy.size[4] ? begin[s * copy.stride[4]] : E{};
    }
  }
}

template <typename E>
cudaError_t align_bias(const BiasCopy& copy, cudaStream_t stream) {
  constexpr int64_t kEnough = 1 << 14;  // warps, for any GPU
  const int64_t rows = copy.size[0] * copy.size[1] * copy.size[2] * copy.size[3];
  const bool is_adjacent = copy.stride[4] == 1 && copy.pitch <= INT32_MAX / 64;
  const int rows_of_warp = int(std::clamp<int64_t>(rows / kEnough, 1, 32));
  const int64_t blocks = ceil_div(rows, int64_t(kThreads / 32) * rows_of_warp);
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  const auto kernel = is_adjacent ? attention_align_bias<E, true> : attention_align_bias<E, false>;
  const FastDiv vectors(is_adjacent ? uint32_t(copy.pitch * int64_t(sizeof(E)) / kVectorBytes) : 1);
  kernel<<<unsigned(blocks), kThreads, 0, stream>>>(copy, rows_of_warp, vectors);
  return cudaGetLastError();
}

// Sums of matrices (outer, parts, inner) over their parts: elements that are adjacent in memory stay adjacent.
struct MatrixSums {
  const float* from;
  void* to;
  int64_t outer, parts, inner;
};

// An element of a partial sum, or four that are loaded and stored at once.
template <int kVector>
struct Elements {
  float x[kVector];
  __device__ __forceinline__ void load(const float* from) {
    if constexpr (kVector == 4) {
      const float4 four = __ldcs(reinterpret_cast<const float4*>(from));
      x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
    } else {
      x[0] = __ldcs(from);
    }
  }
  __device__ __forceinline__ void add(const Elements& other) {
#pragma unroll
    for (int e = 0; e < kVector; ++e) x[e] += other.x[e];
  }
  template <typename T>
  __device__ __forceinline__ void store(T* to) const {
    struct alignas(sizeof(T) * kVector) Rounded {
      T x[kVector];
    } rounded;
#pragma unroll
    for (int e = 0; e < kVector; ++e) rounded.x[e] = T(x[e]);
    *reinterpret_cast<Rounded*>(to) = rounded;
  }
};

// Of each kVector elements kShares threads have a share of the parts each; their sums are added in the order of the shares.
template <typename T, int kVector, int kShares>
__global__ __launch_bounds__(kThreads) void attention_add_partial_sums(const MatrixSums p) {
  constexpr int kColumns = kThreads / kShares;  // vectors of a block
  wait_for_previous_kernel();
  const int share = threadIdx.x / kColumns, column = threadIdx.x % kColumns;
  const int64_t i = (blockIdx.x * int64_t(kColumns) + column) * kVector;
  const bool exists = i < p.outer * p.inner;
  Elements<kVector> sum = {};
  if (exists) {
    const int64_t outer = i / p.inner;
    const float* const from = p.from + outer * (p.parts - 1) * p.inner + i;
#pragma unroll 4
    for (int64_t part = share; part < p.parts; part += kShares) {
      Elements<kVector> next;
      next.load(from + part * p.inner);
      sum.add(next);
    }
  }
  if constexpr (kShares > 1) {
    __shared__ Elements<kVector> shares[kShares][kColumns];
    shares[share][column] = sum;
    __syncthreads();
    if (share > 0) return;
#pragma unroll
    for (int other = 1; other < kShares; ++other) sum.add(shares[other][column]);
  }
  if (exists) sum.store(static_cast<T*>(p.to) + i);
}

// A block adds up `length` adjacent elements of each of `chunks` matrices (T, S): a row, or all of them.
template <typename T>
__global__ __launch_bounds__(kThreads) void attention_add_partial_rows(const __grid_constant__ PartialSums p, int64_t length) {
  __shared__ float warps[kThreads / 32];
  wait_for_previous_kernel();
  const int64_t matrix = p.t * p.s, rows = matrix / length, kept = blockIdx.x / rows, row = blockIdx.x % rows;
  float sum = 0;
  for (int64_t chunk = 0; chunk < p.chunks; ++chunk) {
    const float* const from = p.from + (kept * p.chunks + chunk) * matrix + row * length;
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < length; i += kThreads) sum += __ldcs(from + i);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x > 0) return;
#pragma unroll
  for (int w = 1; w < kThreads / 32; ++w) sum += warps[w];
  static_cast<T*>(p.to)[blockIdx.x] = T(sum);
}

template <typename T, int kVector, int kShares>
cudaError_t add_matrices(const MatrixSums& p, cudaStream_t stream) {
  const int64_t blocks = ceil_div(p.outer * p.inner / kVector, int64_t(kThreads / kShares));
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  return launch_dependent(attention_add_partial_sums<T, kVector, kShares>, unsigned(blocks), kThreads, 0, true, stream, p);
}

// Threads that share an element: few parts leave them nothing to do, and many are read for long by one thread.
template <typename T, int kVector>
cudaError_t add_matrices(const MatrixSums& p, cudaStream_t stream) {
  if (p.parts < 8) return add_matrices<T, kVector, 1>(p, stream);
  return p.parts < 128 ? add_matrices<T, kVector, 8>(p, stream) : add_matrices<T, kVector, 32>(p, stream);
}

template <typename T>
cudaError_t add_partial_sums(const PartialSums& p, cudaStream_t stream) {
  if (p.sums_columns) {
    const int64_t blocks = p.kept * (p.sums_rows ? 1 : p.t);
    if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
    return launch_dependent(attention_add_partial_rows<T>, unsigned(blocks), kThreads, 0, true, stream, p, p.sums_rows ? p.t * p.s : p.s);
  }
  // Rows of the matrices of all chunks follow one another at the same distance.
  const MatrixSums sums = {p.from, p.to, p.kept, p.chunks * (p.sums_rows ? p.t : 1), (p.sums_rows ? 1 : p.t) * p.s};
  return sums.inner % 4 == 0 ? add_matrices<T, 4>(sums, stream) : add_matrices<T, 1>(sums, stream);
}

}  // namespace

cudaError_t launch_align_bias(const BiasCopy& copy, bool is_fp32, cudaStream_t stream) {
  return is_fp32 ? align_bias<float>(copy, stream) : align_bias<uint16_t>(copy, stream);
}

cudaError_t launch_add_partial_sums(const PartialSums& p, DType dtype, cudaStream_t stream) {
  if (dtype == DType::kFloat32) return add_partial_sums<float>(p, stream);
  return dtype == DType::kBFloat16 ? add_partial_sums<__nv_bfloat16>(p, stream) : add_partial_sums<__half>(p, stream);
}

}  // namespace fusebackend::attention
