// The bits of a mask of scores: four lanes read 64 keys of a query, a vector of 16 bytes each, and make one word of them. A thread block has 64
// queries of a head.
#include "attention/attention.h"
#include "common/cuda_common.cuh"
#include "common/integer_math.h"

namespace fusebackend::attention {
namespace {

constexpr int kBlockQueries = 64, kLanes = 4;  // of a query
constexpr int kUnrolled = 4;                   // words that a thread reads before it uses one

struct Arguments {
  MaskBits mask;
  uint32_t query_tiles;
  int words;
};

// Of four bytes, which are not 0: the lowest four bits.
__device__ __forceinline__ uint32_t pack_4(uint32_t bytes) {
  bytes |= bytes >> 4;
  bytes |= bytes >> 2;
  bytes |= bytes >> 1;
  return ((bytes & 0x01010101u) * 0x01020408u) >> 24;  // every partial product has a place of its own
}

__device__ __forceinline__ uint64_t pack_16(const uint4& v) {
  return pack_4(v.x) | pack_4(v.y) << 4 | pack_4(v.z) << 8 | pack_4(v.w) << 12;
}

// kVectors: whether rows are contiguous, aligned to 16 bytes and a multiple of that long.
template <bool kVectors>
__global__ __launch_bounds__(kBlockQueries* kLanes) void attention_mask_bits(const __grid_constant__ Arguments a) {
  const MaskBits& mask = a.mask;
  const uint32_t head = blockIdx.x / a.query_tiles;
  const int t = blockIdx.x % a.query_tiles * kBlockQueries + threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const uint32_t h = head % mask.size[2], g = head / mask.size[2] % mask.size[1], b = head / mask.size[2] / mask.size[1];
  const uint8_t* const row = mask.from + b * mask.stride[0] + g * mask.stride[1] + h * mask.stride[2] + t * mask.stride[3];
  const int keys = t < mask.size[3] ? int(mask.size[4]) : 0, queries = int(a.query_tiles) * kBlockQueries;
  uint64_t* const to = mask.to + int64_t(head) * a.words * queries + t;
  for (int first = 0; first < a.words; first += kUnrolled) {
    uint64_t bits[kUnrolled];
#pragma unroll
    for (int i = 0; i < kUnrolled; ++i) {
      const int key = (first + i) * kWordKeys + 16 * lane;
      bits[i] = 0;
      if constexpr (kVectors) {
        if (key < keys) bits[i] = pack_16(__ldg(reinterpret_cast<const uint4*>(row + key)));
      } else {
        for (int n = 0; n < 16; ++n)
          if (key + n < keys) bits[i] |= uint64_t(row[(key + n) * mask.stride[4]] != 0) << n;
      }
    }
#pragma unroll
    for (int i = 0; i < kUnrolled; ++i) {
      uint64_t word = bits[i] << (16 * lane);
      word |= __shfl_xor_sync(~0u, word, 1);
      word |= __shfl_xor_sync(~0u, word, 2);
      if (lane == 0 && first + i < a.words) to[int64_t(first + i) * queries] = word;
    }
  }
}

bool has_vectors(const MaskBits& mask) {
  bool fits = mask.stride[4] == 1 && mask.size[4] % 16 == 0 && reinterpret_cast<uintptr_t>(mask.from) % 16 == 0;
  for (int d = 0; d < 4; ++d) fits = fits && mask.stride[d] % 16 == 0;
  return fits;
}

}  // namespace

cudaError_t launch_mask_bits(const MaskBits& p, cudaStream_t stream) {
  const int64_t tiles = ceil_div(p.size[3], int64_t(kBlockQueries)), blocks = tiles * p.size[0] * p.size[1] * p.size[2];
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  const Arguments a = {p, uint32_t(tiles), int(kept_words(p.size[4]))};
  const auto kernel = has_vectors(p) ? attention_mask_bits<true> : attention_mask_bits<false>;
  kernel<<<unsigned(blocks), kBlockQueries * kLanes, 0, stream>>>(a);
  return cudaGetLastError();
}

}  // namespace fusebackend::attention
