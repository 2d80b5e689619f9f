// Boxes: the folded tile, for problems with short dimensions. A block carries a box of several dimensions through shared memory. On the
// way in, the box is a set of runs, each contiguous in the input over as many dimensions as are covered whole; on the way out it is a
// set of other runs, contiguous in the output. Both are walked in 16-byte chunks at any alignment: a run is read from the aligned
// chunk that holds its first element and keeps that shift in shared memory; the ends of an output run are written by elements.
//
// Where an output element lies in shared memory is the sum of two table entries, one for its place in its run and one for the run, so
// the gather costs no division.
#pragma once

#include "batch.cuh"
#include "cuda_plan.h"
#include "chunks.cuh"
#include "ops.cuh"

namespace fusebackend::tile {

constexpr int kBoxThreads = 256;

struct BoxDim {
  uint32_t extent, size;
  int64_t stride[3];  // by Role, bytes; kA is staged (and its partner), kB direct
};

struct BoxArgs {
  char* out;
  const char* staged;
  const char* partner;
  const char* direct;
  Extent staged_extent, direct_extent;
  bool staged_is_b;
  bool direct_follows;   // the direct input is contiguous wherever the output's runs are
  int rank, in_rank, out_rank;  // dimensions of the box, of an input run, of an output run
  int64_t run_step;      // bytes between neighbours in an input run
  BoxDim dim[kMaxRank];  // in the input's order, fastest first
  int out_order[kMaxRank];  // dims in the output's order
  // The other dimensions, and the boxes along each dimension of the box that is cut.
  int grid_rank;
  FastDiv grid_count[kMaxRank];
  int64_t grid_stride[3][kMaxRank];
  int grid_dim[kMaxRank];  // index into `dim`, or -1
  // Shared memory: the box, then its tables, sized for whole boxes.
  int run_capacity, in_runs_capacity, out_runs_capacity, tables_at;
};

// A box's extents and what follows from them. Boxes at the ends of a dimension are smaller.
struct BoxRuns {
  uint32_t extent[kMaxRank];
  uint32_t weight[kMaxRank];  // of a step along a dimension of the box: within a run, or between runs (packed)
  uint32_t in_length, in_runs, out_length, out_runs, pitch;
};

template <typename Op>
__global__ void __launch_bounds__(kBoxThreads) boxes_kernel(const __grid_constant__ BoxArgs args, const Op op) {
  using E = typename Op::Element;
  constexpr int W = sizeof(E), kCount = Chunk<E>::kCount;
  extern __shared__ __align__(16) char box[];
  __shared__ BoxRuns runs;
  int64_t* in_offset = reinterpret_cast<int64_t*>(box + args.tables_at);  // of a run in the input
  int64_t* out_offset = in_offset + args.in_runs_capacity;                // of a run in the output
  int64_t* direct_offset = out_offset + args.out_runs_capacity;
  int64_t* direct_in_run = direct_offset + (args.direct ? args.out_runs_capacity : 0);  // of an element in its output run
  uint32_t* run_place = reinterpret_cast<uint32_t*>(direct_in_run + (args.direct && !args.direct_follows ? args.run_capacity : 0));
  uint32_t* out_place = run_place + args.in_runs_capacity;
  uint32_t* element_place = out_place + args.out_runs_capacity;

  const char* staged = args.staged;
  const char* direct = args.direct;
  char* out = args.out;
  if (threadIdx.x < kMaxRank && int(threadIdx.x) < args.rank) runs.extent[threadIdx.x] = args.dim[threadIdx.x].extent;
  __syncthreads();
  uint32_t index = blockIdx.x;
  for (int d = 0; d < args.grid_rank; ++d) {
    uint32_t quotient, i;
    args.grid_count[d].divmod(index, quotient, i);
    index = quotient;
    out += i * args.grid_stride[kOut][d];
    staged += i * args.grid_stride[kA][d];
    direct += i * args.grid_stride[kB][d];
    const int k = args.grid_dim[d];
    if (k >= 0 && threadIdx.x == 0) runs.extent[k] = min(args.dim[k].extent, args.dim[k].size - i * args.dim[k].extent);
  }
  if (threadIdx.x == 0) {
    uint32_t length = 1, count = 1;
    for (int k = 0; k < args.in_rank; ++k) {
      runs.weight[k] = length * W;
      length *= runs.extent[k];
    }
    for (int k = args.in_rank; k < args.rank; ++k) {
      runs.weight[k] = count << 16;
      count *= runs.extent[k];
    }
    runs.in_length = length;
    runs.in_runs = count;
    // An odd number of chunks between runs keeps neighbours in different banks.
    runs.pitch = ((length * W + 2 * kChunkBytes - 2) / kChunkBytes | 1) * kChunkBytes;
    length = count = 1;
    for (int k = 0; k < args.rank; ++k) (k < args.out_rank ? length : count) *= runs.extent[args.out_order[k]];
    runs.out_length = length;
    runs.out_runs = count;
  }
  __syncthreads();
  const uint32_t in_length = runs.in_length, in_runs = runs.in_runs, out_length = runs.out_length, out_runs = runs.out_runs;

  for (uint32_t r = threadIdx.x; r < in_runs; r += kBoxThreads) {
    uint32_t rest = r;
    int64_t offset = 0;
    for (int k = args.in_rank; k < args.rank; ++k) {
      const uint32_t n = runs.extent[k], i = rest % n;
      rest /= n;
      offset += i * args.dim[k].stride[kA];
    }
    in_offset[r] = offset;
    run_place[r] = r * runs.pitch + (args.run_step == W && !args.partner ? phase_bytes(staged + offset) : 0);
  }
  __syncthreads();

  // In.
  const auto op_ordered = [&](E from_box, E from_direct) {
    return args.staged_is_b ? op(from_direct, from_box) : op(from_box, from_direct);
  };
  if (args.run_step == W && !args.partner) {
    const uint32_t per_run = (in_length + kCount - 1 + kCount - 1) / kCount;
    for (uint32_t i = threadIdx.x; i < in_runs * per_run; i += kBoxThreads) {
      const uint32_t r = i / per_run, j = i % per_run;
      const uint32_t place = run_place[r], shift = place % kChunkBytes / W;
      const int first = int(j * kCount) - int(shift);  // of the chunk's first element in the run
      if (first >= int(in_length)) continue;
      const char* from = staged + in_offset[r] + first * W;
      char* to = box + place + first * W;
      if (args.staged_extent.holds(from, kChunkBytes)) {
        cp_async_16(to, from);
      } else {
        for (int e = max(0, -first); e < min(kCount, int(in_length) - first); ++e)
          reinterpret_cast<E*>(to)[e] = reinterpret_cast<const E*>(from)[e];
      }
    }
    cp_async_commit();
  } else {
    const int64_t partner_offset = args.partner - args.staged;
    for (uint32_t i = threadIdx.x; i < in_runs * in_length; i += kBoxThreads) {
      const uint32_t r = i / in_length, j = i % in_length;
      const char* from = staged + in_offset[r] + j * args.run_step;
      E value = *reinterpret_cast<const E*>(from);
      if constexpr (Op::kBinary) {
        if (args.partner) value = op_ordered(value, *reinterpret_cast<const E*>(from + partner_offset));
      }
      *reinterpret_cast<E*>(box + run_place[r] + j * W) = value;
    }
  }

  // The output's tables, while the input is under way.
  const bool gathers_direct = Op::kBinary && args.direct && !args.direct_follows;
  for (uint32_t j = threadIdx.x; j < out_length; j += kBoxThreads) {
    uint32_t rest = j, place = 0;
    int64_t offset = 0;
    for (int k = 0; k < args.out_rank; ++k) {
      const int d = args.out_order[k];
      const uint32_t n = runs.extent[d], i = rest % n;
      rest /= n;
      place += i * runs.weight[d];
      offset += i * args.dim[d].stride[kB];
    }
    element_place[j] = place;
    if (gathers_direct) direct_in_run[j] = offset;
  }
  for (uint32_t c = threadIdx.x; c < out_runs; c += kBoxThreads) {
    uint32_t rest = c, place = 0;
    int64_t offset = 0, beside = 0;
    for (int k = args.out_rank; k < args.rank; ++k) {
      const int d = args.out_order[k];
      const uint32_t n = runs.extent[d], i = rest % n;
      rest /= n;
      place += i * runs.weight[d];
      offset += i * args.dim[d].stride[kOut];
      beside += i * args.dim[d].stride[kB];
    }
    out_place[c] = place;
    out_offset[c] = offset;
    if (Op::kBinary && args.direct) direct_offset[c] = beside;
  }
  cp_async_wait<0>();
  __syncthreads();

  // Out.
  const uint32_t per_run = (out_length + kCount - 1 + kCount - 1) / kCount;
  for (uint32_t i = threadIdx.x; i < out_runs * per_run; i += kBoxThreads) {
    const uint32_t c = i / per_run, j = i % per_run;
    char* to = out + out_offset[c];
    const int begin = int(j * kCount) - int(phase_bytes(to)) / W;  // of the chunk's first element in the run
    const int first = max(0, -begin), last = min(kCount, int(out_length) - begin);
    if (first >= last) continue;
    Chunk<E> beside;
    if constexpr (Op::kBinary) {
      if (args.direct && args.direct_follows)
        beside = load_chunk<E>(direct + direct_offset[c] + begin * W, W, first, last, args.direct_extent);
    }
    const uint32_t row = out_place[c];
    Chunk<E> chunk;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      if (k < first || k >= last) continue;
      const uint32_t place = row + element_place[begin + k];
      chunk.v[k] = *reinterpret_cast<const E*>(box + run_place[place >> 16] + (place & 0xffff));
      if constexpr (Op::kBinary) {
        if (args.direct) {
          if (!args.direct_follows) beside.v[k] = *reinterpret_cast<const E*>(direct + direct_offset[c] + direct_in_run[begin + k]);
          chunk.v[k] = op_ordered(chunk.v[k], beside.v[k]);
        }
      }
    }
    store_chunk(to + begin * W, W, first, last, true, chunk);
  }
}

template <typename Op>
cudaError_t launch_boxes(const Plan& plan, const BoxPlan& box, Op op, cudaStream_t stream) {
  const Problem& p = plan.problem;
  const int64_t w = p.element_bytes;
  const int staged = plan.staged, direct = staged == kA ? kB : kA;
  const bool has_direct = p.operands == 3 && !plan.staged_pair;
  BoxArgs args;
  args.out = p.data[kOut];
  args.staged = p.data[staged];
  args.partner = plan.staged_pair ? p.data[direct] : nullptr;
  args.direct = has_direct ? p.data[direct] : nullptr;
  args.staged_extent = {args.staged, args.staged + extent_bytes(p, Role(staged))};
  args.direct_extent = {args.direct, args.direct + (has_direct ? extent_bytes(p, Role(direct)) : 0)};
  args.staged_is_b = staged == kB;
  args.direct_follows = has_direct && box.direct_follows;
  args.rank = box.rank;
  args.in_rank = box.in_rank;
  args.out_rank = box.out_rank;
  args.run_step = p.strides[staged][box.dims[0]] * w;
  const auto stride = [&](int role, int d) {
    const int source = role == kOut ? int(kOut) : role == kA ? staged : direct;
    return source < p.operands ? p.strides[source][d] * w : 0;
  };
  int index_in_box[kMaxRank];
  std::fill_n(index_in_box, kMaxRank, -1);
  for (int k = 0; k < box.rank; ++k) {
    const int d = box.dims[k];
    index_in_box[d] = k;
    args.dim[k] = {uint32_t(box.extent[d]), uint32_t(p.sizes[d]), {stride(kOut, d), stride(kA, d), stride(kB, d)}};
  }
  int n = 0;
  for (int d = 0; d < p.rank; ++d)
    if (index_in_box[d] >= 0) args.out_order[n++] = index_in_box[d];
  args.grid_rank = 0;
  int64_t boxes = 1;
  for (int d = 0; d < p.rank; ++d) {
    const int64_t count = (p.sizes[d] + box.extent[d] - 1) / box.extent[d];
    if (count == 1) continue;
    const int g = args.grid_rank++;
    args.grid_count[g] = FastDiv(uint32_t(count));
    for (int r = 0; r < 3; ++r) args.grid_stride[r][g] = stride(r, d) * box.extent[d];
    args.grid_dim[g] = index_in_box[d];
    boxes *= count;
  }
  args.run_capacity = box.out_length;
  args.in_runs_capacity = box.in_runs;
  args.out_runs_capacity = box.out_runs;
  args.tables_at = box.data_bytes;
  boxes_kernel<Op><<<unsigned(boxes), kBoxThreads, box.shared_bytes, stream>>>(args, op);
  return cudaGetLastError();
}

}  // namespace fusebackend::tile
