// Heads on the device.
#pragma once

#include "attention/heads.h"

namespace fusebackend::attention {

// The index of a head in each of the plan's dimensions.
struct HeadIndex {
  uint32_t i[3];
  __device__ HeadIndex(const Arguments& a, uint32_t head) {
    i[2] = head % a.size[2];
    head /= a.size[2];
    i[1] = head % a.size[1];
    i[0] = head / a.size[1];
  }
  // Among all heads in their own order.
  __device__ int64_t head(const Arguments& a) const { return i[0] * a.head_stride[0] + i[1] * a.head_stride[1] + i[2] * a.head_stride[2]; }
  __device__ float2* statistics(const Arguments& a) const { return reinterpret_cast<float2*>(a.statistics) + head(a) * a.t; }
  __device__ const RowSums* row_sums(const Arguments& a) const { return a.row_sums + head(a) * (a.padded_t / kRowSumQueries); }
  // Words of a query in the tile of kWordKeys keys from `key` on.
  __device__ const uint64_t* kept(const Arguments& a, int key) const {
    return a.kept + (head(a) * ceil_div(a.s, kWordKeys) + key / kWordKeys) * a.padded_t;
  }
  template <typename Strided>
  __device__ int64_t offset(const Strided& x) const {
    return i[0] * x.stride[0] + i[1] * x.stride[1] + i[2] * x.stride[2];
  }
};

template <typename T>
__device__ __forceinline__ T* rows_of(const HeadRows& x, const HeadIndex& index) {
  return reinterpret_cast<T*>(x.data) + index.offset(x);
}

// An element of the gradient of the bias that a block sums: of its partial sums, or rounded where there is one block a sum.
template <typename T>
__device__ __forceinline__ void store_bias_gradient(const Arguments& a, int64_t sum, int t, int s, float x) {
  const int64_t at = (sum * a.t + t) * a.s + s;
  if (a.partial_sums) a.partial_sums[at] = x;
  else if (a.bias_gradient_is_fp32) static_cast<float*>(a.bias_gradient)[at] = x;
  else static_cast<T*>(a.bias_gradient)[at] = T(x);
}

}  // namespace fusebackend::attention
