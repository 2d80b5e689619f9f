// Rows that kBucketSum leaves to atomic additions: those of buckets that overflow, or all rows if the index is in order.
#pragma once

#include "common/cuda_common.cuh"

namespace fusebackend::index_add {

constexpr uint32_t kIndexInOrder = ~0u;  // in the place of the number of buckets that overflow

struct OverflowRows {
  const uint32_t* overflows = nullptr;     // how many buckets overflow, or kIndexInOrder; nullptr: all rows are meant
  const uint32_t* bucket_sizes = nullptr;  // [bucket]: how many entries it should hold
  FastDiv rows_per_bucket;
  uint32_t capacity = 0;  // entries that a bucket can hold

  __device__ __forceinline__ bool any() const { return !overflows || *overflows != 0; }
  __device__ __forceinline__ bool has(int64_t row) const {
    return !overflows || *overflows == kIndexInOrder || bucket_sizes[rows_per_bucket.div(uint32_t(row))] > capacity;
  }
};

}  // namespace fusebackend::index_add
