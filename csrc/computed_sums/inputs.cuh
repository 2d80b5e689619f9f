R"cuda(
// What both kernels that source.cpp completes have in common: before this stand functions.cuh, the constants of a variant (kInputs, kOuts, kVector,
// kRowsAtOnce, kBlocks, of each input kTypes and kKinds, and kStored), and `evaluate`, the program. No header is included: who has NVRTC need not
// have any.
//
// A block has some columns of some of the rows, `lanes` rows at once, a thread kVector columns of each of its rows. Blocks take turns, so that all
// of them read the same part of memory.

struct Division {  // FastDiv of common/integer_math.h
  unsigned divisor, multiplier, shift;
  FUNCTION unsigned of(unsigned n) const { return (__umulhi(n, multiplier) + n) >> shift; }
};
struct Input {
  const void* data;
  long long row_stride;
  Division group, period;
};
struct Arguments {
  Input inputs[kMostInputs];
  void* out[kMostOuts];
  long long columns;
  unsigned batch, rows, tiles, splits;
  float scale;
  int tile_vectors, lanes, finished;
  int results[kMostOuts];
  float numbers[kMostNumbers];
};
static_assert(sizeof(Arguments) == kArgumentsBytes, "as in computed_sums.h");

constexpr int kMostWords = 8;     // of 32 bits, of a vector

constexpr int element_bytes(char type) { return type == 'f' ? 4 : type == 'h' || type == 'b' ? 2 : 1; }
constexpr bool is_read_once(char kind) { return kind == 'i' || kind == 'c' || kind == 's'; }
constexpr bool is_one_number(char kind) { return kind == 'f' || kind == 't' || kind == 's'; }

template <int k>
struct Index {
  static constexpr int value = k;
};
template <int k = 0, typename Function>
FUNCTION void for_each_input(const Function& f) {
  if constexpr (k < kInputs) {
    f(Index<k>());
    for_each_input<k + 1>(f);
  }
}

// Which of its own rows an input has at a row.
template <char kKind>
FUNCTION unsigned own_row(const Input& input, unsigned row) {
  if constexpr (kKind == 'r') return row;
  if constexpr (kKind == 'c' || kKind == 's') return 0;
  const unsigned group = input.group.of(row), period = input.period.of(group), in_period = group - period * input.period.divisor;
  if constexpr (kKind == 't') return period * (input.period.divisor * input.group.divisor) + (row - group * input.group.divisor) * input.period.divisor + in_period;
  return in_period;
}

// What a row of each input has for a thread, as it lies in memory.
struct Row {
  unsigned words[kInputs][kMostWords];
};

template <int kBytes, bool kPastL1>
FUNCTION void load(const char* from, unsigned* to) {
  if constexpr (kBytes > 16) {
    load<16, kPastL1>(from, to);
    load<kBytes - 16, kPastL1>(from + 16, to + 4);
  } else if constexpr (kBytes == 16 && kPastL1) {
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "l"(from));
  } else if constexpr (kBytes == 16) {
    const uint4 x = *reinterpret_cast<const uint4*>(from);
    to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
  } else if constexpr (kBytes == 8) {
    const uint2 x = *reinterpret_cast<const uint2*>(from);
    to[0] = x.x, to[1] = x.y;
  } else if constexpr (kBytes == 4) {
    to[0] = *reinterpret_cast<const unsigned*>(from);
  } else if constexpr (kBytes == 2) {
    to[0] = *reinterpret_cast<const unsigned short*>(from);
  } else {
    to[0] = *reinterpret_cast<const unsigned char*>(from);
  }
}

// The i-th element.
template <char kType>
FUNCTION float element(const unsigned* words, int i) {
  if constexpr (kType == 'f') return __uint_as_float(words[i]);
  else if constexpr (kType == 'b') return __uint_as_float(i % 2 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16);
  else if constexpr (kType == 'h') return of_fp16(static_cast<unsigned short>(words[i / 2] >> 16 * (i % 2)));
  else {
    const unsigned byte = words[i / 4] >> 8 * (i % 4) & 0xffu;
    return kType == 'o' ? (byte != 0 ? 1.0f : 0.0f) : float(byte);
  }
}

// What a thread has of the inputs: for its columns, and where its rows begin.
struct Operands {
  float once[kInputs][kVector];  // of inputs that do not depend on the row
  const char* from[kInputs];     // of the others, the first row

  // `row` is one of those that the thread will have.
  FUNCTION Operands(const Arguments& p, long long column, unsigned row) {
    for_each_input([&](auto index) {
      constexpr int k = decltype(index)::value, kBytes = element_bytes(kTypes[k]);
      const char* data = static_cast<const char*>(p.inputs[k].data) + (is_one_number(kKinds[k]) ? 0 : column * kBytes);
      if constexpr (is_read_once(kKinds[k])) {
        if constexpr (kKinds[k] == 'i') data += own_row<'i'>(p.inputs[k], row) * (p.inputs[k].row_stride * kBytes);
#pragma unroll
        for (int i = 0; i < (is_one_number(kKinds[k]) ? 1 : kVector); ++i) {
          unsigned word;
          load<kBytes, false>(data + i * kBytes, &word);
          once[k][i] = element<kTypes[k]>(&word, 0);
        }
      } else {
        from[k] = data;
      }
    });
  }

  FUNCTION void load_row(const Arguments& p, unsigned row, Row& to) const {
    for_each_input([&](auto index) {
      constexpr int k = decltype(index)::value, kBytes = element_bytes(kTypes[k]);
      if constexpr (!is_read_once(kKinds[k])) {
        const Input& input = p.inputs[k];
        const char* const at = from[k] + own_row<kKinds[k]>(input, row) * (input.row_stride * kBytes);
        load<(is_one_number(kKinds[k]) ? 1 : kVector) * kBytes, kKinds[k] == 'r'>(at, to.words[k]);
      }
    });
  }

  // What the program gives for the i-th of the thread's columns.
  FUNCTION void outs_of(const Arguments& p, const Row& row, int i, float (&outs)[kOuts]) const {
    float values[kInputs];
    for_each_input([&](auto index) {
      constexpr int k = decltype(index)::value;
      const int at = is_one_number(kKinds[k]) ? 0 : i;
      if constexpr (is_read_once(kKinds[k])) values[k] = once[k][at];
      else values[k] = element<kTypes[k]>(row.words[k], at);
    });
    evaluate(values, p.numbers, outs);
  }
};
)cuda"
