#include "attention/binding.h"

namespace fusebackend::attention {
namespace {

template <typename F>
void parallel(int64_t count, F f) {
  torch::stable::parallel_for(0, count, 1, f);
}

struct Cpu {
  static void mask_bits(const MaskBits& p, const Tensor&) {
    parallel(p.size[0] * p.size[1] * p.size[2], [&](int64_t begin, int64_t end) { mask_bits_cpu(p, begin, end); });
  }
  static void forward(const Forward& p, const Tensor&) {
    parallel(p.size.heads(), [&](int64_t begin, int64_t end) { forward_cpu(p, begin, end); });
  }
  static void backward(const Backward& p, const Tensor&) {
    parallel(p.size.heads(), [&](int64_t begin, int64_t end) { backward_cpu(p, begin, end); });
    for (int i = 0; i < p.biases; ++i) {
      const int64_t* size = p.dbias[i].size;
      if (p.dbias[i].data)
        parallel(size[0] * size[1] * size[2], [&](int64_t begin, int64_t end) { bias_gradient_cpu(p, i, begin, end); });
    }
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusebackend, CPU, m) { Operators<Cpu>::implement(m, "CPU"); }

}  // namespace fusebackend::attention
