// kTable: few rows that take many entries. Every thread sums into a table of its own in shared memory, so nothing is atomic, and the result
// does not depend on the order in which threads run.
#include "finish.cuh"

namespace fusebackend::accumulate {
namespace {

// The table route's shape: the widest vectors whose table of all rows still lets enough threads share a multiprocessor.
struct Table {
  int v = 0, blocks_per_sm = 0;
  SharedMemory shared;
};
constexpr int kStaticBytes = kTile<Flush::kTable> * 20 + 1200;  // the staged tile, and what the system takes of each block's share
Table table_shape(const Params& p, const Device& device) {
  const int acc = element_size(p.dtype) == 8 ? 8 : 4, widest = vector_width(p, false);
  Table t;
  for (int v : {8, 4, 2, 1}) {
    if (v > widest) continue;
    const size_t bytes = size_t(p.rows) * v * kThreads * acc;
    const int blocks = int(size_t(device.shared_bytes) / (bytes + kStaticBytes)), most = device.shared_bytes_per_block - kStaticBytes;
    if (bytes <= size_t(most) && blocks > t.blocks_per_sm) t = {v, std::min(blocks, 4), {int(bytes), most}};
    if (t.blocks_per_sm >= 2) break;
  }
  return t;
}

}  // namespace

bool table_fits(const Params& p, const Device& device) { return table_shape(p, device).v > 0; }

size_t table_bytes(const Params& p, const Device& device) {
  const Table t = table_shape(p, device);
  const Walk w = plan_walk(p, t.v, int64_t(device.sm_count) * t.blocks_per_sm, kTile<Flush::kTable>, true);
  return size_t(w.row_blocks) * p.rows * p.columns() * (element_size(p.dtype) == 8 ? 8 : 4);
}

cudaError_t launch_table(const Params& p, void* workspace, const Device& device, cudaStream_t stream) {
  const Table t = table_shape(p, device);
  return dispatch(p.dtype, [&](auto type) {
    using T = decltype(type);
    using A = Acc<T>;
    A* const partial = static_cast<A*>(workspace);
    const Args<A> a{p, plan_walk(p, t.v, int64_t(device.sm_count) * t.blocks_per_sm, kTile<Flush::kTable>, true), partial, {}};
    cudaError_t error = launch_walk<T, A, Flush::kTable>(a, t.v, stream, t.shared);
    return error == cudaSuccess ? finish<T>(p, partial, a.walk.row_blocks, device, stream) : error;
  });
}

}  // namespace fusebackend::accumulate
