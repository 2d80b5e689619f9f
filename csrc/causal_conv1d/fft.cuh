// FFTs of thousands of complex points inside one block's shared memory.
//
// Forward transforms decimate in frequency and leave their result in digit-reversed order; inverse ones decimate in time and take it in that
// order, so nothing is ever reordered. A transform is three passes of 16-point butterflies in registers and one of N / 4096 points, all in
// place. The first pass reads device memory, and the last inverse one writes it.
#pragma once
#include <cuda_runtime.h>

namespace fusebackend::causal_conv1d {

// The sum over at most 512 threads, in every thread.
__device__ __forceinline__ double block_sum(double v) {
  __shared__ double sums[16];
#pragma unroll
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(0xffffffffu, v, o);
  __syncthreads();  // `sums` of the call before has been read
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = v;
  __syncthreads();
  v = 0;
  for (int i = 0; i < static_cast<int>(blockDim.x) / 32; ++i) v += sums[i];
  return v;
}

template <typename R>
struct alignas(2 * sizeof(R)) Complex {
  R x, y;
};

template <typename R>
__device__ __forceinline__ Complex<R> operator+(Complex<R> a, Complex<R> b) { return {a.x + b.x, a.y + b.y}; }
template <typename R>
__device__ __forceinline__ Complex<R> operator-(Complex<R> a, Complex<R> b) { return {a.x - b.x, a.y - b.y}; }
template <typename R>
__device__ __forceinline__ Complex<R> operator*(Complex<R> a, Complex<R> b) { return {a.x * b.x - a.y * b.y, a.x * b.y + a.y * b.x}; }
template <typename R>
__device__ __forceinline__ Complex<R> operator*(R a, Complex<R> b) { return {a * b.x, a * b.y}; }

__device__ __forceinline__ Complex<float> unit(float half_turns) {
  Complex<float> w;
  sincospif(half_turns, &w.y, &w.x);
  return w;
}
__device__ __forceinline__ Complex<double> unit(double half_turns) {
  Complex<double> w;
  sincospi(half_turns, &w.y, &w.x);
  return w;
}

// e^(i pi n / 32), 0 <= n < 64, n a constant once loops are unrolled.
template <typename R>
__device__ __forceinline__ Complex<R> unit_32(int n) {
  constexpr double kCos[17] = {1, 0.995184726672196886, 0.980785280403230449, 0.956940335732208865, 0.923879532511286756, 0.881921264348355030,
                               0.831469612302545237, 0.773010453362736961, 0.707106781186547524, 0.634393284163645498, 0.555570233019602225,
                               0.471396736825997649, 0.382683432365089772, 0.290284677254462368, 0.195090322016128268, 0.0980171403295606020, 0};
  auto cosine = [&](int m) {
    if (m > 32) m = 64 - m;
    return static_cast<R>(m <= 16 ? kCos[m] : -kCos[32 - m]);
  };
  return {cosine(n), cosine(n < 16 ? 16 - n : n - 16)};
}

template <typename R>
__device__ __forceinline__ Complex<R> conjugate(Complex<R> a) { return {a.x, -a.y}; }

// a * -i forwards, a * i backwards.
template <bool INVERSE, typename R>
__device__ __forceinline__ Complex<R> quarter_turn(Complex<R> a) {
  return INVERSE ? Complex<R>{-a.y, a.x} : Complex<R>{a.y, -a.x};
}

template <bool INVERSE, typename R>
__device__ __forceinline__ void dft4(Complex<R>& a, Complex<R>& b, Complex<R>& c, Complex<R>& d) {
  const Complex<R> s = a + c, t = a - c, u = b + d, v = quarter_turn<INVERSE>(b - d);
  a = s + u, b = t + v, c = s - u, d = t - v;
}

// In place, natural order in and out: four by four.
template <bool INVERSE, typename R>
__device__ __forceinline__ void dft16(Complex<R> (&v)[16]) {
#pragma unroll
  for (int n = 0; n < 4; ++n) dft4<INVERSE>(v[n], v[4 + n], v[8 + n], v[12 + n]);
#pragma unroll
  for (int k = 1; k < 4; ++k) {
#pragma unroll
    for (int n = 1; n < 4; ++n) {
      const Complex<R> w = unit_32<R>(4 * k * n);
      v[4 * k + n] = v[4 * k + n] * (INVERSE ? w : conjugate(w));
    }
  }
#pragma unroll
  for (int k = 0; k < 4; ++k) dft4<INVERSE>(v[4 * k], v[4 * k + 1], v[4 * k + 2], v[4 * k + 3]);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
#pragma unroll
    for (int n = k + 1; n < 4; ++n) {
      const Complex<R> t = v[4 * k + n];
      v[4 * k + n] = v[4 * n + k];
      v[4 * n + k] = t;
    }
  }
}

// v[k] *= first * w^k with w = e^(i pi half_turns). A power that is a product of products has all their rounding errors, which in fp32 would be
// most of a transform's: there w^4 and w^8 are computed like w. In double that would cost more than it is worth.
template <bool FIRST_IS_ONE, typename R>
__device__ __forceinline__ void twiddle16(Complex<R> (&v)[16], Complex<R> first, R half_turns) {
  constexpr bool kAccurate = sizeof(R) == 4;
  const Complex<R> w = unit(half_turns), w2 = w * w, w3 = w2 * w, w4 = kAccurate ? unit(4 * half_turns) : w2 * w2;
#pragma unroll
  for (int k = 0; k < 16; k += 4) {
    const bool one = FIRST_IS_ONE && k == 0;
    if (!one) v[k] = v[k] * first;
    v[k + 1] = v[k + 1] * (one ? w : first * w);
    v[k + 2] = v[k + 2] * (one ? w2 : first * w2);
    v[k + 3] = v[k + 3] * (one ? w3 : first * w3);
    if (kAccurate && FIRST_IS_ONE && k == 4) first = unit(8 * half_turns);
    else first = one ? w4 : first * w4;
  }
}

// RIGHT_ANGLE: real number n is multiplied by e^(i pi n / 2N) first, so that products of spectra are products of polynomials modulo z^N - i:
// of a convolution of up to 2N numbers the real parts are the first N, the imaginary parts the others (R. E. Crandall and B. Fagin,
// "Discrete weighted transforms and large-integer arithmetic", Math. Comp. 62, 1994).
template <typename R, int LOG_N, bool RIGHT_ANGLE = false>
struct Fft {
  using C = Complex<R>;
  static constexpr int N = 1 << LOG_N;
  static constexpr int kRounds = 8 / sizeof(R), kThreads = N / 16 / kRounds;
  static constexpr int kBlocks = N * sizeof(C) > 64 * 1024 ? 1 : 2;  // that registers and shared memory of an SM allow
  static constexpr int kLast = N >> 12;         // points of the last butterflies
  static constexpr int kPoints = N / kThreads;  // of a thread
  static_assert(kLast >= 1 && kLast <= 4 && kThreads <= 512 && kLast * sizeof(C) % 16 == 0);

  // Where point i lies. Padding after the blocks of the third pass keeps them in different banks. at(i + S) is at(i) + at(S) for the S of
  // any pass.
  static constexpr __host__ __device__ int at(int i) { return i + i / (N / 256) * kLast; }
  static constexpr int kSharedBytes = (N + N / 16) * sizeof(C);

  // One in-place pass over blocks of M points; M == N reads from `load` instead of shared memory.
  template <int M, typename Load>
  static __device__ __forceinline__ void forward_pass(C* shared, Load&& load) {
    constexpr int S = M / 16;
    constexpr bool kWeighted = RIGHT_ANGLE && M == N;
#pragma unroll 1
    for (int round = 0; round < kRounds; ++round) {
      const int i = threadIdx.x + round * kThreads, within = i % S, first = i / S * M + within;
      C* points = shared + at(first);
      C v[16];
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        if constexpr (kWeighted) v[j] = load(first + S * j) * unit_32<R>(j);
        else if constexpr (M == N) v[j] = load(first + S * j);
        else v[j] = points[at(S) * j];
      }
      dft16<false>(v);
      twiddle16<!kWeighted>(v, kWeighted ? unit(R(0.5) / N * within) : C{1, 0}, R(-2) / M * within);
#pragma unroll
      for (int j = 0; j < 16; ++j) points[at(S) * j] = v[j];
    }
    __syncthreads();
  }

  template <int M, typename Store>
  static __device__ __forceinline__ void inverse_pass(C* shared, Store&& store) {
    constexpr int S = M / 16;
    constexpr bool kWeighted = RIGHT_ANGLE && M == N;
#pragma unroll 1
    for (int round = 0; round < kRounds; ++round) {
      const int i = threadIdx.x + round * kThreads, within = i % S, first = i / S * M + within;
      C* points = shared + at(first);
      C v[16];
#pragma unroll
      for (int j = 0; j < 16; ++j) v[j] = points[at(S) * j];
      twiddle16<!kWeighted>(v, kWeighted ? unit(R(-0.5) / N * within) : C{1, 0}, R(2) / M * within);
      dft16<true>(v);
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        if constexpr (kWeighted) store(first + S * j, v[j] * conjugate(unit_32<R>(j)));
        else if constexpr (M == N) store(first + S * j, v[j]);
        else points[at(S) * j] = v[j];
      }
    }
    __syncthreads();
  }

  template <bool INVERSE>
  static __device__ __forceinline__ void last_dft(C (&v)[kLast]) {
    if constexpr (kLast == 2) {
      const C t = v[0];
      v[0] = t + v[1], v[1] = t - v[1];
    } else if constexpr (kLast == 4) {
      dft4<INVERSE>(v[0], v[1], v[2], v[3]);
    }
  }

  // The transform of load(n), 0 <= n < N, handed to visit(place, value), place < kPoints being this thread's.
  template <typename Load, typename Visit>
  static __device__ __forceinline__ void forward(C* shared, Load&& load, Visit&& visit) {
    forward_pass<N>(shared, load);
    forward_pass<N / 16>(shared, load);
    forward_pass<N / 256>(shared, load);
#pragma unroll (RIGHT_ANGLE ? 4 : kPoints)
    for (int m = 0; m < kPoints / kLast; ++m) {
      alignas(16) C v[kLast];
      const int4* from = reinterpret_cast<const int4*>(shared + at((threadIdx.x + m * kThreads) * kLast));
#pragma unroll
      for (int r = 0; r < static_cast<int>(sizeof(v) / 16); ++r) reinterpret_cast<int4*>(v)[r] = from[r];
      last_dft<false>(v);
#pragma unroll
      for (int r = 0; r < kLast; ++r) visit(m * kLast + r, v[r]);
    }
  }

  // The inverse transform (not divided by N) of value(place), handed to store(n, value), n < N.
  template <typename Value, typename Store>
  static __device__ __forceinline__ void inverse(C* shared, Value&& value, Store&& store) {
#pragma unroll (RIGHT_ANGLE ? 4 : kPoints)
    for (int m = 0; m < kPoints / kLast; ++m) {
      alignas(16) C v[kLast];
#pragma unroll
      for (int r = 0; r < kLast; ++r) v[r] = value(m * kLast + r);
      last_dft<true>(v);
      int4* to = reinterpret_cast<int4*>(shared + at((threadIdx.x + m * kThreads) * kLast));
#pragma unroll
      for (int r = 0; r < static_cast<int>(sizeof(v) / 16); ++r) to[r] = reinterpret_cast<const int4*>(v)[r];
    }
    __syncthreads();
    inverse_pass<N / 256>(shared, store);
    inverse_pass<N / 16>(shared, store);
    inverse_pass<N>(shared, store);
  }
};

}  // namespace fusebackend::causal_conv1d
