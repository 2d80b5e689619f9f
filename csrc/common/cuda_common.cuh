// Small device and launch helpers shared by all kernel families. Knows nothing of torch.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/integer_math.h"

namespace fusebackend {

// Vectors for wide movement: N elements of T, loaded and stored with one instruction where sizeof is 1..16 bytes.
template <typename T, int N>
struct alignas(sizeof(T) * N) Vec {
  T v[N];
};

// Stores a vector, 16 bytes at once at the most.
template <typename T, int N>
__device__ __forceinline__ void store_vector(T* to, const Vec<T, N>& x) {
  constexpr int kPart = N * int(sizeof(T)) > 16 ? 16 / int(sizeof(T)) : N;
#pragma unroll
  for (int n = 0; n < N; n += kPart) *reinterpret_cast<Vec<T, kPart>*>(to + n) = *reinterpret_cast<const Vec<T, kPart>*>(x.v + n);
}
// The same to global memory, by one instruction where it has 16 bytes or more: the compiler may store what was put together of 16-bit elements by words, which costs
// as many writes of the L2 cache.
template <typename T, int N>
__device__ __forceinline__ void store_vector_to_global(T* to, const Vec<T, N>& x) {
  constexpr int kBytes = int(sizeof(T)) * N;
  if constexpr (kBytes >= 16) {
    static_assert(kBytes % 16 == 0);
#pragma unroll
    for (int k = 0; k < kBytes / 16; ++k) {
      const uint4 part = reinterpret_cast<const uint4*>(x.v)[k];
      asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(reinterpret_cast<uint4*>(to) + k), "r"(part.x), "r"(part.y), "r"(part.z), "r"(part.w) : "memory");
    }
  } else {
    *reinterpret_cast<Vec<T, N>*>(to) = x;
  }
}

// Asynchronous 16-byte copy from global to shared memory (past L1), and its groups. Before sm_80 an ordinary copy.
__device__ __forceinline__ uint32_t shared_address(const void* shared) { return uint32_t(__cvta_generic_to_shared(shared)); }
__device__ __forceinline__ void cp_async_16(uint32_t shared, const void* global) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
#else
  const uint4 v = *static_cast<const uint4*>(global);
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
#endif
}
__device__ __forceinline__ void cp_async_16(void* shared, const void* global) { cp_async_16(shared_address(shared), global); }
// The same of 8 bytes (through L1).
__device__ __forceinline__ void cp_async_8(void* shared, const void* global) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared_address(shared)), "l"(global) : "memory");
#else
  *static_cast<uint2*>(shared) = *static_cast<const uint2*>(global);
#endif
}
__device__ __forceinline__ void cp_async_commit() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

// Raises a kernel's dynamic shared-memory limit once a device, so that the hot path pays only a load.
// Keep one static instance per kernel instantiation.
class SharedMemoryOptIn {
 public:
  template <typename Kernel>
  cudaError_t ensure(Kernel* kernel, int bytes) {
    int device;
    cudaError_t error = cudaGetDevice(&device);
    if (error != cudaSuccess) return error;
    if (device < kDevices && done_[device]) return cudaSuccess;
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error == cudaSuccess && device < kDevices) done_[device] = true;  // idempotent: a race only repeats the call
    return error;
  }

 private:
  static constexpr int kDevices = 64;
  bool done_[kDevices] = {};
};

}  // namespace fusebackend
