// Attention with biases: softmax(scale * q @ k^T + sum of biases) @ v, and its gradients. Knows nothing of torch.
// With dropout, the probabilities are multiplied by 0 or kept_scale before they are multiplied by v.
//
// Tensors have up to two batch dimensions, B outside G (a window's kind, a row of pairs), and H heads. Strides are in elements; the last
// dimension of q, k, v and of what is shaped like them is contiguous.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/dtype.h"
#include "common/integer_math.h"

#if __has_include(<cuda_runtime_api.h>)
#include <cuda_runtime_api.h>
#endif

namespace fusebackend::attention {

constexpr int kMaxBiases = 4;
constexpr int kMaxHeadDim = 128;
constexpr int kHeadDimMultiple = 8;  // elements: rows are copied in vectors of 16 bytes
constexpr int64_t kMaxRowStride = int64_t(1) << 28;  // elements from row to row that 32-bit offsets within a tile allow
constexpr int kMinSharedBytes = 128 * 1024;  // that a thread block must be able to have: GPUs of compute capability 8.0, 9.0 and 10.0 have more
constexpr int kWordKeys = 64;        // keys whose bits are one word
constexpr int kStatistics = 2;       // of a row: the maximum of its scores, and the logarithm of the sum of exp(score - maximum)

// Scores that a mask replaces by a number have no gradients. Their probabilities are 0 but in rows that are masked wholly, which the caller of the
// backward marks: it negates their second statistic, the logarithm. That is log(2) at least there, since a row of one key has no gradients anyway.
// Where it is not negated it is at least 0, but for rounding, or -inf where all scores are.
FUSE_HOST_DEVICE inline bool has_score_gradients(float log_sum) { return !(log_sum < -0.5f && log_sum > -INFINITY); }
FUSE_HOST_DEVICE inline float unmarked(float log_sum) { return has_score_gradients(log_sum) ? log_sum : -log_sum; }

// (B, G, H, rows, columns) with contiguous columns.
struct Rows {
  char* data = nullptr;
  int64_t stride[4] = {};  // of B, G, H and rows
};

// (B, G, H, T, S), broadcast by strides of 0.
struct Bias {
  const char* data = nullptr;
  int64_t stride[5] = {};
  DType dtype = DType::kFloat32;
};

// Which probabilities are kept: a bit each. A word has kWordKeys keys of a query, the first in its lowest bit; of a head, (words, queries,
// padded). What lies behind the last key or query is 0.
inline int64_t kept_words(int64_t keys) { return (keys + kWordKeys - 1) / kWordKeys; }
inline int64_t kept_queries(int64_t queries) { return (queries + 63) / 64 * 64; }

// (B, G, H, T, S) of bytes, 0 where a probability is dropped; and its bits.
struct MaskBits {
  const uint8_t* from = nullptr;
  int64_t size[5] = {}, stride[5] = {};
  uint64_t* to = nullptr;
};

struct Sizes {
  int64_t b = 1, g = 1, h = 1, t = 0, s = 0;  // batch, inner batch, heads, queries, keys
  int64_t d = 0, dv = 0;                      // of a row of q and k, of v
  int64_t heads() const { return b * g * h; }
};

struct Problem {
  Sizes size;
  DType dtype = DType::kBFloat16;
  float scale = 1;
  bool causal = false;  // query i sees keys 0..i
  Rows q, k, v;
  int biases = 0;
  Bias bias[kMaxBiases];
  const uint64_t* kept = nullptr;  // bits, (B, G, H, kept_words, kept_queries); null without dropout
  float kept_scale = 1;
};

struct Forward : Problem {
  Rows out;
  float* statistics = nullptr;  // (B, G, H, T, kStatistics), contiguous
};

// A bias's gradient: contiguous, of the bias's sizes, in its dtype or fp32. No data if it is not wanted.
struct BiasGradient {
  char* data = nullptr;
  int64_t size[5] = {};  // each 1 or that of the scores, over which it is summed where it is 1
  DType dtype = DType::kFloat32;
};

struct Backward : Problem {
  Rows grad, out;
  const float* statistics = nullptr;
  Rows dq, dk, dv;
  BiasGradient dbias[kMaxBiases];
};

// Heads [begin, end) of B * G * H.
void mask_bits_cpu(const MaskBits& p, int64_t begin, int64_t end);
void forward_cpu(const Forward& p, int64_t begin, int64_t end);
// dq, dk and dv of heads [begin, end).
void backward_cpu(const Backward& p, int64_t begin, int64_t end);
// dbias[i]: of its (B, G, H) flattened, [begin, end).
void bias_gradient_cpu(const Backward& p, int i, int64_t begin, int64_t end);

#if __has_include(<cuda_runtime_api.h>)
// On `stream` of the current device; captured into a CUDA graph if the stream is. `workspace` has the bytes that the function before says.
cudaError_t launch_mask_bits(const MaskBits& p, cudaStream_t stream);
int64_t forward_workspace_bytes(const Forward& p);
cudaError_t launch_forward(const Forward& p, void* workspace, int sm_count, cudaStream_t stream);
int64_t backward_workspace_bytes(const Backward& p, int sm_count);
cudaError_t launch_backward(const Backward& p, void* workspace, int sm_count, cudaStream_t stream);
#endif

}  // namespace fusebackend::attention
