// Operators without tensors, compiled into every library: what Python asks of the kernels, where there is no GPU as well.
//
//   attention_limits() -> (int biases, int head_dim, int head_dim_multiple): the most biases, and which sizes a head may have
//   attention_min_shared_bytes() -> int: the shared memory that a thread block must be able to have
//   attention_work(int[] sizes, int[] biases, bool causal, bool drops, bool backward, int multiprocessors, int capability_major) -> str: what
//       attention makes a GPU do (work.h).
//       sizes: B, G, H, T, S, D of queries and of values.  biases: of each, the bytes of an element, whether its gradient is wanted, whether
//       the kernels can read it without a copy, and its sizes, 1 or those of the scores.
#include <string>
#include <tuple>
#include <vector>

#include "attention/attention.h"
#include "attention/heads.h"
#include "attention/work.h"
#include "common/binding.h"

namespace fusebackend::attention {
namespace {

std::tuple<int64_t, int64_t, int64_t> attention_limits() { return {kMaxBiases, kMaxHeadDim, kHeadDimMultiple}; }

int64_t attention_min_shared_bytes() { return kMinSharedBytes; }

constexpr int kBiasFacts = 8;

std::string attention_work(const std::vector<int64_t>& sizes, const std::vector<int64_t>& biases, bool causal, bool drops, bool backward,
                           int64_t multiprocessors, int64_t capability_major) {
  STD_TORCH_CHECK(sizes.size() == 7 && biases.size() % kBiasFacts == 0 && biases.size() / kBiasFacts <= size_t(kMaxBiases) && multiprocessors > 0,
                  "attention_work: seven sizes, eight facts of each bias, and a number of multiprocessors");
  Backward p;
  p.size = {sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6]};
  p.causal = causal;
  static const uint64_t kSomeBits = 0;
  if (drops) p.kept = &kSomeBits;
  for (Rows* rows : {&p.q, &p.k, &p.v, &p.grad}) rows->stride[3] = 1;  // as ones that are not broadcast
  p.biases = int(biases.size()) / kBiasFacts;
  for (int i = 0; i < p.biases; ++i) {
    const int64_t* facts = &biases[i * kBiasFacts];
    Bias& bias = p.bias[i];
    bias.dtype = facts[0] == 4 ? DType::kFloat32 : DType::kBFloat16;
    for (int d = 0; d < 5; ++d) {
      const int64_t size = facts[3 + d];
      bias.stride[d] = size == 1 ? 0 : facts[2] && d < 4 ? kBiasVector : 1;  // as one that can be read, or can't
      if (facts[1]) p.dbias[i].size[d] = size;
    }
    if (!facts[2]) bias.data = reinterpret_cast<const char*>(1);
  }
  if (backward) return work_of(p, int(multiprocessors), int(capability_major));
  Forward forward;
  static_cast<Problem&>(forward) = p;
  return work_of(forward, int(multiprocessors), int(capability_major));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusebackend, CompositeExplicitAutograd, m) {
  m.impl("attention_limits", TORCH_BOX(&attention_limits));
  m.impl("attention_min_shared_bytes", TORCH_BOX(&attention_min_shared_bytes));
  m.impl("attention_work", TORCH_BOX(&attention_work));
}

}  // namespace fusebackend::attention
