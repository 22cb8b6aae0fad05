// Vectors of the machine, by the vector types of gcc and clang.
#pragma once
#include <cstdint>

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
