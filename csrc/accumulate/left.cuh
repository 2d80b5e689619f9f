// What kBucketed leaves to reductions: the entries of buckets that hold too many, or all of an index that is in order.
#pragma once

#include "device.cuh"
#include "rank.cuh"

namespace fusebackend::accumulate {

constexpr int kPartEach = 16;  // entries of a thread
constexpr uint32_t kMostEntries = kSortThreads * kPartEach;  // of a bucket, at most

enum BucketState : uint32_t { kAllSummed, kSomeLeft, kInOrder };

struct LeftOver {
  const uint32_t* state = nullptr;   // a BucketState; nullptr: everything is left
  const uint32_t* filled = nullptr;  // [bucket]: how many entries it has
  FastDiv rows_each;
  uint32_t most = 0;  // entries that a bucket holds

  __device__ __forceinline__ bool any() const { return !state || *state != kAllSummed; }
  __device__ __forceinline__ bool has(int64_t row) const {
    return !state || *state == kInOrder || filled[rows_each.div(uint32_t(row))] > most;
  }
};

}  // namespace fusebackend::accumulate
