// Integer arithmetic that host and device code of all families share.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define FUSE_HOST_DEVICE __host__ __device__
#else
#define FUSE_HOST_DEVICE
#endif

namespace fusebackend {

// n / d rounded up, for n >= 0 and d > 0.
FUSE_HOST_DEVICE constexpr int64_t ceil_div(int64_t n, int64_t d) { return (n + d - 1) / d; }

// The smallest multiple of `multiple` that is no less than n.
FUSE_HOST_DEVICE constexpr int64_t round_up(int64_t n, int64_t multiple) { return ceil_div(n, multiple) * multiple; }

}  // namespace fusebackend
