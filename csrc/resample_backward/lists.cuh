// The lists of each axis (tables.h). Indices of interpolations go up: of such the element before which the list of k begins is the first of each term with
// an index of k or more. Of others a thread reads all, twice.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cassert>

#include "common/cuda_common.cuh"
#include "common/programmatic_launch.cuh"
#include "resample_backward/tables.h"

namespace fusebackend::resample_backward {

template <typename Acc>
struct Lists {
  int32_t* begins;
  Entry<Acc>* entries;
};

// Part of a list.
struct Range {
  int begin, end;
  __device__ __forceinline__ int count() const { return end - begin; }
};

template <typename Acc>
__device__ __forceinline__ Range range_of(const Lists<Acc>& lists, int64_t k) {
  return {lists.begins[k], lists.begins[k + 1]};
}

namespace {

template <typename Acc>
struct ListArguments {
  Axis axis[kMostAxes];
  Lists<Acc> lists[kMostAxes];
  int32_t* edges[kMostAxes];  // of a long axis: of each term, for each k, how many elements have an index below k, if indices go up
  int32_t* falls;             // of each axis: whether they do not
  uint32_t first_block[kMostAxes + 1];
  bool index_is_64;
};

// An index as PyTorch takes it: negative ones count from the end, and what is out of range stops the kernel.
template <typename Acc>
__device__ __forceinline__ int32_t index_at(const ListArguments<Acc>& p, const Axis& a, int term, int64_t i) {
  const void* const index = a.term[term].index;
  int64_t found = p.index_is_64 ? __ldg(static_cast<const long long*>(index) + i) : __ldg(static_cast<const int*>(index) + i);
  if (found < 0) found += a.size;
  assert(found >= 0 && found < a.size && "index out of bounds");
  return int32_t(found);
}

// Of a long axis: a thread finds which lists begin at an element of the gradient.
template <typename Acc>
__global__ void __launch_bounds__(kThreads) resample_backward_edges(const __grid_constant__ ListArguments<Acc> p, int which) {
  const Axis& a = p.axis[which];
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i > a.length) return;
  for (int term = 0; term < a.terms; ++term) {
    int32_t* const edges = p.edges[which] + term * (a.size + 1);
    const int64_t before = i == 0 ? -1 : index_at(p, a, term, i - 1), here = i == a.length ? a.size : index_at(p, a, term, i);
    if (before > here) p.falls[which] = 1;
    for (int64_t k = before + 1; k <= here; ++k) edges[k] = int32_t(i);
  }
}

// A thread lists what one element of an axis is the sum of.
template <typename Acc>
__global__ void __launch_bounds__(kThreads) resample_backward_lists(const __grid_constant__ ListArguments<Acc> p) {
  extern __shared__ int32_t indices[];  // of a short axis
  launch_dependents();
  int which = 0;
  while (blockIdx.x >= p.first_block[which + 1]) ++which;
  const Axis& a = p.axis[which];
  const Lists<Acc>& lists = p.lists[which];
  const int64_t k = int64_t(blockIdx.x - p.first_block[which]) * kThreads + threadIdx.x;
  if (a.terms == 0) {
    if (k <= a.size) lists.begins[k] = int32_t(k);
    if (k < a.size) lists.entries[k] = {Acc(1), int32_t(k)};
    return;
  }
  const bool is_short = !is_long(a);
  const int length = int(a.length);
  bool sorted;
  if (is_short) {
    for (int i = threadIdx.x; i < length; i += kThreads)
      for (int term = 0; term < a.terms; ++term) indices[term * length + i] = index_at(p, a, term, i);
    __syncthreads();
    bool falls = false;
    for (int i = threadIdx.x + 1; i < length; i += kThreads)
      for (int term = 0; term < a.terms; ++term) falls |= indices[term * length + i - 1] > indices[term * length + i];
    sorted = !__syncthreads_or(falls);
  } else {
    sorted = p.falls[which] == 0;
  }
  if (k > a.size) return;
  const auto index = [&](int term, int i) { return is_short ? indices[term * length + i] : index_at(p, a, term, i); };
  // How many elements of a term have an index below `bound`.
  const auto below = [&](int term, int32_t bound) {
    if (!is_short) return p.edges[which][term * (a.size + 1) + bound];
    int low = 0, high = length;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (indices[term * length + middle] < bound) low = middle + 1;
      else high = middle;
    }
    return low;
  };
  int at = 0, begins[kMostTerms];
#pragma unroll
  for (int term = 0; term < kMostTerms; ++term) {
    begins[term] = 0;
    if (term >= a.terms) continue;
    if (sorted) {
      at += begins[term] = below(term, int32_t(k));
    } else {
      for (int i = 0; i < length; ++i) at += index(term, i) < k;
    }
  }
  lists.begins[k] = at;
  if (k == a.size) return;
#pragma unroll
  for (int term = 0; term < kMostTerms; ++term) {
    if (term >= a.terms) continue;
    const Acc* const weight = static_cast<const Acc*>(a.term[term].weight);
    for (int i = begins[term]; i < length; ++i) {
      const int32_t found = index(term, i);
      if (found == k) lists.entries[at++] = {weight ? __ldg(weight + i) : Acc(1), i};
      else if (sorted) break;
    }
  }
}

// Makes the lists of all axes. `memory` has Plan::table_bytes.
template <typename Acc>
cudaError_t launch_lists(const Problem& p, void* memory, Lists<Acc>* lists, cudaStream_t stream) {
  ListArguments<Acc> arguments{};
  char* at = static_cast<char*>(memory);
  arguments.falls = reinterpret_cast<int32_t*>(at);
  at += kFlagBytes;
  uint32_t blocks = 0;
  int64_t shared = 0;
  bool any_long = false;
  for (int k = 0; k < kMostAxes; ++k) {
    const Axis& a = p.axis[k];
    if (entries_of(a) > INT32_MAX || a.size >= INT32_MAX) return cudaErrorInvalidValue;
    arguments.axis[k] = a;
    arguments.lists[k] = lists[k] = {reinterpret_cast<int32_t*>(at), reinterpret_cast<Entry<Acc>*>(at + begin_bytes(a))};
    arguments.edges[k] = reinterpret_cast<int32_t*>(at + begin_bytes(a) + entry_bytes(a, p.dtype));
    at += table_bytes(a, p.dtype);
    arguments.first_block[k] = blocks;
    blocks += uint32_t(ceil_div(a.size + 1, kThreads));
    if (a.terms > 0 && !is_long(a)) shared = std::max(shared, a.terms * a.length * int64_t(sizeof(int32_t)));
    any_long = any_long || is_long(a);
  }
  arguments.first_block[kMostAxes] = blocks;
  arguments.index_is_64 = p.index_is_64;
  if (any_long) {
    const cudaError_t error = cudaMemsetAsync(arguments.falls, 0, kFlagBytes, stream);
    if (error != cudaSuccess) return error;
    for (int k = 0; k < kMostAxes; ++k)
      if (is_long(p.axis[k])) resample_backward_edges<Acc><<<uint32_t(ceil_div(p.axis[k].length + 1, kThreads)), kThreads, 0, stream>>>(arguments, k);
  }
  static SharedMemoryOptIn opt_in;
  const cudaError_t error = opt_in.ensure(resample_backward_lists<Acc>, int(kMostTerms * kShortAxis * sizeof(int32_t)));
  if (error != cudaSuccess) return error;
  resample_backward_lists<Acc><<<blocks, kThreads, size_t(shared), stream>>>(arguments);
  return cudaGetLastError();
}

}  // namespace
}  // namespace fusebackend::resample_backward
