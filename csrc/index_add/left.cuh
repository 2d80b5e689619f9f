// What kBucketed leaves to reductions: the entries of buckets that hold too many, or all of an index that is in order.
#pragma once

#include "device.cuh"
#include "rank.cuh"

namespace fusebackend::accumulate {

constexpr int kPartEach = 16;  // entries of a thread
constexpr uint32_t kMostEntries = kSortThreads * kPartEach;  // of a bucket, at most

constexpr uint32_t kInOrder = ~0u;  // in the place of how many buckets are left

struct LeftOver {
  const uint32_t* left = nullptr;    // how many buckets are left, or kInOrder; nullptr: everything is
  const uint32_t* filled = nullptr;  // [bucket]: how many entries it has
  FastDiv rows_each;
  uint32_t most = 0;  // entries that a bucket holds

  __device__ __forceinline__ bool any() const { return !left || *left != 0; }
  __device__ __forceinline__ bool has(int64_t row) const {
    return !left || *left == kInOrder || filled[rows_each.div(uint32_t(row))] > most;
  }
};

}  // namespace fusebackend::accumulate
