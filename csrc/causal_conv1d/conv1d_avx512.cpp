// The CPU kernels once more, for AVX-512. The library's other code runs on processors that have none: whatever the linker may take from
// here for all of it (inline functions of the standard library and of the headers before the pragma) is not compiled for it.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include "conv1d_cpu.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
#define FUSE_VECTOR_BYTES 64
#include "cpu_kernels.h"
#endif

namespace fusebackend::conv1d {

CpuKernels avx512_kernels() {
#ifdef FUSE_VECTOR_BYTES
  return {forward_range, backward_range};
#else
  return {};
#endif
}

}  // namespace fusebackend::conv1d
