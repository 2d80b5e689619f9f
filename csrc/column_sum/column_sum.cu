// Two kernels. The first streams x, and y: a block sums some columns of some of the rows, `lanes` rows at once, a thread one vector of each of
// its rows. Blocks take turns, so that all of them read the same part of memory. The second kernel adds what the blocks leave. Each order of additions follows from the shape alone, so that results are the same in every run.
#include <type_traits>

#include "column_sum/rows.cuh"
#include "common/column_partials.cuh"
#include "common/programmatic_launch.cuh"

namespace fusebackend::column_sum {
namespace {

constexpr int kStepsOfASum = 16;   // steps (kRowsAtOnce rows of a thread) that are added one after the other, before they are added to a second sum: errors grow with these

template <typename In>
__device__ __forceinline__ float multiply(In x, In y, bool rounded) {
  const float product = widen(x) * widen(y);
  if (sizeof(In) == 4 || !rounded) return product;
  In narrowed;
  narrow(product, narrowed);
  return widen(narrowed);
}

// What is added to the s-th sum, of an element of x and, where the form has it, one of y.
template <Form kForm, int s, typename In>
__device__ __forceinline__ auto term(In x, In y, bool rounded) {
  if constexpr (kForm == Form::kPlain || (sums_two(kForm) && s == 0)) return widen(x);
  else return multiply(x, reads_two(kForm) ? y : x, rounded);
}

template <Form kForm, int s, typename In, typename Acc, int kN>
__device__ __forceinline__ void add_tree(const Vec<In, kN> (&x)[kRowsAtOnce], const Vec<In, kN> (&y)[kRowsAtOnce], bool rounded, Acc (&sum)[kN]) {
#pragma unroll
  for (int i = 0; i < kN; ++i) {
    Acc tree[kRowsAtOnce];
#pragma unroll
    for (int u = 0; u < kRowsAtOnce; ++u) tree[u] = Acc(term<kForm, s>(x[u].v[i], y[u].v[i], rounded));
#pragma unroll
    for (int half = kRowsAtOnce / 2; half > 0; half /= 2) {
#pragma unroll
      for (int u = 0; u < half; ++u) tree[u] += tree[u + half];
    }
    sum[i] += tree[0];
  }
}

template <typename In, typename Acc, Form kForm, int kBytes>
__global__ void __launch_bounds__(kMostThreads, kBlocks<Acc, kForm>) column_sum_rows(const Rows p) {
  constexpr int kN = kBytes / int(sizeof(In)), kSources = reads_two(kForm) ? 2 : 1, kSums = sums_two(kForm) ? 2 : 1;
  constexpr int kOther = kSources - 1;
  extern __shared__ __align__(16) char shared[];
  Acc* const shared_sums = reinterpret_cast<Acc*>(shared);
  launch_dependents();

  const uint32_t tile = blockIdx.x % p.tiles, above = blockIdx.x / p.tiles, split = above % p.splits, batch = above / p.splits;
  const int lane = threadIdx.x / p.tile_vectors, vector = threadIdx.x - lane * p.tile_vectors;
  const int64_t column = int64_t(tile) * p.tile_vectors + vector;  // in vectors
  const bool active = lane < p.lanes && column < p.width;

  Acc sum[kSums][kN] = {}, second[kSums][kN] = {};
  if (active) {
    const int64_t stride = int64_t(p.lanes) * p.splits, begin = int64_t(split) * p.lanes + lane;  // rows
    int64_t step[kSources];
    const In *matrix[kSources], *from[kSources];
#pragma unroll
    for (int k = 0; k < kSources; ++k) {
      const int64_t row_stride = k == 0 ? p.row_stride : p.y_row_stride;
      step[k] = stride * row_stride;
      matrix[k] = static_cast<const In*>(k == 0 ? p.x : p.y) + batch * (k == 0 ? p.batch_stride : p.y_batch_stride) + column * kN;
      from[k] = matrix[k] + begin * row_stride;
    }
    int64_t left = p.rows > begin ? (p.rows - begin + stride - 1) / stride : 0;  // rows
    for (int steps = 0; left >= kRowsAtOnce; left -= kRowsAtOnce) {
      Vec<In, kN> x[kSources][kRowsAtOnce];
#pragma unroll
      for (int u = 0; u < kRowsAtOnce; ++u) {
#pragma unroll
        for (int k = 0; k < kSources; ++k) x[k][u] = load_once<In, kN>(from[k]), from[k] += step[k];
      }
      add_tree<kForm, 0>(x[0], x[kOther], p.rounded, sum[0]);
      if constexpr (kSums == 2) add_tree<kForm, 1>(x[0], x[kOther], p.rounded, sum[1]);
      if (++steps == kStepsOfASum) {
        steps = 0;
#pragma unroll
        for (int s = 0; s < kSums; ++s) {
#pragma unroll
          for (int i = 0; i < kN; ++i) second[s][i] += sum[s][i], sum[s][i] = 0;
        }
      }
    }
    const auto add_element = [&](int i, In a, In b) {
      sum[0][i] += Acc(term<kForm, 0>(a, b, p.rounded));
      if constexpr (kSums == 2) sum[1][i] += Acc(term<kForm, 1>(a, b, p.rounded));
    };
    Vec<In, kN> x[kSources][kRowsAtOnce];
#pragma unroll
    for (int u = 0; u < kRowsAtOnce; ++u) {
      if (u < left) {
#pragma unroll
        for (int k = 0; k < kSources; ++k) x[k][u] = load_once<In, kN>(from[k]), from[k] += step[k];
      }
    }
#pragma unroll
    for (int u = 0; u < kRowsAtOnce; ++u) {
      if (u < left) {
#pragma unroll
        for (int i = 0; i < kN; ++i) add_element(i, x[0][u].v[i], x[kOther][u].v[i]);
      }
    }
    if (p.tail > 0 && split + 1 == p.splits && lane == 0) {
      const In *const last = matrix[0] + p.rows * p.row_stride, *const other = matrix[kOther] + p.rows * (kOther == 0 ? p.row_stride : p.y_row_stride);
#pragma unroll
      for (int i = 0; i < kN; ++i)
        if (column * kN + i < p.tail) add_element(i, last[i], other[i]);
    }
#pragma unroll
    for (int s = 0; s < kSums; ++s) {
#pragma unroll
      for (int i = 0; i < kN; ++i) sum[s][i] += second[s][i];
    }
  }
  // The lanes' sums, in a tree: the upper half of them is added to the lower.
  for (int count = p.lanes; count > 1;) {
    const int half = (count + 1) / 2;
#pragma unroll
    for (int s = 0; s < kSums; ++s) {
      if (active && lane >= half && lane < count) {
#pragma unroll
        for (int i = 0; i < kN; ++i) shared_sums[(threadIdx.x - half * p.tile_vectors) * kN + i] = sum[s][i];
      }
      __syncthreads();
      if (active && lane < count - half) {
#pragma unroll
        for (int i = 0; i < kN; ++i) sum[s][i] += shared_sums[threadIdx.x * kN + i];
      }
      __syncthreads();
    }
    count = half;
  }
  if (!active || lane != 0) return;
  const int64_t at = (int64_t(batch) * p.splits + split) * p.width * kN + column * kN;
#pragma unroll
  for (int s = 0; s < kSums; ++s) {
    void* const out = s == 0 ? p.out : p.second_out;
    if (p.finished) {
#pragma unroll
      for (int i = 0; i < kN; ++i) {
        const DType result = s == 0 ? p.result : p.second_result;
        if constexpr (std::is_same_v<Acc, double>) store_result(out, at + i, sum[s][i] / p.wide_divisor, result);
        else store_result(out, at + i, sum[s][i] / (s == 0 ? p.divisor : p.second_divisor), result);
      }
    } else {
      // The partial sums of a batch are `splits * fold` rows of `columns`, since a folded row is `fold` rows one behind the other.
#pragma unroll
      for (int i = 0; i < kN; ++i) static_cast<Acc*>(out)[at + i] = sum[s][i];
    }
  }
}

// The sums of the columns of `terms` rows of partial sums. Those of the second of two sums come behind those of all `batches` of the first.
template <typename Acc>
__global__ void __launch_bounds__(kFinalThreads) column_sum_partials(const Acc* partials, const Rows results, int64_t terms, int64_t columns,
                                                                     uint32_t tiles, uint32_t batches, int column_bits) {
  wait_for_previous_kernel();
  const uint32_t tile = blockIdx.x % tiles, batch = blockIdx.x / tiles;
  int64_t column;
  double sum;
  if (!add_column_partials(partials + int64_t(batch) * terms * columns, terms, columns, tile, column_bits, column, sum)) return;
  const bool second = batch >= batches;
  const int64_t at = int64_t(second ? batch - batches : batch) * columns + column;
  store_result(second ? results.second_out : results.out, at, sum / (second ? results.wide_second_divisor : results.wide_divisor),
               second ? results.second_result : results.result);
}

template <typename In, typename Acc, Form kForm, int kBytes>
cudaError_t launch_rows(const Rows& rows, const Plan& plan, int64_t blocks, cudaStream_t stream) {
  const size_t shared = plan.lanes > 1 ? size_t(plan.threads) * (kBytes / sizeof(In)) * sizeof(Acc) : 0;
  column_sum_rows<In, Acc, kForm, kBytes><<<uint32_t(blocks), plan.threads, shared, stream>>>(rows);
  return cudaGetLastError();
}

template <typename In, typename Acc, Form kForm>
cudaError_t launch_both(const Problem& p, const Plan& plan, void* partials, cudaStream_t stream) {
  const int64_t terms = plan.splits * plan.fold, batches = p.batch * p.sums();
  const int bits = final_column_bits(terms);
  const int64_t blocks = plan.blocks(p), tiles = final_tiles(p.columns, bits);
  if (blocks > INT32_MAX || tiles * batches > INT32_MAX) return cudaErrorInvalidConfiguration;
  const bool finished = plan.partials(p) == 0;
  const Rows results = rows_of(p, plan, p.out);
  Rows rows = results;
  if (!finished) rows.out = partials, rows.second_out = static_cast<Acc*>(partials) + plan.partials(p);
  cudaError_t error = cudaErrorInvalidValue;
  if (plan.vector_bytes == 16) error = launch_rows<In, Acc, kForm, 16>(rows, plan, blocks, stream);
  else if (plan.vector_bytes == sizeof(In)) error = launch_rows<In, Acc, kForm, sizeof(In)>(rows, plan, blocks, stream);
  else if constexpr (sizeof(In) == 2) {
    if (plan.vector_bytes == 4) error = launch_rows<In, Acc, kForm, 4>(rows, plan, blocks, stream);
  }
  if (error != cudaSuccess || finished) return error;
  return launch_dependent(column_sum_partials<Acc>, dim3(uint32_t(tiles * batches)), dim3(kFinalThreads), 0, true, stream,
                          static_cast<const Acc*>(partials), results, terms, p.columns, uint32_t(tiles), uint32_t(p.batch), bits);
}

template <typename In>
cudaError_t launch_form(const Problem& p, const Plan& plan, void* partials, cudaStream_t stream) {
  switch (p.form) {
    case Form::kSquares: return launch_both<In, float, Form::kSquares>(p, plan, partials, stream);
    case Form::kPlainAndSquares: return launch_both<In, float, Form::kPlainAndSquares>(p, plan, partials, stream);
    case Form::kProducts: return launch_both<In, float, Form::kProducts>(p, plan, partials, stream);
    case Form::kPlainAndProducts: return launch_both<In, float, Form::kPlainAndProducts>(p, plan, partials, stream);
    default:
      return p.in_fp64() ? launch_both<In, double, Form::kPlain>(p, plan, partials, stream)
                         : launch_both<In, float, Form::kPlain>(p, plan, partials, stream);
  }
}

}  // namespace

cudaError_t launch(const Problem& p, const Plan& plan, void* partials, cudaStream_t stream) {
  switch (p.in) {
    case DType::kFloat64: return launch_both<double, double, Form::kPlain>(p, plan, partials, stream);
    case DType::kFloat32: return launch_form<float>(p, plan, partials, stream);
    case DType::kFloat16: return launch_form<__half>(p, plan, partials, stream);
    case DType::kBFloat16: return launch_form<__nv_bfloat16>(p, plan, partials, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace fusebackend::column_sum
