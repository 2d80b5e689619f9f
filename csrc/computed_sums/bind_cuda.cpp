// computed_sums(Tensor[] inputs, str program, str types, int batch_dims, bool means, int[]? order) -> Tensor[]
// computed_rows(Tensor[] inputs, str program, str types, bool keeps_order, int[]? order) -> Tensor[]
#include <algorithm>
#include <numeric>

#include "common/device_properties.h"
#include "common/direct_call.h"
#include "common/workspace.h"
#include "computed_sums/binding.h"
#include "computed_sums/launch.h"

namespace fusebackend::computed_sums {
namespace {

using Dims = std::vector<int64_t>;

std::string text(const Dims& sizes) {
  std::string all = "[";
  for (size_t d = 0; d < sizes.size(); ++d) all += (d > 0 ? ", " : "") + std::to_string(sizes[d]);
  return all + "]";
}

// The sizes and strides of an input, its dims in the order in which the kernels walk them. One of a single dim has the columns.
struct Layout {
  Dims sizes, strides;
};

Layout layout_of(const Tensor& input, const Dims& order) {
  const Dims sizes = to_vector(input.sizes()), strides = to_vector(input.strides());
  Layout found = {Dims(order.size(), 1), Dims(order.size(), 0)};
  if (sizes.size() == 1) {
    found.sizes.back() = sizes[0], found.strides.back() = strides[0];
  } else {
    for (size_t d = 0; d < order.size(); ++d) found.sizes[d] = sizes[size_t(order[d])], found.strides[d] = strides[size_t(order[d])];
  }
  return found;
}

size_t rank_of(const std::vector<Tensor>& inputs) {
  size_t rank = 0;
  for (const Tensor& input : inputs) rank = std::max(rank, size_t(input.dim()));
  STD_TORCH_CHECK(rank >= 2, "computed_sums: inputs have at most ", rank, " dims; at least 2 are needed, the last of which are columns");
  for (size_t k = 0; k < inputs.size(); ++k) {
    const size_t dims = size_t(inputs[k].dim());
    STD_TORCH_CHECK(dims == rank || dims == 1, "computed_sums: input ", k, " has ", dims, " dims, others have ", rank, "; as many, or 1, are accepted");
  }
  return rank;
}

Dims check_order(const std::optional<Dims>& order, size_t rank) {
  Dims dims(rank);
  std::iota(dims.begin(), dims.end(), 0);
  if (!order) return dims;
  STD_TORCH_CHECK(std::is_permutation(order->begin(), order->end(), dims.begin(), dims.end()), "computed_sums: order ", text(*order),
                  " does not name each of the dims 0 to ", rank - 1, " once");
  return *order;
}

// Sizes that are given in the order in which the dims are walked, in the order of the tensors' dims.
Dims unordered(const Dims& walked, const Dims& order) {
  Dims sizes(order.size());
  for (size_t i = 0; i < order.size(); ++i) sizes[size_t(order[i])] = walked[i];
  return sizes;
}

// The sizes to which those of all inputs broadcast, in the order in which the dims are walked.
Dims domain_of(const std::vector<Tensor>& inputs, const std::vector<Layout>& layouts, const Dims& order) {
  Dims domain(order.size(), 1);
  for (size_t k = 0; k < inputs.size(); ++k) {
    const Dims& sizes = layouts[k].sizes;
    for (size_t d = 0; d < domain.size(); ++d) {
      const bool fits = sizes[d] == domain[d] || sizes[d] == 1 || domain[d] == 1;
      STD_TORCH_CHECK(fits, "computed_sums: input ", k, " of sizes ", text(to_vector(inputs[k].sizes())),
                      " does not broadcast with those before it, of sizes ", text(unordered(domain, order)));
      if (domain[d] == 1) domain[d] = sizes[d];
    }
  }
  const bool full = std::any_of(layouts.begin(), layouts.end(), [&](const Layout& l) { return l.sizes == domain; });
  STD_TORCH_CHECK(full, "computed_sums: no input has the sizes to which all of them broadcast, ", text(unordered(domain, order)));
  return domain;
}

// Strides, by dim, of a tensor without gaps whose dims lie in memory in an order.
Dims strides_of(const Dims& sizes, const Dims& order) {
  Dims strides(sizes.size());
  int64_t step = 1;
  for (size_t i = order.size(); i-- > 0;) strides[size_t(order[i])] = step, step *= std::max<int64_t>(sizes[size_t(order[i])], 1);
  return strides;
}

// How an input lies. One that lies in no way that the kernel reads is copied: within its own sizes if that is enough, as it is for columns alone.
Lies find_or_copy(Tensor& input, const Layout& layout, const Dims& order, const Dims& domain, int64_t batch_dims) {
  const auto found = [&](const Layout& l) { return describe(l.sizes, l.strides, domain, batch_dims); };
  if (const auto lies = found(layout)) return *lies;
  const auto copy = [&](const Dims& sizes, const Dims& strides) {
    Tensor copied = empty_strided_like(input, sizes, strides);
    torch::stable::copy_(copied, input);
    input = copied;
    return found(layout_of(input, order));
  };
  const Dims own = to_vector(input.sizes()), full = unordered(domain, order);
  if (const auto lies = copy(own, own.size() == 1 ? Dims{1} : strides_of(own, order))) return *lies;
  return *copy(full, strides_of(full, order));
}

// How tensors lie in memory like the first input that has the full size, if there are no gaps in that; contiguous otherwise.
Dims strides_like(const std::vector<Tensor>& inputs, const Dims& sizes) {
  Dims order(sizes.size());
  std::iota(order.begin(), order.end(), 0);
  const Dims contiguous = strides_of(sizes, order);
  for (const Tensor& input : inputs) {
    if (to_vector(input.sizes()) != sizes) continue;
    const Dims given = to_vector(input.strides());
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return given[size_t(a)] > given[size_t(b)]; });
    const Dims dense = strides_of(sizes, order);
    for (size_t d = 0; d < sizes.size(); ++d)
      if (sizes[d] != 1 && given[d] != dense[d]) return contiguous;
    return dense;
  }
  return contiguous;
}

// What becomes of the results: they are added over all dims but the first `batch_dims` and the last one, or stored.
struct Addition {
  int64_t batch_dims;
  bool means;
};

std::vector<Tensor> compute(std::vector<Tensor> inputs, const std::string& program, const std::string& types, std::optional<Addition> addition,
                            const std::optional<Dims>& given_order) {
  check_counts(inputs.size(), types.size());
  const Tensor& first = inputs[0];
  const Program& prepared = prepare(program);
  Variant v{prepared.text, int(prepared.numbers.size()), "", "", int(types.size()), "", 1};
  for (size_t k = 0; k < inputs.size(); ++k) {
    STD_TORCH_CHECK(inputs[k].is_cuda() && on_same_device(inputs[k], first), "computed_sums: input ", k, " is not on the GPU of input 0");
    v.types += input_type(inputs[k].scalar_type(), k);
  }
  const Dims order = check_order(given_order, rank_of(inputs));
  std::vector<Layout> layouts;
  for (const Tensor& input : inputs) layouts.push_back(layout_of(input, order));
  const Dims domain = domain_of(inputs, layouts, order);
  const int64_t batch_dims = addition ? addition->batch_dims : 0, most_dims = int64_t(domain.size()) - 2;
  const bool fits = 0 <= batch_dims && batch_dims <= most_dims;
  STD_TORCH_CHECK(fits, "computed_sums: batch_dims = ", batch_dims, "; of ", domain.size(), " dims 0 to ", most_dims, " are accepted");
  Arguments p{};
  int64_t batch = 1, rows = 1;
  for (int64_t d = 0; d <= most_dims; ++d) (d < batch_dims ? batch : rows) *= domain[d];
  p.columns = domain.back();
  p.scale = addition && addition->means ? 1.0f / float(rows) : 1.0f;
  Dims sizes = addition ? domain : unordered(domain, order);  // of a result
  if (addition) sizes.erase(sizes.begin() + batch_dims, sizes.end() - 1);
  std::copy(prepared.numbers.begin(), prepared.numbers.end(), p.numbers);
  std::vector<Tensor> results;
  for (size_t s = 0; s < types.size(); ++s) {
    const ScalarType dtype = result_dtype(types[s]);
    p.results[s] = types[s];
    if (!addition) v.stored += char(p.results[s]);
    results.push_back(addition ? empty_like_sized(first, sizes, dtype) : empty_strided_like(first, sizes, strides_of(sizes, order), dtype));
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
    const Lies lies = find_or_copy(inputs[k], layouts[k], order, domain, batch_dims);
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

std::vector<Tensor> computed_sums(std::vector<Tensor> inputs, const std::string& program, const std::string& types, int64_t batch_dims, bool means,
                                  std::optional<Dims> order) {
  return compute(std::move(inputs), program, types, Addition{batch_dims, means}, order);
}

std::vector<Tensor> computed_rows(std::vector<Tensor> inputs, const std::string& program, const std::string& types, bool keeps_order,
                                  std::optional<Dims> order) {
  std::vector<Tensor> given;
  if (keeps_order) given = inputs;
  std::vector<Tensor> results = compute(std::move(inputs), program, types, std::nullopt, order);
  if (!keeps_order) return results;
  const Dims sizes = to_vector(results[0].sizes()), strides = strides_like(given, sizes);
  if (strides == to_vector(results[0].strides())) return results;
  for (Tensor& result : results) {
    Tensor moved = empty_strided_like(result, sizes, strides);
    torch::stable::copy_(moved, result);
    result = moved;
  }
  return results;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusebackend, CUDA, m) {
  direct::implement<&computed_sums>(m, "CUDA", "computed_sums");
  direct::implement<&computed_rows>(m, "CUDA", "computed_rows");
}

}  // namespace fusebackend::computed_sums
