// Two kernels. The first streams x: a block sums some columns of some of the rows, `lanes` rows at once, a thread one vector of each of its
// rows. Blocks take turns, so that all of them read the same part of memory. The second kernel adds what the blocks leave. Each order of additions follows from the shape alone, so that results are the same in every run.
#include <type_traits>

#include "column_sum/rows.cuh"
#include "common/programmatic_launch.cuh"

namespace fusebackend::column_sum {
namespace {

constexpr int kStepsOfASum = 16;   // steps (kRowsAtOnce rows of a thread) that are added one after the other, before they are added to a second sum: errors grow with these

template <typename In, typename Acc, int kBytes>
__global__ void __launch_bounds__(kMostThreads, kBlocks<Acc>) column_sum_rows(const Rows p) {
  constexpr int kN = kBytes / int(sizeof(In));
  extern __shared__ __align__(16) char shared[];
  Acc* const sums = reinterpret_cast<Acc*>(shared);
  launch_dependents();

  const uint32_t tile = blockIdx.x % p.tiles, above = blockIdx.x / p.tiles, split = above % p.splits, batch = above / p.splits;
  const int lane = threadIdx.x / p.tile_vectors, vector = threadIdx.x - lane * p.tile_vectors;
  const int64_t column = int64_t(tile) * p.tile_vectors + vector;  // in vectors
  const bool active = lane < p.lanes && column < p.width;

  Acc sum[kN] = {}, second[kN] = {};
  if (active) {
    const int64_t stride = int64_t(p.lanes) * p.splits, begin = int64_t(split) * p.lanes + lane;  // rows
    const int64_t step = stride * p.row_stride;
    const In* const matrix = static_cast<const In*>(p.x) + batch * p.batch_stride + column * kN;
    const In* from = matrix + begin * p.row_stride;
    int64_t left = p.rows > begin ? (p.rows - begin + stride - 1) / stride : 0;  // rows
    for (int steps = 0; left >= kRowsAtOnce; left -= kRowsAtOnce) {
      Vec<In, kN> x[kRowsAtOnce];
#pragma unroll
      for (int u = 0; u < kRowsAtOnce; ++u, from += step) x[u] = load_once<In, kN>(from);
#pragma unroll
      for (int i = 0; i < kN; ++i) {
        Acc tree[kRowsAtOnce];
#pragma unroll
        for (int u = 0; u < kRowsAtOnce; ++u) tree[u] = Acc(widen(x[u].v[i]));
#pragma unroll
        for (int half = kRowsAtOnce / 2; half > 0; half /= 2) {
#pragma unroll
          for (int u = 0; u < half; ++u) tree[u] += tree[u + half];
        }
        sum[i] += tree[0];
      }
      if (++steps == kStepsOfASum) {
        steps = 0;
#pragma unroll
        for (int i = 0; i < kN; ++i) second[i] += sum[i], sum[i] = 0;
      }
    }
    Vec<In, kN> x[kRowsAtOnce];
#pragma unroll
    for (int u = 0; u < kRowsAtOnce; ++u, from += step)
      if (u < left) x[u] = load_once<In, kN>(from);
#pragma unroll
    for (int u = 0; u < kRowsAtOnce; ++u)
      if (u < left) {
#pragma unroll
        for (int i = 0; i < kN; ++i) sum[i] += Acc(widen(x[u].v[i]));
      }
    if (p.tail > 0 && split + 1 == p.splits && lane == 0) {
      const In* const last = matrix + p.rows * p.row_stride;
#pragma unroll
      for (int i = 0; i < kN; ++i)
        if (column * kN + i < p.tail) sum[i] += Acc(widen(last[i]));
    }
#pragma unroll
    for (int i = 0; i < kN; ++i) sum[i] += second[i];
  }
  // The lanes' sums, in a tree: the upper half of them is added to the lower.
  for (int count = p.lanes; count > 1;) {
    const int half = (count + 1) / 2;
    if (active && lane >= half && lane < count) {
#pragma unroll
      for (int i = 0; i < kN; ++i) sums[(threadIdx.x - half * p.tile_vectors) * kN + i] = sum[i];
    }
    __syncthreads();
    if (active && lane < count - half) {
#pragma unroll
      for (int i = 0; i < kN; ++i) sum[i] += sums[threadIdx.x * kN + i];
    }
    __syncthreads();
    count = half;
  }
  if (!active || lane != 0) return;
  const int64_t at = (int64_t(batch) * p.splits + split) * p.width * kN + column * kN;
  if (p.finished) {
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      if constexpr (std::is_same_v<Acc, double>) store_result(p.out, at + i, sum[i] / p.wide_divisor, p.result);
      else store_result(p.out, at + i, sum[i] / p.divisor, p.result);
    }
  } else {
    // The partial sums of a batch are `splits * fold` rows of `columns`, since a folded row is `fold` rows one behind the other.
#pragma unroll
    for (int i = 0; i < kN; ++i) static_cast<Acc*>(p.out)[at + i] = sum[i];
  }
}

// The sums of the columns of `terms` rows of partial sums, in fp64: these are few additions, of the largest numbers. A block has
// 2^column_bits columns, and a thread every n-th term of one, where n such threads share a column.
template <typename Acc>
__global__ void __launch_bounds__(kFinalThreads) column_sum_partials(const Acc* partials, void* out, int64_t terms, int64_t columns,
                                                                     uint32_t tiles, int column_bits, double divisor, DType result) {
  constexpr int kAtOnce = 8;
  __shared__ double sums[kFinalThreads];
  wait_for_previous_kernel();
  const uint32_t tile = blockIdx.x % tiles, batch = blockIdx.x / tiles;
  const int block_columns = 1 << column_bits, lanes = kFinalThreads >> column_bits;
  const int lane = threadIdx.x >> column_bits, own = threadIdx.x & (block_columns - 1);
  const int64_t column = int64_t(tile) * block_columns + own;
  double sum = 0;
  if (column < columns) {
    const Acc* const from = partials + int64_t(batch) * terms * columns + column;
    for (int64_t i = lane; i < terms; i += kAtOnce * lanes) {
      Acc x[kAtOnce];
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) x[u] = i + u * lanes < terms ? from[(i + u * lanes) * columns] : Acc(0);
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) sum += double(x[u]);
    }
  }
  sums[threadIdx.x] = sum;
  for (int half = lanes / 2; half > 0; half /= 2) {
    __syncthreads();
    if (lane < half) sums[threadIdx.x] = sum += sums[threadIdx.x + half * block_columns];
  }
  if (lane == 0 && column < columns) store_result(out, int64_t(batch) * columns + column, sum / divisor, result);
}

template <typename In, typename Acc, int kBytes>
cudaError_t launch_rows(const Rows& rows, const Plan& plan, int64_t blocks, cudaStream_t stream) {
  const size_t shared = plan.lanes > 1 ? size_t(plan.threads) * (kBytes / sizeof(In)) * sizeof(Acc) : 0;
  column_sum_rows<In, Acc, kBytes><<<uint32_t(blocks), plan.threads, shared, stream>>>(rows);
  return cudaGetLastError();
}

template <typename In, typename Acc>
cudaError_t launch_both(const Problem& p, const Plan& plan, void* partials, cudaStream_t stream) {
  const int64_t terms = plan.splits * plan.fold;
  const int bits = final_column_bits(terms);
  const int64_t blocks = plan.blocks(p), final_tiles = ((p.columns - 1) >> bits) + 1;
  if (blocks > INT32_MAX || final_tiles * p.batch > INT32_MAX) return cudaErrorInvalidConfiguration;
  const bool finished = plan.partials(p) == 0;
  const Rows rows = rows_of(p, plan, finished ? p.out : partials);
  cudaError_t error = cudaErrorInvalidValue;
  if (plan.vector_bytes == 16) error = launch_rows<In, Acc, 16>(rows, plan, blocks, stream);
  else if (plan.vector_bytes == sizeof(In)) error = launch_rows<In, Acc, sizeof(In)>(rows, plan, blocks, stream);
  else if constexpr (sizeof(In) == 2) {
    if (plan.vector_bytes == 4) error = launch_rows<In, Acc, 4>(rows, plan, blocks, stream);
  }
  if (error != cudaSuccess || finished) return error;
  return launch_dependent(column_sum_partials<Acc>, dim3(uint32_t(final_tiles * p.batch)), dim3(kFinalThreads), 0, true, stream,
                          static_cast<const Acc*>(partials), p.out, terms, p.columns, uint32_t(final_tiles), bits,
                          rows.wide_divisor, p.result);
}

}  // namespace

cudaError_t launch(const Problem& p, const Plan& plan, void* partials, cudaStream_t stream) {
  const bool wide = p.in_fp64();
  switch (p.in) {
    case DType::kFloat64: return launch_both<double, double>(p, plan, partials, stream);
    case DType::kFloat32: return wide ? launch_both<float, double>(p, plan, partials, stream) : launch_both<float, float>(p, plan, partials, stream);
    case DType::kFloat16: return wide ? launch_both<__half, double>(p, plan, partials, stream) : launch_both<__half, float>(p, plan, partials, stream);
    case DType::kBFloat16:
      return wide ? launch_both<__nv_bfloat16, double>(p, plan, partials, stream) : launch_both<__nv_bfloat16, float>(p, plan, partials, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace fusebackend::column_sum
