// Differential and softmax attention on CPUs, complete rows of scores at a time.
//
//   out = (softmax(q k^T s + M) - lam softmax(q' k'^T s + M)) v
//
// A block of query rows meets all of its keys, tile by tile; both maps are normalised and
// subtracted before the one product with v. The backward pass computes dP = dO v^T once for both
// maps. Log-sum-exps alone are kept between the passes, so memory is linear in length.
//
// Plain C++ with the vector types of gcc and clang and OpenMP; no other library. Tensors are
// (batch, time, heads, width) with strides in elements and contiguous widths.
#include "backward.h"
#include "decode.h"
#include "forward.h"

// What decoding does beside attention.
struct Step {
  double scale, start, factor, eps;
  int64_t lam_width, lam_share;
};

namespace {

// Pointers and strides as the caller lists them.
struct Listed {
  void* const* pointers;
  const int64_t* strides;

  template <typename R>
  R* pointer() {
    return static_cast<R*>(*pointers++);
  }
  template <typename R>
  Rows<R> rows() {
    const int64_t* s = strides;
    strides += 3;
    return {pointer<R>(), s[0], s[1], s[2]};
  }
  template <typename R>
  Mask<R> mask() {
    const int64_t* s = strides;
    strides += 4;
    return {pointer<const R>(), s[0], s[1], s[2], s[3]};
  }
};

template <typename S, typename R>
Inputs<S, R> inputs(Listed& l, double scale) {
  // braces evaluate from left to right
  return {l.rows<const S>(), l.rows<const S>(), l.rows<const S>(), l.rows<const S>(),
          l.rows<const S>(), l.mask<R>(), l.rows<const R>(), l.pointer<const R>(),
          l.pointer<const R>(), R(scale)};
}

template <typename S, typename R>
void run_forward(const Sizes& z, Listed l, double scale) {
  const Inputs<S, R> in = inputs<S, R>(l, scale);
  const Rows<S> out = l.rows<S>();
  R* lse = l.pointer<R>();
  R* lse_noise = l.pointer<R>();
  if (z.queries <= kFewQueries)
    decode(z, in, HeadNorm<R>{}, out, lse, lse_noise);
  else
    forward(z, in, out, lse, lse_noise);
}

// lam = exp(q1 . k1) - exp(q2 . k2) + start, once for `share` neighbouring heads
template <typename R>
struct LamVectors {
  const R *q1, *k1, *q2, *k2;
  int64_t width, share;
  double start;

  R of(int64_t head) const {
    const auto dot = [&](const R* a, const R* b) {
      const int64_t from = head / share * width;
      return summed<R>(from, from + width, [&](int64_t d) { return a[d] * b[d]; });
    };
    return std::exp(dot(q1, k1)) - std::exp(dot(q2, k2)) + R(start);
  }
};

template <typename S, typename R>
void run_step(const Sizes& z, Listed l, const Step& step) {
  Inputs<S, R> in = inputs<S, R>(l, step.scale);
  const Rows<S> out = l.rows<S>();
  const HeadNorm<R> norm{l.pointer<const R>(), R(step.factor), R(step.eps)};
  const LamVectors<R> vectors{l.pointer<const R>(), l.pointer<const R>(), l.pointer<const R>(),
                              l.pointer<const R>(), step.lam_width, step.lam_share, step.start};
  std::vector<R> lam(vectors.q1 ? z.heads : 0);
  for (int64_t h = 0; h < int64_t(lam.size()); ++h)
    lam[h] = h % step.lam_share ? lam[h - 1] : vectors.of(h);
  if (vectors.q1) in.lam = {lam.data(), 0, 0, 1};
  std::vector<R> lse(z.batch * z.queries * (z.heads + z.noise_heads));
  decode(z, in, norm, out, lse.data(), lse.data() + z.batch * z.queries * z.heads);
}

template <typename S, typename R>
void run_backward(const Sizes& z, Listed l, double scale) {
  const Inputs<S, R> in = inputs<S, R>(l, scale);
  const Rows<const S> d_out = l.rows<const S>();
  const R* lse = l.pointer<const R>();
  const R* lse_noise = l.pointer<const R>();
  const Gradients<S, R> g{l.rows<S>(), l.rows<S>(), l.rows<S>(), l.rows<S>(), l.rows<S>(),
                          l.pointer<R>(), l.pointer<R>()};
  backward(z, in, d_out, lse, lse_noise, g);
}

using Run = void(const Sizes&, Listed, double);

}  // namespace

// Tensors in the order of `Inputs`, then out, lse, lse_noise; or d_out, lse, lse_noise and
// `Gradients`. kind: 0 fp32, 1 fp64, 2 bf16 computed in fp32.
extern "C" void diff_attention_forward(int kind, const Sizes* sizes, void* const* pointers,
                                       const int64_t* strides, double scale) {
  constexpr Run* runs[] = {run_forward<float, float>, run_forward<double, double>,
                           run_forward<BFloat16, float>};
  runs[kind](*sizes, {pointers, strides}, scale);
}

// Tensors in the order of `Inputs`, then out, the gain of the head norm, and four vectors of lam;
// the last five may be absent. At most kFewQueries queries.
extern "C" void diff_attention_step(int kind, const Sizes* sizes, void* const* pointers,
                                    const int64_t* strides, const Step* step) {
  using Run = void(const Sizes&, Listed, const Step&);
  constexpr Run* runs[] = {run_step<float, float>, run_step<double, double>,
                           run_step<BFloat16, float>};
  runs[kind](*sizes, {pointers, strides}, *step);
}

extern "C" void diff_attention_backward(int kind, const Sizes* sizes, void* const* pointers,
                                        const int64_t* strides, double scale) {
  constexpr Run* runs[] = {run_backward<float, float>, run_backward<double, double>,
                           run_backward<BFloat16, float>};
  runs[kind](*sizes, {pointers, strides}, scale);
}
