// Which kernels compute attention of any length, and what those of compute capability 9.0 are given.
//
// There, up to D = 64, the pipelined kernels compute what they have room for; everything else is computed by the kernels for any biases. This is
// decided here alone, for launch_cuda.cpp and for work.cpp.
#pragma once

#include "attention/heads.h"

namespace fusebackend::attention {

// Whether products are computed by wgmma, on a GPU of this capability.
inline bool uses_wgmma(const Problem& p, int capability_major) { return capability_major == 9 && std::max(p.size.d, p.size.dv) <= 64; }

// Whether the tensor memory accelerator can read the rows of q, k, v and of what is shaped like them.
inline bool has_tiles(const Rows& rows, int64_t count) { return count == 1 || rows.stride[3] != 0; }

// Of biases, after align_biases: one that is copied to shared memory in tiles, and one of keys that is copied with it. None if negative.
struct StagedBiases {
  int tile, keys;
};

inline bool is_of_keys(const Bias& bias) { return bias.stride[3] == 0; }
inline bool is_tile(const Bias& bias) { return bias.dtype != DType::kFloat32 && bias.stride[3] != 0 && bias.stride[4] != 0; }

// Whether pipelined_forward_sm90.cu has room for all biases.
inline bool stages_biases(const Problem& p, StagedBiases& staged) {
  staged = {-1, -1};
  for (int i = 0; i < p.biases; ++i) {
    int& place = is_of_keys(p.bias[i]) ? staged.keys : staged.tile;
    if (place >= 0 || p.bias[i].stride[4] == 0 || !(is_of_keys(p.bias[i]) || is_tile(p.bias[i]))) return false;
    place = i;
  }
  return true;
}

// Whether pipelined_backward_keys_sm90.cu can read the biases: any number that all queries share, and one other (`tile`, none if negative).
inline bool stages_tile_bias(const Problem& p, int& tile) {
  tile = -1;
  for (int i = 0; i < p.biases; ++i) {
    if (is_of_keys(p.bias[i])) continue;
    if (tile >= 0 || !is_tile(p.bias[i])) return false;
    tile = i;
  }
  return true;
}

// Whether a row of q, k and v fits into 64 bytes.
inline bool is_narrow(const Problem& p) { return std::max(p.size.d, p.size.dv) <= 32; }

// Queries of a block of pipelined_forward_sm90.cu: of wide heads two warpgroups share keys and values, of narrow ones more blocks share a
// multiprocessor.
inline int pipelined_forward_queries(const Problem& p) { return is_narrow(p) || p.size.t <= 64 ? 64 : 128; }

// Keys of a block of pipelined_backward_keys_sm90.cu.
constexpr int kPipelinedBackwardKeys = 64;

// Gradients of scores that are stored between pipelined_backward_keys_sm90.cu and stored_backward_sm90.cu, in tiles of so many keys and queries.
constexpr int kStoredTile = 64;
constexpr int64_t kMaxStoredBytes = 256 * 1024 * 1024;  // at a time, and of partial sums of the bias's gradient

// Heads whose dq stored_backward_sm90.cu keeps in registers.
constexpr int kStoredHeads = 8, kNarrowStoredHeads = 16;
inline int64_t most_stored_heads(const Problem& p) { return is_narrow(p) ? kNarrowStoredHeads : kStoredHeads; }

// Fewer heads to a block keep more multiprocessors busy, but partial sums of fewer than so many are more memory than what is stored.
constexpr int64_t kFewestStoredHeads = 4;

// Heads to the blocks of stored_backward_sm90.cu, and how many shares of them are stored at a time: none where the memory does not suffice.
struct StoredPlan {
  HeadPlan heads;
  int64_t key_tiles = 0;  // of a head
  int64_t head_bytes = 0, shares = 0, launches = 0;
  int64_t bytes() const { return shares * heads.per_block * head_bytes; }
};

inline StoredPlan plan_stored(const Backward& p, int summed, int sm_count) {
  StoredPlan plan;
  HeadPlan& heads = plan.heads;
  heads = plan_heads(p, summed, p.dbias[summed].size, 1);
  const int64_t busy = ceil_div(int64_t(sm_count), heads.kept * ceil_div(p.size.t, int64_t(kStoredTile)));  // chunks for a block to each
  heads.chunks = std::max(ceil_div(heads.inner, most_stored_heads(p)), std::min(busy, heads.inner / kFewestStoredHeads));
  heads.per_block = ceil_div(heads.inner, heads.chunks);
  heads.chunks = ceil_div(heads.inner, heads.per_block);
  plan.key_tiles = round_up(p.size.s, int64_t(kPipelinedBackwardKeys)) / kStoredTile;
  plan.head_bytes = plan.key_tiles * ceil_div(p.size.t, int64_t(kStoredTile)) * kStoredTile * kStoredTile * 2;
  const int64_t most = kMaxStoredBytes / (heads.per_block * plan.head_bytes);
  const bool has_room = !needs_partial_sums(p, heads, summed) || heads.blocks() * p.size.t * p.size.s <= kMaxStoredBytes / int64_t(sizeof(float));
  if (most == 0 || !has_room) return plan;
  plan.launches = ceil_div(heads.blocks(), most);
  plan.shares = ceil_div(heads.blocks(), plan.launches);
  return plan;
}

// Which kernels compute the gradients of attention of any length.
struct BackwardRoute {
  enum { kAny, kPipelined, kStored } kind;
  int tile_bias;  // of the latter two
  int summed;     // the bias whose gradient they sum; those of others are computed on their own
};

inline BackwardRoute backward_route(const Backward& p, bool wgmma, int sm_count) {
  int wanted = -1, tile_bias;
  for (int i = p.biases - 1; i >= 0; --i)
    if (p.dbias[i].size[0]) wanted = i;
  const bool tiles = has_tiles(p.q, p.size.t) && has_tiles(p.grad, p.size.t) && has_tiles(p.k, p.size.s) && has_tiles(p.v, p.size.s);
  if (!wgmma || !tiles || !stages_tile_bias(p, tile_bias)) return {BackwardRoute::kAny, -1, wanted >= 0 && fits_in_keys_kernel(p) ? wanted : -1};
  if (wanted >= 0 && plan_stored(p, wanted, sm_count).shares > 0) return {BackwardRoute::kStored, tile_bias, wanted};
  return {BackwardRoute::kPipelined, tile_bias, -1};
}

inline bool takes_pipelined_forward(const Forward& p, bool wgmma, StagedBiases& staged) {
  return wgmma && has_tiles(p.q, p.size.t) && has_tiles(p.k, p.size.s) && has_tiles(p.v, p.size.s) && stages_biases(p, staged);
}

// Where pipelined_backward_keys_sm90.cu stores gradients of scores: those of the shares from first_share on.
struct StoredHeads {
  char* gradients;
  int64_t key_tiles;  // of a head
  uint32_t first_share;
};

}  // namespace fusebackend::attention
