// The tile of C that a thread block of the Hopper kernel computes, and the K that it takes at a time.
#pragma once
#include <cstdint>

namespace fusebackend::matmul {

constexpr int kTileM = 128, kTileN = 256, kBlockK = 32;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace fusebackend::matmul
