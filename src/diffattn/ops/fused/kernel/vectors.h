// Vectors of the machine, by the vector types of gcc and clang.
#pragma once
#include <cstdint>
#include <type_traits>
#include <utility>

#ifdef __AVX512F__
constexpr int kVectorBytes = 64, kTileRows = 12, kWide = 4, kWideRows = 6, kColumns = 8;
#else
constexpr int kVectorBytes = 32, kTileRows = 6, kWide = 2, kWideRows = 6, kColumns = 4;
#endif

template <typename R>
struct Vector {
  typedef R type __attribute__((vector_size(kVectorBytes), aligned(alignof(R)), may_alias));
  static constexpr int lanes = kVectorBytes / sizeof(R);
};
template <typename R>
using V = typename Vector<R>::type;

template <typename R>
inline V<R> load(const R* p) {
  return *reinterpret_cast<const V<R>*>(p);
}
template <typename R>
inline void store(R* p, V<R> x) {
  *reinterpret_cast<V<R>*>(p) = x;
}

// Of two rows of blocks of W lanes: their lower or upper halves, those of `a` first.
template <int W, typename R, std::size_t... L>
inline V<R> halves(V<R> a, V<R> b, bool upper, std::index_sequence<L...>) {
#ifdef __clang__
#define PICK(from) __builtin_shufflevector(a, b, int(L / (W / 2) * W + L % (W / 2) + from)...)
  return upper ? PICK(W / 2) : PICK(0);
#undef PICK
#else
  using Index = std::conditional_t<sizeof(R) == 4, int32_t, int64_t>;
  typedef Index Indices __attribute__((vector_size(kVectorBytes)));
  constexpr Indices lower_ = {Index(L / (W / 2) * W + L % (W / 2))...};
  constexpr Indices upper_ = {Index(L / (W / 2) * W + L % (W / 2) + W / 2)...};
  return __builtin_shuffle(a, b, upper ? upper_ : lower_);
#endif
}

// The sums of the lanes of as many vectors as there are lanes; vector n stands at `reversed(n)`.
template <typename R, int W = Vector<R>::lanes>
inline V<R> lane_sums(V<R>* x) {
  if constexpr (W == 1) {
    return x[0];
  } else {
    constexpr auto all = std::make_index_sequence<Vector<R>::lanes>();
    for (int n = 0; n < W / 2; ++n)
      x[n] = halves<W, R>(x[n], x[n + W / 2], false, all) + halves<W, R>(x[n], x[n + W / 2], true, all);
    return lane_sums<R, W / 2>(x);
  }
}

// The bits of n < lanes in reverse order.
template <typename R>
constexpr int reversed(int n) {
  int found = 0;
  for (int size = 1; size < Vector<R>::lanes; size *= 2, n /= 2) found = 2 * found + n % 2;
  return found;
}
