// How the kernels share the heads, all (B, G, H), among thread blocks, and what they are given.
//
// Heads are taken in an order in which biases change as seldom as possible. A block that sums the gradient of a bias takes all heads that
// share the bias, or a chunk of them, one after another.
#pragma once

#include <algorithm>

#include "attention/attention.h"
#include "common/integer_math.h"

namespace fusebackend::attention {

constexpr int kWindow = 64;         // the kernels for short windows: most queries, and keys
constexpr int kWindowHeadDim = 64;  // largest D

// Blocks that share a multiprocessor; "wide" are heads of more than 32.
constexpr int kWindowForwardBlocks = 4, kWideWindowForwardBlocks = 3;
constexpr int kWindowBackwardBlocks = 3, kWideWindowBackwardBlocks = 2;

// Of two queries, in the backward: log2 of the sum of exp2(log2(e) * score) (without the maximum, if that is large), and the sum of grad * out. A
// lane that has both queries reads either kind at once.
constexpr int kRowSumQueries = 2;
struct RowSums {
  float log2_sum[kRowSumQueries], delta[kRowSumQueries];
};
constexpr int kRowSumTile = 64;

// The gradient of a bias that flash_backward_keys.cu sums has at most so many bytes a block, in shared memory: two blocks share a
// multiprocessor.
constexpr int kMaxBiasSumBytes = 64 * 1024, kMaxWideBiasSumBytes = 48 * 1024;

inline bool is_window(const Problem& p) {
  return !p.kept && p.size.t <= kWindow && p.size.s <= kWindow && std::max(p.size.d, p.size.dv) <= kWindowHeadDim;
}

// Whether the kernels for any length can read the bias: its rows in vectors of 8, or one column. Other biases are copied first.
constexpr int64_t kBiasVector = 8;

inline bool has_vectors(const Bias& bias, int64_t keys) {
  if (bias.stride[4] == 0) return true;
  for (int d = 0; d < 4; ++d)
    if (bias.stride[d] % kBiasVector != 0) return false;
  if (bias.stride[3] > kMaxRowStride) return false;
  return bias.stride[4] == 1 && keys % kBiasVector == 0 && reinterpret_cast<uintptr_t>(bias.data) % 16 == 0;
}

// The three dimensions B, G and H from outermost to innermost, and the blocks. Block i computes heads
// [i % chunks * per_block, (i % chunks + 1) * per_block) of those that have the index i / chunks in the `kept` outermost dimensions.
struct HeadPlan {
  int dim[3];
  int64_t size[3];
  int kept_dims = 0;
  int64_t kept = 1, inner = 1;  // the heads are kept * inner
  int64_t per_block = 1, chunks = 1;
  int64_t blocks() const { return kept * chunks; }
};

// `summed`: the bias whose gradient is summed by each block; none if negative. Its broadcast dimensions are the inner ones.
inline HeadPlan plan_heads(const Problem& p, int summed, const int64_t* summed_size, int64_t resident_blocks) {
  HeadPlan plan;
  const int64_t sizes[3] = {p.size.b, p.size.g, p.size.h};
  // Outermost those that the gradient keeps, innermost those on which no bias depends.
  int rank[3];
  for (int d = 0; d < 3; ++d) {
    rank[d] = 2;
    for (int i = 0; i < p.biases; ++i)
      if (p.bias[i].stride[d] != 0) rank[d] = 1;
    if (sizes[d] == 1) rank[d] = 3;
    if (summed >= 0 && summed_size[d] != 1) rank[d] = 0;
    plan.dim[d] = d;
  }
  std::stable_sort(plan.dim, plan.dim + 3, [&](int a, int b) { return rank[a] < rank[b]; });
  for (int i = 0; i < 3; ++i) {
    plan.size[i] = sizes[plan.dim[i]];
    if (rank[plan.dim[i]] == 0) ++plan.kept_dims, plan.kept *= plan.size[i];
    else plan.inner *= plan.size[i];
  }
  const int64_t wanted = std::max<int64_t>(1, resident_blocks / std::max<int64_t>(plan.kept, 1));
  plan.per_block = std::max<int64_t>(1, ceil_div(plan.inner, wanted));
  plan.chunks = ceil_div(plan.inner, plan.per_block);
  return plan;
}

// Whether the gradient of bias `i` is summed in two steps.
inline bool needs_partial_sums(const Backward& p, const HeadPlan& plan, int i) {
  return plan.chunks > 1 || p.dbias[i].size[3] != p.size.t || p.dbias[i].size[4] != p.size.s;
}

// Columns of scores that the kernels for short windows compute: those behind `count` are padding.
inline int64_t window_columns(int64_t count) { return count <= 56 ? 56 : kWindow; }

// That of window_forward.cu.
inline HeadPlan plan_window_forward(const Forward& p, int sm_count) {
  const int blocks = std::max(p.size.d, p.size.dv) <= 32 ? kWindowForwardBlocks : kWideWindowForwardBlocks;
  return plan_heads(p, -1, nullptr, int64_t(sm_count) * blocks);
}

// That of window_backward.cu. The gradient of bias `summed` (none if negative) is in partial sums (kept, chunks, T, S).
inline HeadPlan plan_window_backward(const Backward& p, int summed, int sm_count) {
  const int blocks = std::max(p.size.d, p.size.dv) <= 32 ? kWindowBackwardBlocks : kWideWindowBackwardBlocks;
  return plan_heads(p, summed, summed >= 0 ? p.dbias[summed].size : nullptr, int64_t(sm_count) * blocks);
}

// Queries of a block of flash_forward.cu: 128 compute more with what they read, 64 leave fewer rows empty.
inline int flash_forward_queries(const Problem& p) {
  const bool wide = std::max(p.size.d, p.size.dv) > 64;
  return wide || round_up(p.size.t, int64_t(64)) < round_up(p.size.t, int64_t(128)) ? 64 : 128;
}

// Whether flash_backward_keys.cu has room for the sums of a bias's gradient.
inline bool fits_in_keys_kernel(const Backward& p) {
  const int64_t d = std::max(p.size.d, p.size.dv), bytes = round_up(p.size.t, int64_t(kRowSumTile)) * 64 * int64_t(sizeof(float));
  return bytes <= (d <= 32 ? kMaxBiasSumBytes : d <= 64 ? kMaxWideBiasSumBytes : 0);
}

constexpr int kResidentBlocks = 2;  // of the kernels that sum a gradient, on a multiprocessor

// Heads to the blocks of flash_backward_keys.cu; `summed` as above.
inline HeadPlan plan_keys_kernel(const Backward& p, int summed, int sm_count) {
  if (summed < 0) {
    HeadPlan plan = plan_heads(p, -1, nullptr, 1);
    plan.per_block = 1, plan.chunks = plan.inner;
    return plan;
  }
  return plan_heads(p, summed, p.dbias[summed].size, kResidentBlocks * sm_count / ceil_div(p.size.s, int64_t(64)));
}

// Heads to the blocks of flash_backward_bias.cu.
inline HeadPlan plan_bias_kernel(const Backward& p, int i, int sm_count) {
  const int64_t tiles = ceil_div(p.size.s, int64_t(64)) * ceil_div(p.size.t, int64_t(128));
  return plan_heads(p, i, p.dbias[i].size, kResidentBlocks * sm_count / tiles);
}

// What the kernels are given: strides of the plan's dimensions, of rows, and of a bias's columns.
struct HeadRows {
  char* data;
  int64_t stride[3];
  int row;
};

struct HeadBias {
  const char* data;
  int64_t stride[3], row, column;
  bool is_fp32;
};

struct Arguments {
  int t, s, d, dv, biases;
  float scale;
  bool causal;
  uint32_t size[3];
  uint32_t inner, per_block, chunks;
  uint32_t head_stride[3];  // of the number of a head among all (B, G, H)
  HeadRows q, k, v, out;
  HeadBias bias[kMaxBiases];
  int early;  // the bias that is loaded ahead: 16 bits wide, and of all scores rather than of keys; none if negative
  float* statistics;
  const uint64_t* kept;  // (heads, kept_words, padded_t); null without dropout
  float kept_scale;
  int padded_t;
  // backward
  HeadRows grad, dq, dk, dv_out;
  // Of the bias whose gradient the kernel sums: (kept, chunks, T, S); or none, and the gradient itself, (kept, T, S), for chunks = 1.
  float* partial_sums;
  void* bias_gradient;
  bool bias_gradient_is_fp32;
  // What row_sums.cu makes: of each query of each head, `padded_t` to a head; and whether a tile of kRowSumTile has a large maximum, or a row
  // whose scores have no gradients.
  const RowSums* row_sums;
  const int* special_tiles;
};

inline HeadRows head_rows(const Rows& from, const HeadPlan& plan) {
  HeadRows to = {from.data, {}, int(from.stride[3])};
  for (int j = 0; j < 3; ++j) to.stride[j] = from.stride[plan.dim[j]];
  return to;
}

inline Arguments kernel_arguments(const Problem& p, const HeadPlan& plan) {
  Arguments a = {};
  a.t = int(p.size.t), a.s = int(p.size.s), a.d = int(p.size.d), a.dv = int(p.size.dv), a.biases = p.biases;
  a.scale = p.scale, a.causal = p.causal;
  a.kept = p.kept, a.kept_scale = p.kept_scale, a.padded_t = int(kept_queries(p.size.t));
  a.inner = uint32_t(plan.inner), a.per_block = uint32_t(plan.per_block), a.chunks = uint32_t(plan.chunks);
  const int64_t strides[3] = {p.size.g * p.size.h, p.size.h, 1};
  for (int i = 0; i < 3; ++i) {
    a.size[i] = uint32_t(plan.size[i]);
    a.head_stride[i] = uint32_t(strides[plan.dim[i]]);
  }
  a.early = -1;
  for (int i = p.biases - 1; i >= 0; --i)
    if (p.bias[i].dtype != DType::kFloat32 && p.bias[i].stride[4] != 0 && (p.bias[i].stride[3] != 0 || a.early < 0)) a.early = i;
  a.q = head_rows(p.q, plan), a.k = head_rows(p.k, plan), a.v = head_rows(p.v, plan);
  for (int i = 0; i < p.biases; ++i) {
    const Bias& from = p.bias[i];
    HeadBias& to = a.bias[i];
    to.data = from.data, to.row = from.stride[3], to.column = from.stride[4], to.is_fp32 = from.dtype == DType::kFloat32;
    for (int j = 0; j < 3; ++j) to.stride[j] = from.stride[plan.dim[j]];
  }
  return a;
}

inline Arguments forward_arguments(const Forward& p, const HeadPlan& plan) {
  Arguments a = kernel_arguments(p, plan);
  a.out = head_rows(p.out, plan);
  a.statistics = p.statistics;
  return a;
}

inline Arguments backward_arguments(const Backward& p, const HeadPlan& plan) {
  Arguments a = kernel_arguments(p, plan);
  a.out = head_rows(p.out, plan), a.grad = head_rows(p.grad, plan);
  a.dq = head_rows(p.dq, plan), a.dk = head_rows(p.dk, plan), a.dv_out = head_rows(p.dv, plan);
  a.statistics = const_cast<float*>(p.statistics);
  return a;
}

// Where the blocks' sums of bias `i`'s gradient go: `partial_sums` is only used if several blocks share one.
inline void sum_bias_gradient(Arguments& a, const Backward& p, const HeadPlan& plan, int i, float* partial_sums) {
  a.partial_sums = needs_partial_sums(p, plan, i) ? partial_sums : nullptr;
  a.bias_gradient = p.dbias[i].data;
  a.bias_gradient_is_fp32 = p.dbias[i].dtype == DType::kFloat32;
}

}  // namespace fusebackend::attention
