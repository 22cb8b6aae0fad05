// Small matrix products on data that lies in cache.
#pragma once
#include <algorithm>

#include "blocks.h"
#include "vectors.h"

// C[ROWS, kPanel] = A[ROWS, inner] B, B a packed panel [inner, kPanel]
template <typename R, int ROWS, int VECTORS>
inline void panel_tile(int64_t inner, const R* a, int64_t lda, const R* b, R* c, int64_t ldc) {
  constexpr int lanes = Vector<R>::lanes;
  V<R> sums[ROWS][VECTORS] = {};
  for (int64_t d = 0; d < inner; ++d) {
    V<R> y[VECTORS];
    for (int n = 0; n < VECTORS; ++n) y[n] = load(b + d * kPanel + n * lanes);
    for (int m = 0; m < ROWS; ++m) {
      const R x = a[m * lda + d];
      for (int n = 0; n < VECTORS; ++n) sums[m][n] += x * y[n];
    }
  }
  for (int m = 0; m < ROWS; ++m)
    for (int n = 0; n < VECTORS; ++n) store(c + m * ldc + n * lanes, sums[m][n]);
}

template <typename R, int ROWS>
inline void panel_rows(int64_t inner, const R* a, int64_t lda, const R* b, R* c, int64_t ldc) {
  constexpr int lanes = Vector<R>::lanes, step = 2 * lanes;
  for (int n = 0; n < kPanel; n += step)
    panel_tile<R, ROWS, 2>(inner, a, lda, b + n, c + n, ldc);
}

// C[rows, panels * kPanel] = A[rows, inner] B^T, B packed
template <typename R>
void scores(int64_t rows, int64_t panels, int64_t inner, const R* a, int64_t lda, const R* packed,
            R* c, int64_t ldc) {
  for (int64_t p = 0; p < panels; ++p) {
    const R* b = packed + p * inner * kPanel;
    R* to = c + p * kPanel;
    int64_t i = 0;
    for (; i + kTileRows <= rows; i += kTileRows)
      panel_rows<R, kTileRows>(inner, a + i * lda, lda, b, to + i * ldc, ldc);
    for (; i + 4 <= rows; i += 4) panel_rows<R, 4>(inner, a + i * lda, lda, b, to + i * ldc, ldc);
    for (; i < rows; ++i) panel_rows<R, 1>(inner, a + i * lda, lda, b, to + i * ldc, ldc);
  }
}

template <typename R, int ROWS, int VECTORS>
inline void product_tile(int64_t inner, const R* a, int64_t lda, const R* b, int64_t ldb, R* c,
                         int64_t ldc, bool add) {
  constexpr int lanes = Vector<R>::lanes;
  V<R> sums[ROWS][VECTORS] = {};
  for (int64_t j = 0; j < inner; ++j) {
    V<R> y[VECTORS];
    for (int n = 0; n < VECTORS; ++n) y[n] = load(b + j * ldb + n * lanes);
    for (int m = 0; m < ROWS; ++m) {
      const R x = a[m * lda + j];
      for (int n = 0; n < VECTORS; ++n) sums[m][n] += x * y[n];
    }
  }
  for (int m = 0; m < ROWS; ++m) {
    for (int n = 0; n < VECTORS; ++n) {
      R* to = c + m * ldc + n * lanes;
      store(to, add ? load(to) + sums[m][n] : sums[m][n]);
    }
  }
}

template <typename R, int VECTORS>
void product_columns(int64_t rows, int64_t inner, const R* a, int64_t lda, const R* b, int64_t ldb,
                     R* c, int64_t ldc, bool add) {
  int64_t i = 0;
  for (; i + kWideRows <= rows; i += kWideRows)
    product_tile<R, kWideRows, VECTORS>(inner, a + i * lda, lda, b, ldb, c + i * ldc, ldc, add);
  for (; i < rows; ++i)
    product_tile<R, 1, VECTORS>(inner, a + i * lda, lda, b, ldb, c + i * ldc, ldc, add);
}

// C[rows, width] = A[rows, inner] B[inner, width], or += where `add`
template <typename R>
void product(int64_t rows, int64_t width, int64_t inner, const R* a, int64_t lda, const R* b,
             int64_t ldb, R* c, int64_t ldc, bool add) {
  constexpr int lanes = Vector<R>::lanes;
  constexpr int64_t chunk = 128;  // rows of B that stay in the first cache
  for (int64_t j = 0; j < inner; j += chunk) {
    const int64_t size = std::min(chunk, inner - j);
    const bool more = add || j > 0;
    int64_t n = 0;
    for (; n + kWide * lanes <= width; n += kWide * lanes)
      product_columns<R, kWide>(rows, size, a + j, lda, b + j * ldb + n, ldb, c + n, ldc, more);
    for (; n + 2 * lanes <= width; n += 2 * lanes)
      product_columns<R, 2>(rows, size, a + j, lda, b + j * ldb + n, ldb, c + n, ldc, more);
    for (; n + lanes <= width; n += lanes)
      product_columns<R, 1>(rows, size, a + j, lda, b + j * ldb + n, ldb, c + n, ldc, more);
  }
}

template <typename R, int ROWS, int VECTORS>
inline void outer_tile(int64_t inner, const R* a, int64_t lda, const R* b, int64_t ldb, R* c,
                       int64_t ldc) {
  constexpr int lanes = Vector<R>::lanes;
  V<R> sums[ROWS][VECTORS];
  for (int m = 0; m < ROWS; ++m)
    for (int n = 0; n < VECTORS; ++n) sums[m][n] = load(c + m * ldc + n * lanes);
  for (int64_t i = 0; i < inner; ++i) {
    V<R> y[VECTORS];
    for (int n = 0; n < VECTORS; ++n) y[n] = load(b + i * ldb + n * lanes);
    for (int m = 0; m < ROWS; ++m) {
      const R x = a[i * lda + m];
      for (int n = 0; n < VECTORS; ++n) sums[m][n] += x * y[n];
    }
  }
  for (int m = 0; m < ROWS; ++m)
    for (int n = 0; n < VECTORS; ++n) store(c + m * ldc + n * lanes, sums[m][n]);
}

// C[rows, width] += A[inner, rows]^T B[inner, width]
template <typename R>
void add_outer(int64_t rows, int64_t width, int64_t inner, const R* a, int64_t lda, const R* b,
               int64_t ldb, R* c, int64_t ldc) {
  constexpr int lanes = Vector<R>::lanes;
  int64_t i = 0;
  for (; i + kColumns <= rows; i += kColumns) {
    int64_t n = 0;
    for (; n + 2 * lanes <= width; n += 2 * lanes)
      outer_tile<R, kColumns, 2>(inner, a + i, lda, b + n, ldb, c + i * ldc + n, ldc);
    for (; n + lanes <= width; n += lanes)
      outer_tile<R, kColumns, 1>(inner, a + i, lda, b + n, ldb, c + i * ldc + n, ldc);
  }
  for (; i < rows; ++i)
    for (int64_t n = 0; n + lanes <= width; n += lanes)
      outer_tile<R, 1, 1>(inner, a + i, lda, b + n, ldb, c + i * ldc + n, ldc);
}
