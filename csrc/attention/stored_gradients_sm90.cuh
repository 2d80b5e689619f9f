// Gradients of scores that one kernel stores in 16 bits and another reads: tiles of 64 keys by 64 queries, [head][tile of keys][tile of queries],
// each as it lies in shared memory: Tile<64>, a row a key, the queries in Order::kByVector. launch_cuda.cpp bounds how many heads are stored
// at a time.
#pragma once

#include "attention/fragments.cuh"
#include "attention/heads.cuh"
#include "attention/routes.h"

namespace fusebackend::attention {

constexpr int kGradientTile = kStoredTile * kStoredTile * 2;  // bytes

// The heads of a block of the plan.
__device__ __forceinline__ uint32_t share_begin(const Arguments& a, uint32_t share) {
  return share / a.chunks * a.inner + share % a.chunks * a.per_block;
}
__device__ __forceinline__ uint32_t share_end(const Arguments& a, uint32_t share) {
  return min(share_begin(a, share) + a.per_block, share / a.chunks * a.inner + a.inner);
}

// The tile of a slot: of head slot % per_block of share first_share + slot / per_block.
__device__ __forceinline__ char* gradient_tile(const StoredHeads& stored, const Arguments& a, int64_t slot, int key_tile, int query_tile) {
  return stored.gradients + ((slot * stored.key_tiles + key_tile) * (a.padded_t / kStoredTile) + query_tile) * kGradientTile;
}

}  // namespace fusebackend::attention
