// The launcher: a sort of the index's rows, and the sum behind it.
#include "common/cuda_common.cuh"
#include "row_scatter/row_scatter_sum.cuh"

namespace fusebackend::row_scatter {
namespace {

cudaError_t launch_sort(const Problem& p, const Plan& plan, const SortedRows& sorted, int64_t rows, cudaStream_t stream) {
  SortParams sort{};
  sort.index = {p.index, p.index_step, p.index_is_64};
  sort.own = p.own, sort.sources = int(p.sources), sort.bins = int(p.bins);
  sort.digit_bits = index_add::bit_width(uint64_t(p.bins - 1));
  sort.sorted = sorted;
  row_scatter_sort<<<uint32_t(rows), plan.sort_warps * 32, plan.sort_bytes, stream>>>(sort);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch(const Problem& p, const Plan& plan, void* workspace, cudaStream_t stream) {
  const int64_t rows = p.own.size();
  if (rows > INT32_MAX || plan.blocks() > INT32_MAX) return cudaErrorInvalidConfiguration;
  const SortedRows sorted{static_cast<uint16_t*>(workspace), plan.row_words, plan.begin_words};
  const cudaError_t error = launch_sort(p, plan, sorted, rows, stream);
  if (error != cudaSuccess) return error;
  const auto divisor = [](int64_t n) { return FastDiv(uint32_t(n > 0 ? n : 1)); };
  const int vector = 16 / element_size(p.dtype), bins_of_store = kStoreBytes / element_size(p.dtype);
  SumParams sum{};
  sum.source = p.source, sum.self = p.self, sum.out = p.out;
  sum.sources = int(p.sources), sum.bins = int(p.bins), sum.pitch = plan.pitch, sum.tile_rows = plan.tile_rows;
  sum.source_step = p.source_step, sum.run = plan.run, sum.tiles_of_run = ceil_div(plan.run, plan.tile_rows), sum.tiles = plan.tiles;
  sum.copies = p.shared.size(), sum.block_groups = plan.block_groups, sum.lists_at = plan.lists_at;
  sum.own = p.own, sum.shared = p.shared, sum.sorted = sorted;
  sum.by_chunks = divisor(p.sources / vector), sum.by_sources = divisor(p.sources), sum.by_rows = divisor(plan.tile_rows);
  sum.by_stores = divisor(ceil_div(p.bins, bins_of_store));
  sum.across = plan.across;
  switch (p.dtype) {
    case DType::kFloat32: return launch_sum_of<float>(sum, plan, stream);
    case DType::kFloat16: return launch_sum_of<__half>(sum, plan, stream);
    case DType::kBFloat16: return launch_sum_of<__nv_bfloat16>(sum, plan, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace fusebackend::row_scatter
