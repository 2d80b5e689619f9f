// Compensated sums: beside an fp32 or fp64 sum stands the sum of its rounding errors (TwoSum, Knuth 1969), so that a sum of any length is
// rounded about once. In kernels that are bound by memory this costs no time.
#pragma once

#include "index_add/element_types.cuh"

namespace fusebackend::index_add {

// A sum of elements T. Only fp32 and fp64 are compensated: an fp32 sum is exact enough to be rounded to 16 bits once.
template <typename T, bool kCompensated = std::is_floating_point_v<T>>
struct Sum {
  using A = Acc<T>;
  A sum, error;
  __device__ __forceinline__ void add(A x) {
    const A next = sum + x, back = next - sum;
    error += (sum - (next - back)) + (x - back);
    sum = next;
  }
  __device__ __forceinline__ void add(const Sum& other) {
    add(other.sum);
    error += other.error;
  }
  // Adds the sum of the lane `step` away; both lanes then hold the same bits.
  __device__ __forceinline__ void add_other_lane(unsigned mask, unsigned step) {
    const A other = __shfl_xor_sync(mask, sum, step), other_error = __shfl_xor_sync(mask, error, step);
    const bool lower = !(threadIdx.x & step);  // the same order of operands in both
    const A first = lower ? sum : other, second = lower ? other : sum;
    error = lower ? error + other_error : other_error + error;
    sum = first;
    add(second);
  }
  __device__ __forceinline__ A total() const { return isfinite(sum) ? sum + error : sum; }  // the error of an infinite sum is NaN
};

template <typename T>
struct Sum<T, false> {
  using A = Acc<T>;
  A sum;
  __device__ __forceinline__ void add(A x) { sum += x; }
  __device__ __forceinline__ void add(const Sum& other) { sum += other.sum; }
  __device__ __forceinline__ void add_other_lane(unsigned mask, unsigned step) { sum += __shfl_xor_sync(mask, sum, step); }
  __device__ __forceinline__ A total() const { return sum; }
};

// Writes the sums of V neighbouring elements, rounded once; if `holds`, what out held before is added first.
template <typename T, int V, bool kCompensated>
__device__ __forceinline__ void write_sums(T* out, Sum<T, kCompensated> (&sum)[V], bool holds = false, const Vec<T, V>& held = {}) {
  Vec<T, V> value;
#pragma unroll
  for (int i = 0; i < V; ++i) {
    if (holds) sum[i].add(widen<Acc<T>>(held.v[i]));
    value.v[i] = narrow<T>(sum[i].total());
  }
  *reinterpret_cast<Vec<T, V>*>(out) = value;
}

}  // namespace fusebackend::index_add
