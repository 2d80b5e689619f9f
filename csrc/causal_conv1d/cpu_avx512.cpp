// The CPU kernels compiled for AVX-512, where there can be such a processor. The library's other code must run on processors without it, so headers whose inline functions the linker
// may take from here for all of the library are included before the pragma, and are not compiled for AVX-512.
#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include "causal_conv1d/cpu_launch.h"
#include "common/integer_math.h"

#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")
#define FUSE_VECTOR_BYTES 64
#include "causal_conv1d/cpu_kernels.h"

namespace fusebackend::causal_conv1d {

CpuKernels avx512_kernels() { return {forward_range, backward_range}; }

}  // namespace fusebackend::causal_conv1d
#else
#include "causal_conv1d/cpu_launch.h"

namespace fusebackend::causal_conv1d {

CpuKernels avx512_kernels() { return {}; }

}  // namespace fusebackend::causal_conv1d
#endif
