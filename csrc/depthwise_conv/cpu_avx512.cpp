// The vector kernels compiled for AVX-512, where there can be such a processor. The library's other code must run on processors without it, so
// headers whose inline functions the linker may take from here for all of the library are included before the pragma.
#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include "common/integer_math.h"
#include "depthwise_conv/cpu_launch.h"
#include "depthwise_conv/cpu_loops.h"
#include "depthwise_conv/cpu_tiles.h"

#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")
#define FUSE_VECTOR_BYTES 64
#include "depthwise_conv/cpu_vector_kernels.h"

namespace fusebackend::depthwise_conv {

CpuKernels avx512_kernels() { return vector_kernels(); }

}  // namespace fusebackend::depthwise_conv
#else
#include "depthwise_conv/cpu_launch.h"

namespace fusebackend::depthwise_conv {

CpuKernels avx512_kernels() { return {}; }

}  // namespace fusebackend::depthwise_conv
#endif
