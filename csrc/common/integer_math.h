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

// Unsigned division by a run-time constant, which the host may prepare for kernels: q = (n * m) >> 64-bit product, two instructions instead of some twenty.
// Exact for every n < 2^31 and 1 <= d < 2^31 (Granlund & Montgomery 1994, round-up method with a 33-bit multiplier folded by the add).
struct FastDiv {
  uint32_t d = 1, multiplier = 0, shift = 0;

  FastDiv() = default;
  FUSE_HOST_DEVICE explicit FastDiv(uint32_t divisor) : d(divisor) {
    while (shift < 31 && (uint64_t(1) << shift) < d) ++shift;
    multiplier = uint32_t(((uint64_t(1) << 32) * ((uint64_t(1) << shift) - d)) / d + 1);
  }
  FUSE_HOST_DEVICE uint32_t div(uint32_t n) const {
#ifdef __CUDA_ARCH__
    return (__umulhi(n, multiplier) + n) >> shift;
#else
    return uint32_t(((uint64_t(n) * multiplier) >> 32) + n) >> shift;
#endif
  }
  FUSE_HOST_DEVICE void divmod(uint32_t n, uint32_t& q, uint32_t& r) const {
    q = div(n);
    r = n - q * d;
  }
};

}  // namespace fusebackend
