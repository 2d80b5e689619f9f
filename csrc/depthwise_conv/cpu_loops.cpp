// A row of results is summed in an array of floats (doubles for float64): along columns, or, in (batch, height, width,
// channels) order, along channels. Each tap adds one multiple of a row, which compilers turn into vector instructions.
#include "depthwise_conv/cpu_loops.h"

#include <algorithm>
#include <vector>

#include "common/cpu_half.h"
#include "common/integer_math.h"
#include "common/cpu_channel_epilogue.h"

namespace fusebackend::depthwise_conv {
namespace {

template <typename F>
void dispatch(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat64: return f(double{});
    case DType::kFloat16: return f(Float16{});
    case DType::kBFloat16: return f(BFloat16{});
    default: return f(float{});
  }
}

struct Range {
  int64_t begin, end;
};

// The j in [0, out) for which j * stride + offset is in [0, in).
Range inside(int64_t out, int64_t stride, int64_t offset, int64_t in) {
  const int64_t begin = offset >= 0 ? 0 : ceil_div(-offset, stride);
  const int64_t end = in - offset <= 0 ? 0 : ceil_div(in - offset, stride);
  return {std::min(begin, out), std::max(std::min(begin, out), std::min(end, out))};
}

template <typename T>
void forward_rows(const ForwardParams& p, int64_t begin, int64_t end) {
  using S = Acc<T>;
  const Geometry& g = p.g;
  const T *x = static_cast<const T*>(p.x), *w = static_cast<const T*>(p.w), *bias = static_cast<const T*>(p.bias);
  T* y = static_cast<T*>(p.y);
  const bool channels = along_channels(p.y_stride, g.outputs(), g.out.w);
  const int64_t planes = channels ? 1 : g.outputs(), width = channels ? g.outputs() : g.out.w;
  const int64_t shift = g.multiplier;
  std::vector<S> sums(static_cast<size_t>(width));
  const AffineMaps<S> maps = AffineMaps<S>::of(p.epilogue, g.outputs(), w);
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t i = unit % g.out.h, plane = unit / g.out.h, o = plane % planes, n = plane / planes;
    for (int64_t column = 0; column < (channels ? g.out.w : 1); ++column) {
      for (int64_t l = 0; l < width; ++l) sums[l] = bias ? S(widen(bias[(channels ? l : o) * p.bias_stride])) : S(0);
      for (int64_t a = 0; a < g.taps.h; ++a) {
        const int64_t row = i * g.stride.h - g.pad.h + a * g.dilation.h;
        if (row < 0 || row >= g.in.h) continue;
        for (int64_t b = 0; b < g.taps.w; ++b) {
          const int64_t offset = b * g.dilation.w - g.pad.w;
          const T* tap = w + a * p.w_stride.h + b * p.w_stride.w;
          if (channels) {
            const int64_t from = column * g.stride.w + offset;
            if (from < 0 || from >= g.in.w) continue;
            const T* source = x + n * p.x_stride.n + row * p.x_stride.h + from * p.x_stride.w;
            if (shift == 1) for (int64_t c = 0; c < width; ++c) sums[c] = multiply_add(S(widen(tap[c * p.w_stride.n])), S(widen(source[c * p.x_stride.c])), sums[c]);
            else for (int64_t c = 0; c < width; ++c) sums[c] = multiply_add(S(widen(tap[c * p.w_stride.n])), S(widen(source[c / shift * p.x_stride.c])), sums[c]);
          } else {
            const Range r = inside(g.out.w, g.stride.w, offset, g.in.w);
            const T* source = x + n * p.x_stride.n + o / shift * p.x_stride.c + row * p.x_stride.h + offset * p.x_stride.w;
            const int64_t step = g.stride.w * p.x_stride.w;
            const S factor = widen(tap[o * p.w_stride.n]);
            if (step == 1) for (int64_t j = r.begin; j < r.end; ++j) sums[j] = multiply_add(factor, S(widen(source[j])), sums[j]);
            else for (int64_t j = r.begin; j < r.end; ++j) sums[j] = multiply_add(factor, S(widen(source[j * step])), sums[j]);
          }
        }
      }
      for (int64_t l = 0; l < width && p.epilogue.any; ++l) {
        const S sum = p.epilogue.is_affine ? maps.map(sums[l], channels ? l : o) : sums[l];
        sums[l] = activated_number(sum, p.epilogue.activation);
      }
      T* to = y + n * p.y_stride.n + i * p.y_stride.h + (channels ? column * p.y_stride.w : o * p.y_stride.c);
      const int64_t step = channels ? p.y_stride.c : p.y_stride.w;
      for (int64_t l = 0; l < width; ++l) narrow(sums[l], to[l * step]);
    }
  }
}

template <typename T>
void input_grad_rows(const InputGradParams& p, int64_t begin, int64_t end) {
  using S = Acc<T>;
  const Geometry& g = p.g;
  const T *grad = static_cast<const T*>(p.grad), *w = static_cast<const T*>(p.w);
  T* dx = static_cast<T*>(p.dx);
  const bool channels = along_channels(p.dx_stride, g.channels, g.in.w);
  const int64_t planes = channels ? 1 : g.channels, width = channels ? g.channels : g.in.w;
  std::vector<S> sums(static_cast<size_t>(width));
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t row = unit % g.in.h, plane = unit / g.in.h, c = plane % planes, n = plane / planes;
    for (int64_t column = 0; column < (channels ? g.in.w : 1); ++column) {
      std::fill(sums.begin(), sums.end(), S(0));
      for (int64_t m = 0; m < g.multiplier; ++m) {
        for (int64_t a = 0; a < g.taps.h; ++a) {
          const int64_t up = row + g.pad.h - a * g.dilation.h, i = up / g.stride.h;
          if (up < 0 || up % g.stride.h || i >= g.out.h) continue;
          for (int64_t b = 0; b < g.taps.w; ++b) {
            const T* tap = w + m * p.w_stride.n + a * p.w_stride.h + b * p.w_stride.w;
            const int64_t offset = b * g.dilation.w - g.pad.w;
            const T* source = grad + n * p.grad_stride.n + m * p.grad_stride.c + i * p.grad_stride.h;
            if (channels) {
              const int64_t over = column - offset, j = over / g.stride.w;
              if (over < 0 || over % g.stride.w || j >= g.out.w) continue;
              source += j * p.grad_stride.w;
              for (int64_t k = 0; k < width; ++k)
                sums[k] = multiply_add(S(widen(tap[k * g.multiplier * p.w_stride.n])), S(widen(source[k * g.multiplier * p.grad_stride.c])), sums[k]);
            } else {
              const Range r = inside(g.out.w, g.stride.w, offset, g.in.w);
              source += c * g.multiplier * p.grad_stride.c;
              const S factor = widen(tap[c * g.multiplier * p.w_stride.n]);
              S* to = sums.data() + offset;
              for (int64_t j = r.begin; j < r.end; ++j)
                to[j * g.stride.w] = multiply_add(factor, S(widen(source[j * p.grad_stride.w])), to[j * g.stride.w]);
            }
          }
        }
      }
      T* to = dx + n * p.dx_stride.n + row * p.dx_stride.h + (channels ? column * p.dx_stride.w : c * p.dx_stride.c);
      const int64_t step = channels ? p.dx_stride.c : p.dx_stride.w;
      for (int64_t l = 0; l < width; ++l) narrow(sums[l], to[l * step]);
    }
  }
}

constexpr int64_t kChannelsOfUnit = 32;

bool gradients_along_channels(const WeightGradParams& p) {
  return p.g.multiplier == 1 && along_channels(p.grad_stride, p.g.outputs(), p.g.out.w);
}

// Sums are doubles: a tap's has as many terms as there are outputs.
template <typename T>
void weight_grad_channels(const WeightGradParams& p, int64_t first, int64_t count) {
  const Geometry& g = p.g;
  const int64_t taps = g.tap_count();
  std::vector<double> sums(static_cast<size_t>((taps + 1) * count), 0.0);
  double* const totals = sums.data() + taps * count;
  const T *grad = static_cast<const T*>(p.grad) + first * p.grad_stride.c, *x = static_cast<const T*>(p.x) + first / g.multiplier * p.x_stride.c;
  for (int64_t n = 0; n < g.batch; ++n) {
    for (int64_t i = 0; i < g.out.h; ++i) {
      const T* const row = grad + n * p.grad_stride.n + i * p.grad_stride.h;
      for (int64_t j = 0; j < g.out.w; ++j)
        for (int64_t c = 0; c < count; ++c) totals[c] += double(widen(row[j * p.grad_stride.w + c * p.grad_stride.c]));
      if (!p.dw) continue;
      for (int64_t a = 0; a < g.taps.h; ++a) {
        const int64_t from = i * g.stride.h - g.pad.h + a * g.dilation.h;
        if (from < 0 || from >= g.in.h) continue;
        for (int64_t b = 0; b < g.taps.w; ++b) {
          const int64_t offset = b * g.dilation.w - g.pad.w;
          const Range r = inside(g.out.w, g.stride.w, offset, g.in.w);
          const T* source = x + n * p.x_stride.n + from * p.x_stride.h + offset * p.x_stride.w;
          double* to = sums.data() + (a * g.taps.w + b) * count;
          if (count == 1) {
            double sum = 0;
            for (int64_t j = r.begin; j < r.end; ++j) sum += double(widen(row[j * p.grad_stride.w])) * double(widen(source[j * g.stride.w * p.x_stride.w]));
            to[0] += sum;
          } else {
            for (int64_t j = r.begin; j < r.end; ++j)
              for (int64_t c = 0; c < count; ++c)
                to[c] += double(widen(row[j * p.grad_stride.w + c * p.grad_stride.c])) * double(widen(source[j * g.stride.w * p.x_stride.w + c * p.x_stride.c]));
          }
        }
      }
    }
  }
  for (int64_t c = 0; c < count; ++c) {
    for (int64_t t = 0; t < taps && p.dw; ++t) narrow(Acc<T>(sums[t * count + c]), static_cast<T*>(p.dw)[(first + c) * taps + t]);
    if (p.db) narrow(Acc<T>(totals[c]), static_cast<T*>(p.db)[first + c]);
  }
}

}  // namespace

int64_t loops_forward_units(const ForwardParams& p) {
  return p.g.batch * p.g.out.h * (along_channels(p.y_stride, p.g.outputs(), p.g.out.w) ? 1 : p.g.outputs());
}
void loops_forward(const ForwardParams& p, int64_t begin, int64_t end) {
  dispatch(p.dtype, [&](auto type) { forward_rows<decltype(type)>(p, begin, end); });
}

int64_t loops_input_grad_units(const InputGradParams& p) {
  return p.g.batch * p.g.in.h * (along_channels(p.dx_stride, p.g.channels, p.g.in.w) ? 1 : p.g.channels);
}
void loops_input_grad(const InputGradParams& p, int64_t begin, int64_t end) {
  dispatch(p.dtype, [&](auto type) { input_grad_rows<decltype(type)>(p, begin, end); });
}

int64_t loops_weight_grad_units(const WeightGradParams& p) {
  return gradients_along_channels(p) ? ceil_div(p.g.outputs(), kChannelsOfUnit) : p.g.outputs();
}
void loops_weight_grad(const WeightGradParams& p, int64_t begin, int64_t end) {
  const int64_t each = gradients_along_channels(p) ? kChannelsOfUnit : 1;
  dispatch(p.dtype, [&](auto type) {
    for (int64_t u = begin; u < end; ++u) weight_grad_channels<decltype(type)>(p, u * each, std::min(each, p.g.outputs() - u * each));
  });
}

}  // namespace fusebackend::depthwise_conv
