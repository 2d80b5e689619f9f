#include "launch.cuh"

namespace fusebackend::tile {
namespace {

template <typename T>
cudaError_t launch_as(const Plan& plan, const Alpha& alpha, bool integers, cudaStream_t stream) {
  if (plan.problem.element_bytes != int(sizeof(T))) return cudaErrorInvalidValue;
  using Op = AddOp<T>;
  const auto factor = std::is_integral_v<T> ? typename Op::Scalar(alpha.integer) : typename Op::Scalar(alpha.real);
  return launch_plan(plan, Op{factor, typename Op::Integer(alpha.integer), integers}, stream);
}

}  // namespace

cudaError_t launch_add(const Problem& problem, AddType type, Alpha alpha, cudaStream_t stream) {
  const Plan plan = make_plan(problem);
  if (plan.route == Route::kEmpty) return cudaSuccess;
  switch (type) {
    case AddType::kF64: return launch_as<double>(plan, alpha, false, stream);
    case AddType::kI64: return launch_as<double>(plan, alpha, true, stream);
    case AddType::kF32: return launch_as<float>(plan, alpha, false, stream);
    case AddType::kI32: return launch_as<float>(plan, alpha, true, stream);
    case AddType::kBF16: return launch_as<__nv_bfloat16>(plan, alpha, false, stream);
    case AddType::kF16: return launch_as<__half>(plan, alpha, false, stream);
    case AddType::kI16: return launch_as<uint16_t>(plan, alpha, true, stream);
    case AddType::kI8: return launch_as<uint8_t>(plan, alpha, true, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace fusebackend::tile
