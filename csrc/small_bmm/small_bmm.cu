// A block copies some products' operands to shared memory, as they lie in memory but for a gap behind each row. Then a group of threads computes
// each product: a thread has rows that are `row_groups` apart, so that neighbours read neighbouring rows, and one column or four beside one
// another. So the result is written in whole lines, and memory is read and written once.
#include "common/convert.cuh"
#include "common/cuda_common.cuh"
#include "small_bmm/small_bmm.h"

namespace fusebackend::small_bmm {
namespace {

struct Args {
  const void *a, *b;
  void* out;
  int64_t batch;
  int m, n, k, products, threads_a_product, row_groups;
  Placement a_place, b_place;
  int a_rows, b_rows, a_row, b_row;  // rows as they lie in memory, and their lengths
  FastDiv by_a_row, by_b_row, by_group, by_column_groups;
};

// `rows` rows of matrices that follow one another, to shared memory.
template <typename T, int kN>
__device__ __forceinline__ void copy_rows(T* to, const T* from, int rows, int length, const Placement& at, const FastDiv& by_length) {
  const int count = rows * length / kN;
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const uint32_t element = uint32_t(i) * kN;
    uint32_t row, column;
    by_length.divmod(element, row, column);
    T* const place = to + row * at.pitch + (column ^ (row >> at.shift & at.swizzle) * 4);
    if constexpr (kN * sizeof(T) == 16) cp_async_16(place, from + element);
    else if constexpr (kN * sizeof(T) == 8) cp_async_8(place, from + element);
    else *place = from[element];
  }
}

// Four consecutive elements of shared memory.
template <typename T>
__device__ __forceinline__ float4 read_four(const T* from) {
  if constexpr (sizeof(T) == 4) {
    return *reinterpret_cast<const float4*>(from);
  } else {
    const Vec<T, 4> x = *reinterpret_cast<const Vec<T, 4>*>(from);
    return {widen(x.v[0]), widen(x.v[1]), widen(x.v[2]), widen(x.v[3])};
  }
}

// Whether four terms are added first and then their sum, which rounds large numbers less often. It takes another addition, for which threads
// with more rows have no time left; and where the result is rounded to 16 bits, the order of additions makes no difference to it.
template <typename T, int kRows>
constexpr bool kByFours = sizeof(T) == 4 && kRows == 2;

__device__ __forceinline__ float part(const float4& x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }

template <typename T, bool kVectors, int kRows, bool kATransposed, bool kBTransposed>
__global__ void __launch_bounds__(kThreads) small_products(const Args p) {
  extern __shared__ __align__(16) char shared[];
  constexpr int kN = kVectors ? 4 : 1;
  T* const a_shared = reinterpret_cast<T*>(shared);
  T* const b_shared = a_shared + p.products * p.a_rows * p.a_place.pitch;
  const int64_t first = int64_t(blockIdx.x) * p.products;
  const int count = int(min(int64_t(p.products), p.batch - first));
  copy_rows<T, kN>(a_shared, static_cast<const T*>(p.a) + first * p.m * p.k, count * p.a_rows, p.a_row, p.a_place, p.by_a_row);
  copy_rows<T, kN>(b_shared, static_cast<const T*>(p.b) + first * p.k * p.n, count * p.b_rows, p.b_row, p.b_place, p.by_b_row);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();

  uint32_t product, own;
  p.by_group.divmod(threadIdx.x, product, own);
  const int step = max(kThreads / p.threads_a_product, 1);
  if (int(product) >= step) return;  // threads that are left over
  // Groups larger than a block take several turns.
  for (; int(product) < count; product += step) {
    for (int place = own; place < p.threads_a_product; place += kThreads) {
      uint32_t row, column;  // neighbours beside one another
      p.by_column_groups.divmod(place, row, column);
      column *= kN;
      const int a_first = product * p.a_rows, b_first = product * p.b_rows;  // rows in shared memory
      const T* const a = a_shared + a_first * p.a_place.pitch;
      const T* const b = b_shared + b_first * p.b_place.pitch;
      const int b_swizzle = ((b_first + column) >> p.b_place.shift & p.b_place.swizzle) * 4;  // of the four rows that are columns
      int rows[kRows], a_swizzle[kRows];
      float sum[kRows][kN] = {};
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        rows[i] = min(int(row) + i * p.row_groups, p.m - 1);
        a_swizzle[i] = ((a_first + rows[i]) >> p.a_place.shift & p.a_place.swizzle) * 4;
      }
      if constexpr (kVectors) {
        for (int k = 0; k < p.k; k += 4) {
          float4 x[kRows], y[4];  // x[row]: four terms, or for a transposed a x[row] gathered from four of its rows; y[term]: four columns
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
            if constexpr (kATransposed) {
              const T* const from = a + k * p.a_place.pitch + rows[i];
              x[i] = {widen(from[0]), widen(from[p.a_place.pitch]), widen(from[2 * p.a_place.pitch]), widen(from[3 * p.a_place.pitch])};
            } else {
              x[i] = read_four(a + rows[i] * p.a_place.pitch + (k ^ a_swizzle[i]));
            }
          }
#pragma unroll
          for (int j = 0; j < 4; ++j) y[j] = read_four(kBTransposed ? b + (column + j) * p.b_place.pitch + (k ^ b_swizzle) : b + (k + j) * p.b_place.pitch + column);
          const auto factor = [&](int t, int j) { return kBTransposed ? part(y[j], t) : part(y[t], j); };
          if constexpr (kByFours<T, kRows>) {
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
#pragma unroll
              for (int j = 0; j < kN; ++j) {
                float four = x[i].x * factor(0, j);
#pragma unroll
                for (int t = 1; t < 4; ++t) four = fmaf(part(x[i], t), factor(t, j), four);
                sum[i][j] += four;
              }
            }
          } else {
#pragma unroll
            for (int t = 0; t < 4; ++t) {
#pragma unroll
              for (int i = 0; i < kRows; ++i) {
#pragma unroll
                for (int j = 0; j < kN; ++j) sum[i][j] = fmaf(part(x[i], t), factor(t, j), sum[i][j]);
              }
            }
          }
        }
      } else {
        for (int begin = 0, end = (p.k + 1) / 2; begin < p.k; begin = end, end = p.k) {  // both halves of the terms
          float half[kRows] = {};
          for (int k = begin; k < end; ++k) {
            const float y = widen(kBTransposed ? b[column * p.b_place.pitch + k] : b[k * p.b_place.pitch + column]);
#pragma unroll
            for (int i = 0; i < kRows; ++i)
              half[i] = fmaf(widen(kATransposed ? a[k * p.a_place.pitch + rows[i]] : a[rows[i] * p.a_place.pitch + k]), y, half[i]);
          }
#pragma unroll
          for (int i = 0; i < kRows; ++i) sum[i][0] += half[i];
        }
      }
      T* const out = static_cast<T*>(p.out) + (first + product) * p.m * p.n + column;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (int(row) + i * p.row_groups >= p.m) break;
        Vec<T, kN> result;
#pragma unroll
        for (int j = 0; j < kN; ++j) narrow(sum[i][j], result.v[j]);
        *reinterpret_cast<Vec<T, kN>*>(out + int64_t(rows[i]) * p.n) = result;
      }
    }
  }
}

template <typename T, bool kVectors, int kRows>
cudaError_t launch_rows(const Problem& p, const Plan& plan, const Args& args, cudaStream_t stream) {
  const auto run = [&](auto kernel) {
    kernel<<<uint32_t(plan.blocks), kThreads, plan.shared_bytes, stream>>>(args);
    return cudaGetLastError();
  };
  if (p.a_transposed) return p.b_transposed ? run(small_products<T, kVectors, kRows, true, true>) : run(small_products<T, kVectors, kRows, true, false>);
  return p.b_transposed ? run(small_products<T, kVectors, kRows, false, true>) : run(small_products<T, kVectors, kRows, false, false>);
}

template <typename T>
cudaError_t launch_type(const Problem& p, const Plan& plan, cudaStream_t stream) {
  if (plan.blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  Args args{};
  args.a = p.a, args.b = p.b, args.out = p.out, args.batch = p.batch;
  args.m = p.m, args.n = p.n, args.k = p.k, args.products = plan.products, args.threads_a_product = plan.threads_a_product;
  args.row_groups = (p.m + plan.row_tile - 1) / plan.row_tile;
  args.a_place = plan.a, args.b_place = plan.b;
  args.a_rows = p.a_transposed ? p.k : p.m, args.a_row = p.a_transposed ? p.m : p.k;
  args.b_rows = p.b_transposed ? p.n : p.k, args.b_row = p.b_transposed ? p.k : p.n;
  args.by_a_row = FastDiv(args.a_row), args.by_b_row = FastDiv(args.b_row);
  args.by_group = FastDiv(plan.threads_a_product), args.by_column_groups = FastDiv(plan.vectors ? p.n / 4 : p.n);
  if (!plan.vectors) return launch_rows<T, false, 2>(p, plan, args, stream);
  return plan.row_tile == 4 ? launch_rows<T, true, 4>(p, plan, args, stream) : launch_rows<T, true, 2>(p, plan, args, stream);
}

}  // namespace

cudaError_t launch(const Problem& p, const Plan& plan, cudaStream_t stream) {
  switch (p.dtype) {
    case DType::kFloat32: return launch_type<float>(p, plan, stream);
    case DType::kFloat16: return launch_type<__half>(p, plan, stream);
    case DType::kBFloat16: return launch_type<__nv_bfloat16>(p, plan, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace fusebackend::small_bmm
