// What the kernels over rows of matrices share: how the rows are given to them, loads, stores, and the layout of the kernel that follows.
#pragma once

#include "column_sum/column_sum.h"
#include "common/convert.cuh"
#include "common/cuda_common.cuh"

namespace fusebackend::column_sum {

// Blocks of a multiprocessor: a thread may then have 64 registers, or 128 where it adds in fp64, or more than x.
template <typename Acc, Form kForm = Form::kPlain>
inline constexpr int kBlocks = sizeof(Acc) == 8 || kForm != Form::kPlain ? 1 : 2;

struct Rows {
  const void* x;
  void* out;       // the result, or sums in the accumulator's type
  int64_t batch_stride, row_stride;  // in elements, of folded rows
  int64_t rows;    // full ones
  int64_t width, columns;
  int64_t tail;    // elements behind the last full row: fewer than a folded row has
  uint32_t tiles, splits;
  int tile_vectors, lanes;
  float divisor;   // 1, or the number of rows for a mean
  double wide_divisor;
  DType result;
  bool finished;   // no second kernel follows

  const void* y;   // of sums of products
  int64_t y_batch_stride, y_row_stride;
  void* second_out;
  float second_divisor;
  double wide_second_divisor;
  DType second_result;
  bool rounded;    // products, to the type of x
};

// Read once: past L1.
template <typename T, int kN>
__device__ __forceinline__ Vec<T, kN> load_once(const T* from) {
  constexpr int kBytes = sizeof(T) * kN;
  Vec<T, kN> found;
  if constexpr (kBytes == 16) {
    uint4 bits;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
                 : "l"(from));
    found = reinterpret_cast<const Vec<T, kN>&>(bits);
  } else {
    found = *reinterpret_cast<const Vec<T, kN>*>(from);
  }
  return found;
}

template <typename Acc>
__device__ __forceinline__ void store_result(void* out, int64_t i, Acc value, DType type) {
  switch (type) {
    case DType::kFloat64: static_cast<double*>(out)[i] = value; break;
    case DType::kFloat16: static_cast<__half*>(out)[i] = __float2half_rn(float(value)); break;
    case DType::kBFloat16: static_cast<__nv_bfloat16*>(out)[i] = __float2bfloat16_rn(float(value)); break;
    default: static_cast<float*>(out)[i] = float(value);
  }
}

inline Rows rows_of(const Problem& p, const Plan& plan, void* out) {
  Rows rows{};
  rows.x = p.x, rows.out = out;
  rows.batch_stride = p.batch_stride, rows.row_stride = plan.fold * p.row_stride;
  rows.rows = p.rows / plan.fold;
  rows.width = plan.width, rows.columns = p.columns, rows.tail = p.rows % plan.fold * p.columns;
  rows.tiles = uint32_t(plan.tiles), rows.splits = uint32_t(plan.splits);
  rows.tile_vectors = plan.tile_vectors, rows.lanes = plan.lanes;
  rows.wide_divisor = p.mean ? double(p.rows) : 1.0, rows.divisor = float(rows.wide_divisor);
  rows.result = p.result, rows.finished = plan.partials(p) == 0;
  rows.y = p.y, rows.y_batch_stride = p.y_batch_stride, rows.y_row_stride = plan.fold * p.y_row_stride;
  rows.second_out = p.second_out, rows.second_result = p.second_result, rows.rounded = p.rounded;
  rows.wide_second_divisor = p.second_mean ? double(p.rows) : 1.0, rows.second_divisor = float(rows.wide_second_divisor);
  return rows;
}

}  // namespace fusebackend::column_sum
