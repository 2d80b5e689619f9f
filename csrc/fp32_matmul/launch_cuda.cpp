// From a product to launches: the planes first, in bounded memory (halves.h), then the kernel.
#include <algorithm>
#include <utility>

#include "fp32_matmul/halves.h"
#include "fp32_matmul/launch.h"

namespace fusebackend::fp32_matmul {
namespace {

constexpr size_t aligned(size_t bytes) { return round_up(bytes, 256); }

// Makes the launches of one product; or launches nothing and only finds the bytes of workspace that are needed.
class Launcher {
 public:
  Launcher(Kernel kernel, char* workspace, size_t planes_limit, int sm_count, cudaStream_t stream)
      : kernel_(kernel), dry_run_(false), workspace_(workspace), limit_(planes_limit), sm_count_(sm_count), stream_(stream) {}
  static Launcher dry_run(Kernel kernel, size_t planes_limit, int sm_count) {
    Launcher launcher(kernel, nullptr, planes_limit, sm_count, nullptr);
    launcher.dry_run_ = true;
    return launcher;
  }

  size_t bytes() const { return bytes_; }

  // Halves p until its planes fit behind the first `used` bytes, and on where that costs next to nothing: as long as all pieces take at most
  // `allowed` (0: little more than p at once). Where p is halved along the rows of one operand, the other's planes are made once, if they leave
  // room for that one's.
  cudaError_t run(Problem p, size_t used = 0, double allowed = 0) {
    const size_t a = p.a.planes ? 0 : aligned(PlaneLayout(a_operand(p)).bytes());
    const size_t b = p.b.planes ? 0 : aligned(PlaneLayout(b_operand(p)).bytes());
    const bool must = used + a + b > limit_;
    if (kernel_ == Kernel::kFfma || (!must && used + a + b <= kFewPlanes)) return multiply(p, used, a, b);
    if (!allowed) allowed = kMostSlowdown * cost_of(p, kernel_, sm_count_);
    const Halves halves = best_halves(p, a, b, limit_ / 4, allowed, kernel_, sm_count_);
    if (halves.index == Index::kNone || (!must && halves.cost > allowed)) return multiply(p, used, a, b);
    if (must) allowed = std::max(allowed, kMostSlowdown * halves.cost);

    if (halves.keeps) {
      const bool is_b = halves.index == Index::kM;
      const Operand op = is_b ? b_operand(p) : a_operand(p);
      Matrix& x = is_b ? p.b : p.a;
      x.planes = at(used), x.planes_column_major = is_b ? !op.mn_inner : op.mn_inner;
      if (cudaError_t err = dry_run_ ? cudaSuccess : launch_split(&op, at(used), nullptr, nullptr, nullptr, 0, stream_)) return err;
      used += is_b ? b : a;
    }
    const auto [first, second] = halves.of(p);
    if (cudaError_t err = run(first, used, allowed / 2)) return err;
    return run(second, used, allowed / 2);
  }

 private:
  cudaError_t multiply(const Problem& problem, size_t used, size_t a_bytes, size_t b_bytes) {
    if (kernel_ == Kernel::kFfma) return dry_run_ ? cudaSuccess : launch_ffma(problem, stream_);
    const WgmmaPlan plan = kernel_ == Kernel::kWgmma ? plan_wgmma(problem, sm_count_) : WgmmaPlan{};
    const Problem p = plan.swap ? transposed(problem) : problem;
    if (plan.swap) std::swap(a_bytes, b_bytes);
    const size_t sums = used + a_bytes + b_bytes;
    const size_t ready = sums + (plan.split_tiles ? aligned(size_t(plan.grid) * kTileM * kTileN * sizeof(float)) : 0);
    const int flags = plan.split_tiles ? plan.grid * kPartialFlags : 0;
    bytes_ = std::max(bytes_, ready + aligned(flags * sizeof(int)));
    if (dry_run_) return cudaSuccess;

    const Operand a = a_operand(p), b = b_operand(p);
    const Partials partials{reinterpret_cast<float*>(at(sums)), reinterpret_cast<int*>(at(ready))};
    void *const a_new = a_bytes ? at(used) : nullptr, *const b_new = b_bytes ? at(used + a_bytes) : nullptr;
    if (cudaError_t err = launch_split(a_new ? &a : nullptr, a_new, b_new ? &b : nullptr, b_new, partials.ready, flags, stream_)) return err;
    const SplitOperands split{a, b, a_new ? a_new : p.a.planes, b_new ? b_new : p.b.planes};
    if (kernel_ == Kernel::kMma) return launch_mma(p, split, stream_);
#ifdef FUSE_HAS_SM90A
    return launch_wgmma(p, plan, split, partials, a_new || b_new || flags, stream_);
#else
    return cudaErrorNotSupported;
#endif
  }

  // In a dry run any address but null, which would mean that there are no planes.
  void* at(size_t offset) const { return dry_run_ ? reinterpret_cast<void*>(1) : workspace_ + offset; }

  Kernel kernel_;
  bool dry_run_;
  char* workspace_;
  size_t limit_;
  int sm_count_;
  cudaStream_t stream_;
  size_t bytes_ = 0;
};

}  // namespace

size_t workspace_bytes(const Problem& p, Kernel kernel, size_t planes_limit, int sm_count) {
  if (p.k == 0) return 0;
  Launcher launcher = Launcher::dry_run(kernel, planes_limit, sm_count);
  launcher.run(p);
  return launcher.bytes();
}

cudaError_t launch(const Problem& p, Kernel kernel, void* workspace, size_t planes_limit, int sm_count, cudaStream_t stream) {
  if (std::max({p.m, p.n, p.k}) > INT32_MAX - 2 * kTileN) return cudaErrorInvalidValue;
  if (p.k == 0) return launch_ffma(p, stream);  // C = beta * D: nothing to split
  return Launcher(kernel, static_cast<char*>(workspace), planes_limit, sm_count, stream).run(p);
}

}  // namespace fusebackend::fp32_matmul
