// Attention backward for any length, dk and dv: a thread block computes 64 keys of a head, a warp 16, and walks along the queries in tiles of
// 64. Scores are computed transposed, so that probabilities and their gradients are the left operands of dv and dk as they stand in
// registers. Of a bias that several heads share, a block may sum the gradient too, in shared memory: then it computes one head after another.
#include "attention/flash.cuh"
#include "attention/launchers.h"
#include "common/device_properties.h"

namespace fusebackend::attention {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps, kQueries = 64;
static_assert(kQueries == kRowSumTile && kKeys == 16 * kWarps);

template <int kD>
struct FlashBackwardKeys {
  static constexpr int kTile = Tile<kD>::bytes(64), kRows = kQueries * int(sizeof(RowSums));
  static constexpr int kK = 0, kV = kTile, kStages = 2 * kTile;
  static constexpr int kQ = 0, kGrad = kTile, kSums = 2 * kTile, kStage = kSums + kRows;  // of a stage
  static constexpr int kBias = kStages + 2 * kStage;
};

// The key of row r of a warp's 16: rows g and g + 8, which a lane has both, are adjacent keys.
__device__ __forceinline__ int key_of(int r) { return r < 8 ? 2 * r : 2 * (r - 8) + 1; }

// The biases of transposed scores: of a tile of 64 queries a lane has, for each of 16, two adjacent keys.
template <typename T>
struct PairBiases {
  uint32_t early[8][2];

  static __device__ __forceinline__ const char* row(const Arguments& a, const HeadIndex& index, int b, int t) {
    const HeadBias& bias = a.bias[b];
    return bias.data + ((index.offset(bias) + min(t, a.t - 1) * bias.row) << (bias.is_fp32 ? 2 : 1));
  }
  static __device__ __forceinline__ bool is_early(const Arguments& a) { return a.biases > 0 && !a.bias[0].is_fp32 && a.bias[0].column != 0; }

  __device__ __forceinline__ void prefetch(const Arguments& a, const HeadIndex& index, int t, int key) {
    if (!is_early(a)) return;
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        early[j][e] = key < a.s ? __ldg(reinterpret_cast<const uint32_t*>(row(a, index, 0, t + 8 * j + e)) + key / 2) : 0u;
  }
  static __device__ __forceinline__ float2 load(const HeadBias& bias, const char* row, int key) {
    if (bias.column == 0) {
      const float one = bias.is_fp32 ? __ldg(reinterpret_cast<const float*>(row)) : Half2<T>::widen(__ldg(reinterpret_cast<const uint16_t*>(row)));
      return {one, one};
    }
    if (bias.is_fp32) return __ldg(reinterpret_cast<const float2*>(row) + key / 2);
    return Half2<T>::unpack(__ldg(reinterpret_cast<const uint32_t*>(row) + key / 2));
  }
  // scores * scale + biases
  __device__ __forceinline__ void add(const Arguments& a, const HeadIndex& index, float (&scores)[8][4], int t, int key) const {
    const bool has_early = is_early(a);
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float2 pair = has_early ? Half2<T>::unpack(early[j][e]) : float2{0.f, 0.f};
        scores[j][e] = fmaf(scores[j][e], a.scale, pair.x);
        scores[j][2 + e] = fmaf(scores[j][2 + e], a.scale, pair.y);
      }
    if (key >= a.s) return;
#pragma unroll 1
    for (int b = has_early; b < a.biases; ++b) {
      const HeadBias& bias = a.bias[b];
      float2 pair = load(bias, row(a, index, b, t), key);
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (bias.row != 0) pair = load(bias, row(a, index, b, t + 8 * j + e), key);
          scores[j][e] += pair.x;
          scores[j][2 + e] += pair.y;
        }
    }
  }
};

template <typename T, int kD, int kBlocks>
__global__ __launch_bounds__(kThreads, kBlocks) void attention_flash_backward_keys(const __grid_constant__ Arguments a, uint32_t key_tiles,
                                                                                  bool sums_bias) {
  using Layout = FlashBackwardKeys<kD>;
  using Keys = Tile<kD, Order::kPlain>;
  using Queries = Tile<kD>;
  extern __shared__ __align__(128) char shared[];
  const uint32_t shared0 = shared_address(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const uint32_t share = blockIdx.x / key_tiles;  // of the heads
  const int first = blockIdx.x % key_tiles * kKeys;
  const int key = first + 16 * warp + 2 * g;  // the first of this lane's two
  const int own_row = 16 * warp + key_of(lane % 16);
  const uint32_t kept = share / a.chunks * a.inner;
  const uint32_t begin = kept + share % a.chunks * a.per_block, end = min(begin + a.per_block, kept + a.inner);
  const int query_tiles = a.padded_t / kQueries, first_tile = a.causal ? min(first / kQueries, query_tiles) : 0;
  float4* const bias_sums = reinterpret_cast<float4*>(shared + Layout::kBias);

  for (uint32_t head = begin; head < end; ++head) {
    const HeadIndex index(a, head);
    const T *q = rows_of<const T>(a.q, index), *grad = rows_of<const T>(a.grad, index);
    const auto copy = [&](int tile, int stage) {
      const uint32_t to = shared0 + Layout::kStages + stage * Layout::kStage;
      Queries::template load<kQueries, kThreads>(to + Layout::kQ, q, a.q.row, tile * kQueries, a.t, a.d);
      Queries::template load<kQueries, kThreads>(to + Layout::kGrad, grad, a.grad.row, tile * kQueries, a.t, a.dv);
      const RowSums* sums = index.row_sums(a) + tile * kQueries;
      if (threadIdx.x < Layout::kRows / 16) cp_async_16(to + Layout::kSums + threadIdx.x * 16, reinterpret_cast<const char*>(sums) + threadIdx.x * 16);
    };
    if (head != begin) __syncthreads();  // the last head's results are in the keys' place
    Keys::template load<kKeys, kThreads>(shared0 + Layout::kK, rows_of<const T>(a.k, index), a.k.row, first, a.s, a.d);
    Keys::template load<kKeys, kThreads>(shared0 + Layout::kV, rows_of<const T>(a.v, index), a.v.row, first, a.s, a.dv);
    if (first_tile < query_tiles) copy(first_tile, 0);
    cp_async_commit();

    float dk[kD / 8][4] = {}, dv[kD / 8][4] = {};
    PairBiases<T> biases;
    for (int tile = first_tile, stage = 0; tile < query_tiles; ++tile, stage ^= 1) {
      const int t = tile * kQueries + 2 * c;  // the first of this lane's queries
      biases.prefetch(a, index, t, key);
      cp_async_wait<0>();
      __syncthreads();
      if (tile + 1 < query_tiles) copy(tile + 1, stage ^ 1);
      cp_async_commit();
      const char* const here = shared + Layout::kStages + stage * Layout::kStage;
      const uint32_t q_tile = shared0 + Layout::kStages + stage * Layout::kStage + Layout::kQ, grad_tile = q_tile + Layout::kGrad;

      float p[8][4] = {}, dp[8][4] = {};
#pragma unroll
      for (int i = 0; i < kD / 16; ++i) {
        uint32_t left[4];
        Keys::left(left, shared0 + Layout::kK, own_row, i);
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
          uint32_t b[4];
          Queries::right(b, q_tile, j, i);
          mma<T>(p[j], left, b[0], b[1]);
          mma<T>(p[j + 1], left, b[2], b[3]);
        }
      }
#pragma unroll
      for (int i = 0; i < kD / 16; ++i) {
        uint32_t left[4];
        Keys::left(left, shared0 + Layout::kV, own_row, i);
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
          uint32_t b[4];
          Queries::right(b, grad_tile, j, i);
          mma<T>(dp[j], left, b[0], b[1]);
          mma<T>(dp[j + 1], left, b[2], b[3]);
        }
      }
      biases.add(a, index, p, t, key);
      if (a.huge_tiles[index.head(a) * query_tiles + tile]) {
        const float2* statistics = index.statistics(a);
#pragma unroll
        for (int j = 0; j < 8; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int query = t + 8 * j + e;
            const float maximum = query < a.t ? statistics[query].x : 0.f;
            if (is_huge(maximum)) p[j][e] -= maximum, p[j][2 + e] -= maximum;
          }
      }
      if (a.causal && tile * kQueries < first + kKeys) {
#pragma unroll
        for (int j = 0; j < 8; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            if (key + e / 2 > t + 8 * j + e % 2) p[j][e] = -INFINITY;
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float4 two = *reinterpret_cast<const float4*>(here + Layout::kSums + (8 * j + 2 * c) * sizeof(RowSums));
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          p[j][e] = exp2_fast(fmaf(p[j][e], kLog2e, -(e % 2 ? two.z : two.x)));
          dp[j][e] = p[j][e] * (dp[j][e] - (e % 2 ? two.w : two.y));
        }
      }
      if (sums_bias) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          float4& sum = bias_sums[(tile * 8 + j) * kThreads + threadIdx.x];
          if (head == begin) sum = {dp[j][0], dp[j][1], dp[j][2], dp[j][3]};
          else sum = {sum.x + dp[j][0], sum.y + dp[j][1], sum.z + dp[j][2], sum.w + dp[j][3]};
        }
      }
      const auto add_product = [](float(&result)[kD / 8][4], const float(&left)[8][4], uint32_t right) {
#pragma unroll
        for (int i = 0; i < kQueries / 16; ++i) {
          uint32_t packed[4];
#pragma unroll
          for (int x = 0; x < 4; ++x) packed[x] = Half2<T>::pack(left[2 * i + x / 2][x % 2 * 2], left[2 * i + x / 2][x % 2 * 2 + 1]);
#pragma unroll
          for (int j = 0; j < kD / 8; j += 2) {
            uint32_t b[4];
            Queries::right_transposed(b, right, i, j);
            mma<T>(result[j], packed, b[0], b[1]);
            mma<T>(result[j + 1], packed, b[2], b[3]);
          }
        }
      };
      add_product(dv, p, grad_tile);
      add_product(dk, dp, q_tile);
    }
    cp_async_wait<0>();
    if (first_tile >= query_tiles) __syncthreads();  // the copy of keys and values has not been waited for
    // Only this warp reads its rows of keys and values.
    store_rows<kD>(shared + Layout::kK, 16 * warp, dk, a.scale, a.scale, rows_of<T>(a.dk, index), a.dk.row, first + 16 * warp, a.s, a.d, key_of);
    store_rows<kD>(shared + Layout::kV, 16 * warp, dv, 1.f, 1.f, rows_of<T>(a.dv_out, index), a.dv_out.row, first + 16 * warp, a.s, a.dv, key_of);
  }

  if (sums_bias) {
    for (int tile = 0; tile < query_tiles; ++tile)
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float4 sum = tile < first_tile ? float4{} : bias_sums[(tile * 8 + j) * kThreads + threadIdx.x];
        const int t = tile * kQueries + 8 * j + 2 * c;
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (t + e % 2 < a.t && key + e / 2 < a.s)
            store_bias_gradient<T>(a, share, t + e % 2, key + e / 2, e == 0 ? sum.x : e == 1 ? sum.y : e == 2 ? sum.z : sum.w);
      }
  }
}

template <typename T, int kD>
cudaError_t launch(const Arguments& a, const HeadPlan& plan, bool sums_bias, cudaStream_t stream) {
  using Layout = FlashBackwardKeys<kD>;
  const auto kernel = attention_flash_backward_keys<T, kD, kD == 32 ? 3 : 2>;
  static SharedMemoryOptIn opt_in;
  const int most = std::min(Layout::kBias + kMaxBiasSumBytes, max_shared_bytes());
  if (const cudaError_t error = opt_in.ensure(kernel, most); error != cudaSuccess) return error;
  const int bytes = Layout::kBias + (sums_bias ? a.padded_t * kKeys * int(sizeof(float)) : 0);
  const int64_t key_tiles = ceil_div(a.s, kKeys), blocks = key_tiles * plan.blocks();
  if (blocks > INT32_MAX || bytes > most) return cudaErrorInvalidConfiguration;
  kernel<<<unsigned(blocks), kThreads, bytes, stream>>>(a, uint32_t(key_tiles), sums_bias);
  return cudaGetLastError();
}

template <typename T>
cudaError_t launch_dim(const Arguments& a, const Backward& p, const HeadPlan& plan, bool sums_bias, cudaStream_t stream) {
  const int64_t d = std::max(p.size.d, p.size.dv);
  if (d <= 32) return launch<T, 32>(a, plan, sums_bias, stream);
  if (d <= 64) return launch<T, 64>(a, plan, sums_bias, stream);
  return launch<T, 128>(a, plan, sums_bias, stream);
}

}  // namespace

cudaError_t launch_flash_backward_keys(const Arguments& a, const Backward& p, const HeadPlan& plan, bool sums_bias, cudaStream_t stream) {
  return p.dtype == DType::kBFloat16 ? launch_dim<__nv_bfloat16>(a, p, plan, sums_bias, stream)
                                     : launch_dim<__half>(a, p, plan, sums_bias, stream);
}

}  // namespace fusebackend::attention
