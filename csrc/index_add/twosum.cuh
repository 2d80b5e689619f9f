// Sums that keep what rounding loses: beside an fp32 or fp64 sum stands the sum of its errors (Knuth 1969, TwoSum), so that a sum of any
// length is rounded about once. Where memory is what takes the time, it costs none.
#pragma once

#include <type_traits>

#include "device.cuh"

namespace fusebackend::accumulate {

// Of elements T; 16-bit ones are summed in fp32, which is exact enough for one rounding to 16 bits, and integers as they are.
template <typename T, bool kCompensated = std::is_floating_point_v<T>>
struct Sum {
  using A = Acc<T>;
  A sum, lost;
  __device__ __forceinline__ void add(A x) {
    const A next = sum + x, back = next - sum;
    lost += (sum - (next - back)) + (x - back);
    sum = next;
  }
  __device__ __forceinline__ void add(const Sum& other) {
    add(other.sum);
    lost += other.lost;
  }
  // Adds what the lane `step` away has; both then hold the same.
  __device__ __forceinline__ void add_other_lane(unsigned mask, unsigned step) {
    const A other = __shfl_xor_sync(mask, sum, step), other_lost = __shfl_xor_sync(mask, lost, step);
    const bool lower = !(threadIdx.x & step);  // the same order of operands in both
    const A first = lower ? sum : other, second = lower ? other : sum;
    lost = lower ? lost + other_lost : other_lost + lost;
    sum = first;
    add(second);
  }
  __device__ __forceinline__ A total() const { return isfinite(sum) ? sum + lost : sum; }  // the error of an infinite sum is NaN
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

// Writes the sums of V neighbouring elements, onto which comes what was held, if anything: rounded once.
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

}  // namespace fusebackend::accumulate
