// computed_sums(Tensor[] inputs, str program, str types, int batch_dims, bool means) -> Tensor[]
// computed_rows(Tensor[] inputs, str program, str types, bool keeps_order) -> Tensor[]
#include <algorithm>
#include <numeric>

#include "common/device_properties.h"
#include "common/workspace.h"
#include "computed_sums/binding.h"
#include "computed_sums/launch.h"

namespace fusebackend::computed_sums {
namespace {

std::string text(const std::vector<int64_t>& sizes) {
  std::string all = "[";
  for (size_t d = 0; d < sizes.size(); ++d) all += (d > 0 ? ", " : "") + std::to_string(sizes[d]);
  return all + "]";
}

// The sizes to which those of all inputs broadcast.
std::vector<int64_t> domain_of(const std::vector<Tensor>& inputs) {
  std::vector<int64_t> domain = to_vector(inputs[0].sizes());
  STD_TORCH_CHECK(domain.size() >= 2, "computed_sums: input 0 has ", domain.size(), " dims; at least 2 are needed, the last of which are columns");
  for (size_t k = 0; k < inputs.size(); ++k) {
    const std::vector<int64_t> sizes = to_vector(inputs[k].sizes());
    STD_TORCH_CHECK(sizes.size() == domain.size(), "computed_sums: input ", k, " has ", sizes.size(), " dims, and input 0 has ", domain.size());
    for (size_t d = 0; d < domain.size(); ++d) {
      const bool fits = sizes[d] == domain[d] || sizes[d] == 1 || domain[d] == 1;
      STD_TORCH_CHECK(fits, "computed_sums: input ", k, " of sizes ", text(sizes), " does not broadcast with those before it, of sizes ", text(domain));
      if (domain[d] == 1) domain[d] = sizes[d];
    }
  }
  bool full = false;
  for (const Tensor& input : inputs) full |= to_vector(input.sizes()) == domain;
  STD_TORCH_CHECK(full, "computed_sums: no input has the sizes to which all of them broadcast, ", text(domain));
  return domain;
}

// How an input lies. One that lies in no way that the kernel reads is copied: within its own sizes if that is enough.
Lies find_or_copy(Tensor& input, const std::vector<int64_t>& domain, int64_t batch_dims) {
  const auto found = [&] { return describe(to_vector(input.sizes()), to_vector(input.strides()), domain, batch_dims); };
  if (const auto lies = found()) return *lies;
  input = torch::stable::contiguous(input);
  if (const auto lies = found()) return *lies;
  Tensor full = empty_like_sized(input, domain);
  torch::stable::copy_(full, input);
  input = full;
  return *found();
}

std::vector<int64_t> strides_of(const std::vector<int64_t>& sizes, const std::vector<size_t>& order) {
  std::vector<int64_t> strides(sizes.size());
  int64_t step = 1;
  for (size_t i = order.size(); i-- > 0;) strides[order[i]] = step, step *= std::max<int64_t>(sizes[order[i]], 1);
  return strides;
}

// How tensors lie in memory like the first input that has the full size, if there are no gaps in that; contiguous otherwise.
std::vector<int64_t> strides_like(const std::vector<Tensor>& inputs, const std::vector<int64_t>& domain) {
  std::vector<size_t> order(domain.size());
  std::iota(order.begin(), order.end(), 0);
  const std::vector<int64_t> contiguous = strides_of(domain, order);
  for (const Tensor& input : inputs) {
    if (to_vector(input.sizes()) != domain) continue;
    const std::vector<int64_t> given = to_vector(input.strides());
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return given[a] > given[b]; });
    const std::vector<int64_t> dense = strides_of(domain, order);
    for (size_t d = 0; d < domain.size(); ++d)
      if (domain[d] != 1 && given[d] != dense[d]) return contiguous;
    return dense;
  }
  return contiguous;
}

// What becomes of the results: they are added over all dims but the first `batch_dims` and the last one, or stored.
struct Addition {
  int64_t batch_dims;
  bool means;
};

std::vector<Tensor> compute(std::vector<Tensor> inputs, const std::string& program, const std::string& types, std::optional<Addition> addition) {
  check_counts(inputs.size(), types.size());
  const Tensor& first = inputs[0];
  const Program& prepared = prepare(program);
  Variant v{prepared.text, int(prepared.numbers.size()), "", "", int(types.size()), "", 1};
  for (size_t k = 0; k < inputs.size(); ++k) {
    STD_TORCH_CHECK(inputs[k].is_cuda() && on_same_device(inputs[k], first), "computed_sums: input ", k, " is not on the GPU of input 0");
    v.types += input_type(inputs[k].scalar_type(), k);
  }
  const std::vector<int64_t> domain = domain_of(inputs);
  const int64_t batch_dims = addition ? addition->batch_dims : 0, most_dims = int64_t(domain.size()) - 2;
  const bool fits = 0 <= batch_dims && batch_dims <= most_dims;
  STD_TORCH_CHECK(fits, "computed_sums: batch_dims = ", batch_dims, "; of ", domain.size(), " dims 0 to ", most_dims, " are accepted");
  Arguments p{};
  int64_t batch = 1, rows = 1;
  for (int64_t d = 0; d <= most_dims; ++d) (d < batch_dims ? batch : rows) *= domain[d];
  p.columns = domain.back();
  p.scale = addition && addition->means ? 1.0f / float(rows) : 1.0f;
  std::vector<int64_t> sizes = domain;  // of a result
  if (addition) sizes.erase(sizes.begin() + batch_dims, sizes.end() - 1);
  std::copy(prepared.numbers.begin(), prepared.numbers.end(), p.numbers);
  std::vector<Tensor> results;
  for (size_t s = 0; s < types.size(); ++s) {
    const ScalarType dtype = result_dtype(types[s]);
    p.results[s] = types[s];
    if (!addition) v.stored += char(p.results[s]);
    results.push_back(empty_like_sized(first, sizes, dtype));
    p.out[s] = results[s].data_ptr();
  }
  const CudaScope scope(first);
  if (batch * rows * p.columns == 0) {
    translate(v.program, v.numbers, v.types, v.outs);  // refuses it if it is malformed
    for (size_t s = 0; addition && s < results.size(); ++s) {
      const size_t bytes = size_t(batch * p.columns) * element_bytes(char(p.results[s]));
      const int value = addition->means ? 0xff : 0;  // a mean of no rows is NaN
      if (bytes > 0) check_cuda(cudaMemsetAsync(p.out[s], value, bytes, scope.stream()), "computed_sums");
    }
    return results;
  }
  STD_TORCH_CHECK(batch <= kMostRows / rows, "computed_sums: ", batch * rows, " rows; at most ", kMostRows, " are accepted");
  p.batch = uint32_t(batch), p.rows = uint32_t(rows);
  for (size_t k = 0; k < inputs.size(); ++k) {
    const Lies lies = find_or_copy(inputs[k], domain, batch_dims);
    v.kinds += lies.kind;
    p.inputs[k] = {inputs[k].data_ptr(), lies.row_stride, FastDiv(uint32_t(lies.divisor)), FastDiv(uint32_t(lies.period))};
  }
  v.vector = vector_of(v, p);
  const Kernel& kernel = kernel_of(v);
  const Plan plan = make_plan(v, batch, rows, p.columns, sm_count());
  const Workspace partials(addition ? plan.partials(p.columns) * v.outs * sizeof(float) : 0);
  check_cuda(launch(kernel, v, plan, p, partials.as<float>(), scope.stream()), "computed_sums");
  return results;
}

std::vector<Tensor> computed_sums(std::vector<Tensor> inputs, const std::string& program, const std::string& types, int64_t batch_dims, bool means) {
  return compute(std::move(inputs), program, types, Addition{batch_dims, means});
}

std::vector<Tensor> computed_rows(std::vector<Tensor> inputs, const std::string& program, const std::string& types, bool keeps_order) {
  std::vector<Tensor> given;
  if (keeps_order) given = inputs;
  std::vector<Tensor> results = compute(std::move(inputs), program, types, std::nullopt);
  if (!keeps_order) return results;
  const std::vector<int64_t> domain = to_vector(results[0].sizes()), strides = strides_like(given, domain);
  if (strides == to_vector(results[0].strides())) return results;
  for (Tensor& result : results) {
    Tensor moved = empty_strided_like(result, domain, strides);
    torch::stable::copy_(moved, result);
    result = moved;
  }
  return results;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusebackend, CUDA, m) {
  m.impl("computed_sums", TORCH_BOX(&computed_sums));
  m.impl("computed_rows", TORCH_BOX(&computed_rows));
}

}  // namespace fusebackend::computed_sums
