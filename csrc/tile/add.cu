#include "launch.cuh"

namespace fusebackend::tile {
namespace {

template <typename T, typename Scalar>
cudaError_t launch_as(const Plan& plan, Scalar alpha, cudaStream_t stream) {
  if (plan.problem.element_bytes != int(sizeof(T))) return cudaErrorInvalidValue;
  return launch_plan(plan, AddOp<T>{static_cast<typename AddOp<T>::Scalar>(alpha)}, stream);
}

}  // namespace

cudaError_t launch_add(const Problem& problem, AddType type, Alpha alpha, cudaStream_t stream) {
  const Plan plan = make_plan(problem);
  if (plan.route == Route::kEmpty) return cudaSuccess;
  switch (type) {
    case AddType::kF64: return launch_as<double>(plan, alpha.real, stream);
    case AddType::kF32: return launch_as<float>(plan, alpha.real, stream);
    case AddType::kF16: return launch_as<__half>(plan, alpha.real, stream);
    case AddType::kBF16: return launch_as<__nv_bfloat16>(plan, alpha.real, stream);
    case AddType::kI8: return launch_as<uint8_t>(plan, alpha.integer, stream);
    case AddType::kI16: return launch_as<uint16_t>(plan, alpha.integer, stream);
    case AddType::kI32: return launch_as<uint32_t>(plan, alpha.integer, stream);
    case AddType::kI64: return launch_as<uint64_t>(plan, alpha.integer, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace fusebackend::tile
