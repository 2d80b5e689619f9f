// Which route, and the initialisation that all routes but the self-initialising ones share. See Route for what each is for; the figures
// behind the thresholds were measured on an H200.
#include <algorithm>

#include "launch.h"

namespace fusebackend::accumulate {
namespace {

int64_t slice_bytes(const Params& p) { return p.columns() * element_size(p.dtype); }

// Reductions move 1.9 TB/s through the L2 cache, where memory gives twice that. Sorting takes about 20 us and some nanoseconds an entry; and all
// of out is read and written. Wide rows that meet seldom are reduced about as fast as memory allows.
bool bucketed_pays(const Params& p, const Device& device) {
  if (rows_fit(p, 16 / element_size(p.dtype))) return false;
  const bool looks_up = p.source_index.data || p.weight.data;
  const bool half = is_half(p.dtype);
  const int64_t sorting = half ? (looks_up ? 80'000'000 : 66'000'000) : 56'000'000, written = p.rows * slice_bytes(p) * (half ? 8 : 5) / 4;
  return p.n * (slice_bytes(p) - 32) >= sorting + written && bucketed_fits(p, device);
}

// For 16-bit sums that are to be rounded once: wide rows are worth sorting for, unless they are few and there is little to sum.
Route rounded_once(const Params& p, const Device& device) {
  if (p.n * slice_bytes(p) >= 32 << 20 && p.n >= 2 * p.rows && bucketed_fits(p, device)) return Route::kBucketed;
  const bool much = p.n * p.columns() >= 1 << 25;
  const bool sorted = slice_bytes(p) >= 256 ? much || p.n < 64 * p.rows : much && slice_bytes(p) >= 128;
  return p.n >= 32768 && sorted ? Route::kSorted : Route::kWide;
}

Route choose(const Params& p, const Device& device) {
  if (p.plan) return Route::kSorted;
  const int64_t pieces = std::max<int64_t>(slice_bytes(p) / 16, 1);  // what threads share of a slice
  const bool half = is_half(p.dtype);
  const bool several = p.n >= 32 * p.rows;  // additions meet in each row
  // Integers need not mind the order, but their reductions, one by one, are slow where several meet; narrow ones have none, only a loop of
  // compare-and-swap.
  const bool slow = p.deterministic || (element_size(p.dtype) < 4 && p.n * p.columns() >= 1 << 21 && p.n < INT32_MAX && p.source_rows < UINT32_MAX);
  const bool in_one_order = is_floating(p.dtype) ? p.deterministic : slow && p.n >= 4 * p.rows && slice_bytes(p) >= 32;
  if (in_one_order || (half && p.precise)) {
    if (is_floating(p.dtype) && own_fits(p) && (p.n <= 32 || pieces >= 64)) return Route::kOwn;
    if (several && (p.n * slice_bytes(p) >= 1 << 20 || p.n >= 2048 * p.rows)) {
      if (grouped_fits(p, device)) return Route::kGrouped;
      if (table_fits(p, device)) return Route::kTable;
    }
    return !in_one_order && p.rows <= 2 * p.n ? rounded_once(p, device) : Route::kSorted;
  }
  // A second kernel pays where there is much to read, which reductions would slow down, or where those of a row, some ten nanoseconds each,
  // would queue up.
  if (several && (p.n * p.columns() >= 1 << 24 || p.n >= (half ? 256 : 512) * p.rows)) {
    if (grouped_fits(p, device)) return Route::kGrouped;
    if (table_pays(p, device)) return Route::kTable;
  }
  if (half && p.n >= 16 * p.rows) return own_fits(p) ? Route::kOwn : rounded_once(p, device);  // rounding at each addition would add up
  if (bucketed_pays(p, device)) return Route::kBucketed;
  if (p.n >= 16 * p.rows && p.n >= 1 << 17 && slice_bytes(p) >= 1024) return Route::kSorted;  // atomic additions would queue up
  return Route::kReduce;
}

bool initialises_itself(Route r) { return r != Route::kReduce && r != Route::kOwn; }

}  // namespace

cudaError_t query_device(Device& device) {
  constexpr int kDevices = 64;
  static Device cache[kDevices];
  static bool known[kDevices];
  int id;
  if (cudaError_t error = cudaGetDevice(&id); error != cudaSuccess) return error;
  if (id < kDevices && known[id]) {
    device = cache[id];
    return cudaSuccess;
  }
  cudaError_t error = cudaDeviceGetAttribute(&device.sm_count, cudaDevAttrMultiProcessorCount, id);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&device.major, cudaDevAttrComputeCapabilityMajor, id);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&device.shared_bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, id);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&device.shared_bytes_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, id);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&device.l2_bytes, cudaDevAttrL2CacheSize, id);
  if (error == cudaSuccess && id < kDevices) {
    cache[id] = device;
    known[id] = true;  // after the contents; every thread writes the same ones
  }
  return error;
}

Plan make_plan(const Params& p, const Device& device) {
  if (p.n == 0) return {Route::kReduce, 0};
  const Route route = choose(p, device);
  switch (route) {
    case Route::kWide: return {route, wide_bytes(p)};
    case Route::kTable: return {route, table_bytes(p, device)};
    case Route::kGrouped: return {route, grouped_bytes(p, device)};
    case Route::kBucketed: return {route, bucketed_bytes(p, device)};
    case Route::kSorted: return {route, sorted_bytes(p, device)};
    default: return {route, 0};
  }
}

cudaError_t launch(const Params& p, const Plan& plan, void* workspace, const Device& device, cudaStream_t stream) {
  if (!p.in_place() && (p.n == 0 || !initialises_itself(plan.route))) {
    const size_t bytes = size_t(p.out_numel) * element_size(p.dtype);
    const cudaError_t error = p.initial ? cudaMemcpyAsync(p.out, p.initial, bytes, cudaMemcpyDeviceToDevice, stream)
                                        : cudaMemsetAsync(p.out, 0, bytes, stream);
    if (error != cudaSuccess) return error;
  }
  if (p.n == 0) return cudaSuccess;
  switch (plan.route) {
    case Route::kReduce: return launch_reduce(p, device, stream);
    case Route::kOwn: return launch_own(p, device, stream);
    case Route::kWide: return launch_wide(p, workspace, device, stream);
    case Route::kTable: return launch_table(p, workspace, device, stream);
    case Route::kGrouped: return launch_grouped(p, workspace, device, stream);
    case Route::kBucketed: return launch_bucketed(p, workspace, device, stream);
    case Route::kSorted: return launch_sorted(p, workspace, device, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace fusebackend::accumulate
