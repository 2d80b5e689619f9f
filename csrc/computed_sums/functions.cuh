R"cuda(
// What a program may call: its `name` is f_name here. Exponentials and quotients are as exact as those of Triton's code: ex2.approx, div.full. The
// results of exp and sigmoid that are below 2^-126 are 0: without what keeps these, a loop with sigmoids is bound by memory alone.
#define FUNCTION __device__ __forceinline__

constexpr float kLog2E = 1.44269504f;

FUNCTION unsigned short to_fp16(float x) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
FUNCTION float of_fp16(unsigned short bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}
FUNCTION unsigned short to_bf16(float x) {
#if __CUDA_ARCH__ >= 800
  unsigned short rounded;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(rounded) : "f"(x));
  return rounded;
#else
  const unsigned bits = __float_as_uint(x);
  return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
#endif
}
FUNCTION float of_bf16(unsigned short bits) { return __uint_as_float(unsigned(bits) << 16); }

FUNCTION float f_add(float a, float b) { return a + b; }
FUNCTION float f_sub(float a, float b) { return a - b; }
FUNCTION float f_mul(float a, float b) { return a * b; }
FUNCTION float f_div(float a, float b) {
  float quotient;
  asm("div.full.f32 %0, %1, %2;" : "=f"(quotient) : "f"(a), "f"(b));
  return quotient;
}
FUNCTION float exp2_flushed(float a) {
  float x;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(x) : "f"(a));
  return x;
}
FUNCTION float reciprocal_flushed(float a) {
  float x;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(x) : "f"(a));
  return x;
}
FUNCTION float f_neg(float a) { return -a; }
FUNCTION float f_abs(float a) { return fabsf(a); }
FUNCTION float f_exp(float a) { return exp2_flushed(a * kLog2E); }
FUNCTION float f_exp2(float a) { return exp2f(a); }
FUNCTION float f_log(float a) { return logf(a); }
FUNCTION float f_log1p(float a) { return log1pf(a); }
FUNCTION float f_expm1(float a) { return expm1f(a); }
FUNCTION float f_sqrt(float a) { return sqrtf(a); }
FUNCTION float f_rsqrt(float a) { return rsqrtf(a); }
FUNCTION float f_reciprocal(float a) { return f_div(1.0f, a); }
FUNCTION float f_sigmoid(float a) { return reciprocal_flushed(1.0f + exp2_flushed(a * -kLog2E)); }
FUNCTION float f_tanh(float a) { return tanhf(a); }
FUNCTION float f_erf(float a) { return erff(a); }
FUNCTION float f_sin(float a) { return sinf(a); }
FUNCTION float f_cos(float a) { return cosf(a); }
FUNCTION float f_square(float a) { return a * a; }
FUNCTION float f_pow(float a, float b) { return powf(a, b); }
// NaN if an argument is.
FUNCTION float f_relu(float a) { return a <= 0.0f ? 0.0f : a; }
FUNCTION float f_maximum(float a, float b) { return a > b || a != a ? a : b; }
FUNCTION float f_minimum(float a, float b) { return a < b || a != a ? a : b; }
FUNCTION bool f_lt(float a, float b) { return a < b; }
FUNCTION bool f_le(float a, float b) { return a <= b; }
FUNCTION bool f_gt(float a, float b) { return a > b; }
FUNCTION bool f_ge(float a, float b) { return a >= b; }
FUNCTION bool f_eq(float a, float b) { return a == b; }
FUNCTION bool f_ne(float a, float b) { return a != b; }
FUNCTION bool f_and(bool a, bool b) { return a && b; }
FUNCTION bool f_or(bool a, bool b) { return a || b; }
FUNCTION bool f_not(bool a) { return !a; }
FUNCTION float f_where(bool a, float b, float c) { return a ? b : c; }
FUNCTION float f_bf16(float a) { return of_bf16(to_bf16(a)); }
FUNCTION float f_fp16(float a) { return of_fp16(to_fp16(a)); }
)cuda"
