// The family's operators, whose schemas are in fusebackend/patterns/attention/ops.py, for a device that knows two things:
//
//   Device::mask_bits(params, mask)  packs a mask
//   Device::forward(params, q)     runs the forward kernels
//   Device::backward(params, q)    runs the backward kernels
//
// The tensor is there to say on which device.
#pragma once

#include <tuple>

#include "attention/attention.h"
#include "common/binding.h"
#include "common/direct_call.h"

namespace fusebackend::attention {

constexpr int64_t kAlignment = 16;  // bytes: of rows that are copied in vectors

inline int64_t size_at(const Tensor& t, int i) { return i == 0 && t.dim() == 4 ? 1 : t.size(i - (t.dim() == 4)); }
inline int64_t stride_at(const Tensor& t, int i) {
  return (i == 0 && t.dim() == 4) || size_at(t, i) == 1 ? 0 : t.stride(i - (t.dim() == 4));
}

// Whether rows are contiguous, begin at aligned addresses, and are not too far apart.
inline bool is_aligned(const Tensor& t) {
  const int64_t bytes = 2;
  if (reinterpret_cast<uintptr_t>(t.data_ptr()) % kAlignment != 0) return false;
  if (t.size(t.dim() - 1) != 1 && t.stride(t.dim() - 1) != 1) return false;
  for (int i = 0; i < 4; ++i)
    if (stride_at(t, i) * bytes % kAlignment != 0) return false;
  return stride_at(t, 3) <= kMaxRowStride;
}

// (..., H, T, D) whose memory holds the heads of a token one behind the other, as models merge them afterwards.
inline Tensor empty_by_tokens(const Tensor& like, int64_t tokens, int64_t columns) {
  std::vector<int64_t> sizes = to_vector(like.sizes());
  const size_t rank = sizes.size();
  sizes[rank - 2] = tokens, sizes[rank - 1] = columns;
  std::vector<int64_t> strides(rank);
  const auto at_least_1 = [](int64_t n) { return n > 0 ? n : 1; };
  strides[rank - 1] = 1;
  strides[rank - 3] = at_least_1(columns);
  strides[rank - 2] = strides[rank - 3] * at_least_1(sizes[rank - 3]);
  int64_t step = strides[rank - 2] * at_least_1(tokens);
  for (size_t d = rank - 3; d-- > 0;) {
    strides[d] = step;
    step *= at_least_1(sizes[d]);
  }
  return empty_strided_like(like, sizes, strides);
}

// The tensor, or a copy that is aligned.
inline Tensor aligned(const Tensor& t) {
  if (t.numel() == 0 || is_aligned(t)) return t;
  Tensor copy = empty_by_tokens(t, t.size(t.dim() - 2), t.size(t.dim() - 1));
  torch::stable::copy_(copy, t);
  return copy;
}

inline Rows rows(const Tensor& t) {
  Rows r;
  r.data = static_cast<char*>(t.data_ptr());
  for (int i = 0; i < 4; ++i) r.stride[i] = stride_at(t, i);
  return r;
}

inline bool same_leading(const Tensor& a, const Tensor& b, int count) {
  if (a.dim() != b.dim()) return false;
  for (int i = 0; i < count; ++i)
    if (size_at(a, i) != size_at(b, i)) return false;
  return true;
}

// Describes the problem; q, k and v are aligned.
inline void describe(Problem& p, const char* name, const Tensor& q, const Tensor& k, const Tensor& v, const std::vector<Tensor>& biases,
                     double scale, bool causal) {
  STD_TORCH_CHECK(q.dim() == 4 || q.dim() == 5, name, ": q must be (batch, heads, queries, D), with one more batch dimension or not");
  const std::optional<DType> type = to_dtype(q.scalar_type());
  STD_TORCH_CHECK(type && is_half(*type), name, ": q must be bfloat16 or float16");
  for (const Tensor* t : {&k, &v})
    STD_TORCH_CHECK(t->scalar_type() == q.scalar_type() && on_same_device(*t, q), name, ": q, k and v must have one dtype and device");
  STD_TORCH_CHECK(same_leading(q, k, 3) && same_leading(k, v, 4) && size_at(q, 4) == size_at(k, 4), name,
                  ": the sizes of q, k and v do not fit");
  p.size = {size_at(q, 0), size_at(q, 1), size_at(q, 2), size_at(q, 3), size_at(k, 3), size_at(q, 4), size_at(v, 4)};
  for (const int64_t d : {p.size.d, p.size.dv})
    STD_TORCH_CHECK(0 < d && d <= kMaxHeadDim && d % kHeadDimMultiple == 0, name, ": D must be a multiple of ", kHeadDimMultiple,
                    " up to ", kMaxHeadDim, ", not ", d);
  STD_TORCH_CHECK(p.size.t < (int64_t(1) << 30) && p.size.s < (int64_t(1) << 30) && p.size.heads() < (int64_t(1) << 31), name,
                  ": too many queries, keys or heads");
  p.dtype = *type, p.scale = static_cast<float>(scale), p.causal = causal;
  p.q = rows(q), p.k = rows(k), p.v = rows(v);
  STD_TORCH_CHECK(biases.size() <= size_t(kMaxBiases), name, ": at most ", kMaxBiases, " biases");
  p.biases = static_cast<int>(biases.size());
  const int64_t scores[5] = {p.size.b, p.size.g, p.size.h, p.size.t, p.size.s};
  for (int i = 0; i < p.biases; ++i) {
    const Tensor& bias = biases[i];
    const std::optional<DType> bias_type = to_dtype(bias.scalar_type());
    STD_TORCH_CHECK(bias_type && (*bias_type == p.dtype || *bias_type == DType::kFloat32) && on_same_device(bias, q), name,
                    ": a bias must have q's dtype or float32, and be on its device");
    bool fits = bias.dim() == q.dim();
    for (int d = 0; fits && d < 5; ++d) fits = size_at(bias, d) == 1 || size_at(bias, d) == scores[d];
    STD_TORCH_CHECK(fits, name, ": a bias must have as many dimensions as q, each of size 1 or that of the scores");
    p.bias[i].data = static_cast<const char*>(bias.data_ptr());
    p.bias[i].dtype = *bias_type;
    for (int d = 0; d < 5; ++d) p.bias[i].stride[d] = stride_at(bias, d);
  }
}

inline std::vector<int64_t> statistics_sizes(const Tensor& q) {
  std::vector<int64_t> sizes = to_vector(q.sizes());
  sizes.back() = kStatistics;
  return sizes;
}

// The sizes of the bits of a mask with the scores' sizes.
inline std::vector<int64_t> bits_sizes(std::vector<int64_t> scores) {
  const size_t rank = scores.size();
  const int64_t queries = scores[rank - 2];
  scores[rank - 2] = kept_words(scores[rank - 1]), scores[rank - 1] = kept_queries(queries);
  return scores;
}

inline void describe_kept(Problem& p, const char* name, const Tensor& q, const std::optional<Tensor>& kept, double kept_scale) {
  if (!kept) return;
  std::vector<int64_t> scores = to_vector(q.sizes());
  scores.back() = p.size.s;
  STD_TORCH_CHECK(kept->scalar_type() == ScalarType::Long && on_same_device(*kept, q) && kept->is_contiguous() &&
                      to_vector(kept->sizes()) == bits_sizes(scores),
                  name, ": kept must be the bits of a mask of the scores");
  p.kept = static_cast<const uint64_t*>(kept->data_ptr());
  p.kept_scale = static_cast<float>(kept_scale);
}

template <typename Device>
struct Operators {
  static Tensor attention_mask_bits(const Tensor& mask) {
    STD_TORCH_CHECK(mask.dim() == 4 || mask.dim() == 5, "attention_mask_bits: the mask must have four or five dimensions");
    STD_TORCH_CHECK(mask.scalar_type() == ScalarType::Bool, "attention_mask_bits: the mask must be boolean");
    MaskBits p;
    for (int d = 0; d < 5; ++d) p.size[d] = size_at(mask, d), p.stride[d] = stride_at(mask, d);
    STD_TORCH_CHECK(p.size[0] * p.size[1] * p.size[2] < (int64_t(1) << 31), "attention_mask_bits: too many heads");
    Tensor bits = empty_like_sized(mask, bits_sizes(to_vector(mask.sizes())), ScalarType::Long);
    p.from = static_cast<const uint8_t*>(mask.data_ptr()), p.to = static_cast<uint64_t*>(bits.data_ptr());
    if (bits.numel() > 0) Device::mask_bits(p, mask);
    return bits;
  }

  static std::tuple<Tensor, Tensor> attention(const Tensor& q, const Tensor& k, const Tensor& v, std::vector<Tensor> biases, double scale,
                                              bool causal, std::optional<Tensor> kept, double kept_scale) {
    Forward p;
    describe(p, "attention", q, k, v, biases, scale, causal);
    describe_kept(p, "attention", q, kept, kept_scale);
    const Tensor inputs[3] = {aligned(q), aligned(k), aligned(v)};
    p.q = rows(inputs[0]), p.k = rows(inputs[1]), p.v = rows(inputs[2]);
    Tensor out = empty_by_tokens(q, p.size.t, p.size.dv);
    Tensor statistics = empty_like_sized(q, statistics_sizes(q), ScalarType::Float);
    p.out = rows(out), p.statistics = static_cast<float*>(statistics.data_ptr());
    if (p.size.s == 0) {  // the sum of no values
      torch::stable::zero_(out);
      torch::stable::fill_(statistics, -INFINITY);
    } else if (out.numel() > 0) {
      Device::forward(p, q);
    }
    return {out, statistics};
  }

  static std::vector<Tensor> attention_backward(
      const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, std::vector<Tensor> biases, const Tensor& out,
      const Tensor& statistics, double scale, bool causal, std::vector<bool> bias_grads, std::vector<bool> wide_bias_grads,
      std::optional<Tensor> kept, double kept_scale) {
    Backward p;
    describe(p, "attention_backward", q, k, v, biases, scale, causal);
    describe_kept(p, "attention_backward", q, kept, kept_scale);
    for (const Tensor* t : {&grad, &out}) {
      STD_TORCH_CHECK(t->scalar_type() == q.scalar_type() && on_same_device(*t, q), "attention_backward: grad and out must be as q");
      STD_TORCH_CHECK(same_leading(*t, q, 4) && size_at(*t, 4) == p.size.dv, "attention_backward: the sizes of grad and out do not fit");
    }
    STD_TORCH_CHECK(statistics.scalar_type() == ScalarType::Float && on_same_device(statistics, q) &&
                        to_vector(statistics.sizes()) == statistics_sizes(q),
                    "attention_backward: these are not the statistics of attention");
    STD_TORCH_CHECK(bias_grads.size() == biases.size() && (wide_bias_grads.empty() || wide_bias_grads.size() == biases.size()),
                    "attention_backward: bias_grads must have a flag a bias");
    const Tensor inputs[5] = {aligned(grad), aligned(q), aligned(k), aligned(v), aligned(out)}, by_row = statistics.is_contiguous() ? statistics : torch::stable::contiguous(statistics);
    p.grad = rows(inputs[0]), p.q = rows(inputs[1]), p.k = rows(inputs[2]), p.v = rows(inputs[3]), p.out = rows(inputs[4]);
    p.statistics = static_cast<const float*>(by_row.data_ptr());
    Tensor dq = empty_by_tokens(q, p.size.t, p.size.d), dk = empty_by_tokens(k, p.size.s, p.size.d),
           dv = empty_by_tokens(v, p.size.s, p.size.dv);
    p.dq = rows(dq), p.dk = rows(dk), p.dv = rows(dv);
    std::vector<Tensor> gradients = {dq, dk, dv};
    for (int i = 0; i < p.biases; ++i) {
      if (!bias_grads[i]) continue;
      const bool wide = !wide_bias_grads.empty() && wide_bias_grads[i];
      p.dbias[i].dtype = wide ? DType::kFloat32 : p.bias[i].dtype;
      gradients.push_back(empty_like_sized(biases[i], to_vector(biases[i].sizes()), wide ? ScalarType::Float : biases[i].scalar_type()));
      p.dbias[i].data = static_cast<char*>(gradients.back().data_ptr());
      for (int d = 0; d < 5; ++d) p.dbias[i].size[d] = size_at(biases[i], d);
    }
    if (p.size.heads() * p.size.t * p.size.s > 0) {
      Device::backward(p, q);
    } else {  // sums of nothing
      for (Tensor& t : gradients) torch::stable::zero_(t);
    }
    return gradients;
  }

  static void implement(torch::stable::detail::StableLibrary& m, const char* key) {
    direct::implement<&attention_mask_bits>(m, key, "attention_mask_bits");
    direct::implement<&attention>(m, key, "attention");
    direct::implement<&attention_backward>(m, key, "attention_backward");
  }
};

}  // namespace fusebackend::attention
