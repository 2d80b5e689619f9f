// Zeros in a workspace, for a kernel that is launched dependent: before it waits, it does what needs no zeros.
#pragma once

#include "common/integer_math.h"
#include "common/programmatic_launch.cuh"

namespace fusebackend::index_add {

constexpr int kZeroFillThreads = 256;

template <typename Word>
__global__ void __launch_bounds__(kZeroFillThreads) zero_fill_kernel(Word* words, int64_t count) {
  launch_dependents();
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < count; i += int64_t(gridDim.x) * blockDim.x) words[i] = Word(0);
}

template <typename Word>
cudaError_t zero_fill(Word* words, int64_t count, int sm_count, cudaStream_t stream) {
  constexpr int64_t kWordsPerThread = 4;
  const int64_t blocks = ceil_div(count, kWordsPerThread * kZeroFillThreads);
  zero_fill_kernel<<<unsigned(blocks < sm_count ? blocks : sm_count), kZeroFillThreads, 0, stream>>>(words, count);
  return cudaGetLastError();
}

}  // namespace fusebackend::index_add
