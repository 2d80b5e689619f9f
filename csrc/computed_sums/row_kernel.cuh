R"cuda(
// The kernel that stores what a program gives: each result a tensor of its own, whose rows follow one another without a gap.

// Some results of one row, side by side.
template <char kType>
FUNCTION void store(char* to, const float (&outs)[kVector][kOuts], int which) {
  constexpr int kBytes = kVector * element_bytes(kType), kWords = (kBytes + 3) / 4;
  unsigned words[kWords];
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    if constexpr (kType == 'f') {
      words[w] = __float_as_uint(outs[w][which]);
    } else {
      words[w] = 0;
#pragma unroll
      for (int i = 0; i < 2 && 2 * w + i < kVector; ++i) {
        const float x = outs[2 * w + i][which];
        words[w] |= static_cast<unsigned>(kType == 'h' ? to_fp16(x) : to_bf16(x)) << 16 * i;
      }
    }
  }
  if constexpr (kBytes >= 16) {
#pragma unroll
    for (int w = 0; w < kWords; w += 4) reinterpret_cast<uint4*>(to)[w / 4] = make_uint4(words[w], words[w + 1], words[w + 2], words[w + 3]);
  } else if constexpr (kBytes == 8) {
    *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
  } else if constexpr (kBytes == 4) {
    *reinterpret_cast<unsigned*>(to) = words[0];
  } else {
    *reinterpret_cast<unsigned short*>(to) = static_cast<unsigned short>(words[0]);
  }
}

template <int s = 0>
FUNCTION void store_all(const Arguments& p, long long at, const float (&outs)[kVector][kOuts]) {
  if constexpr (s < kOuts) {
    store<kStored[s]>(static_cast<char*>(p.out[s]) + at * element_bytes(kStored[s]), outs, s);
    store_all<s + 1>(p, at, outs);
  }
}

extern "C" __global__ void __launch_bounds__(kMostThreads, kBlocks) computed_rows(const Arguments p) {
  const unsigned tile = blockIdx.x % p.tiles, split = blockIdx.x / p.tiles;
  const int lane = threadIdx.x / p.tile_vectors, vector = threadIdx.x - lane * p.tile_vectors;
  const long long column = (static_cast<long long>(tile) * p.tile_vectors + vector) * kVector;
  if (lane >= p.lanes || column >= p.columns) return;
  const Operands operands(p, column, 0);
  const auto compute = [&](const Row& row, unsigned at) {
    float outs[kVector][kOuts];
#pragma unroll
    for (int i = 0; i < kVector; ++i) operands.outs_of(p, row, i, outs[i]);
    store_all(p, at * p.columns + column, outs);
  };
  const unsigned stride = p.lanes * p.splits;
  unsigned row = split * p.lanes + lane;
  for (; row + (kRowsAtOnce - 1) * stride < p.rows; row += kRowsAtOnce * stride) {
    Row rows[kRowsAtOnce];
#pragma unroll
    for (int u = 0; u < kRowsAtOnce; ++u) operands.load_row(p, row + u * stride, rows[u]);
#pragma unroll
    for (int u = 0; u < kRowsAtOnce; ++u) compute(rows[u], row + u * stride);
  }
  if constexpr (kRowsAtOnce > 1) {  // fewer rows than a step has
#pragma unroll 1
    for (; row < p.rows; row += stride) {
      Row last;
      operands.load_row(p, row, last);
      compute(last, row);
    }
  }
}
)cuda"
