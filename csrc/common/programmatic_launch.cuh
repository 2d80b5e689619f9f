// Programmatic dependent launch: a kernel is set up while the one before it in the stream still runs, and waits for that one's
// end by itself. Before sm_90 kernels follow one another as usual.
#pragma once

#include <cuda_runtime.h>

namespace fusebackend {

// In every kernel that is launched by `launch_dependent`, before it reads what the previous kernel wrote.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// From here on the next kernel may be set up, once every block has come this far or ended.
__device__ __forceinline__ void launch_dependents() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Launches `kernel`, which must call wait_for_previous_kernel, so that its set-up overlaps the kernel before it.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_dependent(void (*kernel)(Parameters...), dim3 blocks, dim3 threads, size_t shared_bytes, bool overlap, cudaStream_t stream,
                             Arguments&&... arguments) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = overlap ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
}

}  // namespace fusebackend
