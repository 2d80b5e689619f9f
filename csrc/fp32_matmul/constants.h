// Sizes and thresholds of the fp32 matmul kernels that several files need, and Python (bind.cpp). Knows neither torch nor CUDA.
#pragma once
#include <cstddef>
#include <cstdint>

namespace fusebackend::fp32_matmul {

constexpr int kPlanes = 3;                     // bf16 planes of an fp32 operand
constexpr int64_t kPitchMultiple = 64;         // elements: rows of planes are padded with zeros to a multiple of this

// Temporary planes of one product, in bytes. A product that needs more is computed in pieces.
constexpr size_t kPlanesLimit = size_t(1) << 30;

// Tensor cores truncate what they add. Truncation after half a unit in the last place was added is rounding. The lo plane is therefore
// raised by this fraction of hi. The products hi * lo and lo * hi, which are summed before hi * hi, then raise a sum by 2 kHalfUlp =
// 3 * 2^-26 of itself: 0.38 to 0.75 units in the last place. An element whose lo is zero keeps it, so that products of integers stay exact.
// Of the values from 0 to 4 * 2^-26 this one gave the smallest errors: half of those of 0 for log-normal operands, two thirds for uniform ones.
constexpr float kHalfUlp = 1.5f / (1 << 26);

// The wgmma kernel: the part of C that a thread block computes, and the elements of K in one pipeline stage.
constexpr int kTileM = 128, kTileN = 192, kBlockK = 32;

// The same of the mma and of the ffma kernel.
constexpr int kMmaTileM = 128, kMmaTileN = 128, kMmaBlockK = 32;
constexpr int kFfmaTileM = 128, kFfmaTileN = 256, kFfmaBlockK = 16;

// Below this K the wgmma kernel adds the tensor cores' sums to the result without any error, which takes twice the instructions.
constexpr int kExactSumsBelowK = 768;

}  // namespace fusebackend::fp32_matmul
