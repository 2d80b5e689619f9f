// Kernels in a row whose launches overlap: each is set up while the one before still runs, and waits for its end by itself. Before sm_90
// they follow one another as usual.
#pragma once

#include <cuda_runtime.h>

namespace fusebackend::accumulate {

// First in every kernel that is launched so: what the kernel before wrote may be read only after it.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_next_kernel_set_up() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// `kernel` must call wait_for_previous_kernel.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_overlapped(void (*kernel)(Parameters...), unsigned blocks, int threads, int shared_bytes, int device_major, cudaStream_t stream,
                              Arguments... arguments) {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = size_t(shared_bytes);
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = device_major >= 9 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
}

template <typename Word>
__global__ void __launch_bounds__(256) clear_kernel(Word* words, int64_t count) {
  let_next_kernel_set_up();
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < count; i += int64_t(gridDim.x) * blockDim.x) words[i] = Word(0);
}

// Zeros, for a kernel that is launched overlapped: before it waits it may do all that needs none of them.
template <typename Word>
cudaError_t clear(Word* words, int64_t count, cudaStream_t stream) {
  constexpr int64_t kEach = 4, kBlockThreads = 256, kMost = 132;
  const int64_t blocks = (count + kEach * kBlockThreads - 1) / (kEach * kBlockThreads);
  clear_kernel<<<unsigned(blocks < kMost ? blocks : kMost), unsigned(kBlockThreads), 0, stream>>>(words, count);
  return cudaGetLastError();
}

}  // namespace fusebackend::accumulate
