// Differential and softmax attention on CPUs, complete rows of scores at a time.
//
//   out = (softmax(q k^T s + M) - lam softmax(q' k'^T s + M)) v
//
// A block of query rows meets all of its keys: both maps are normalised and subtracted before the
// one product with v. The backward pass computes dP = dO v^T once for both maps. Log-sum-exps
// alone are kept between the passes, so memory is linear in length.
//
// Plain C++ with the vector types of gcc and clang and OpenMP; no other library. Tensors are
// (batch, time, heads, width) with strides in elements and contiguous widths, which are multiples
// of kPad.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

namespace {

#ifdef __AVX512F__
constexpr int kVectorBytes = 64, kTileRows = 12, kWide = 4, kWideRows = 6, kColumns = 8;
#else
constexpr int kVectorBytes = 32, kTileRows = 6, kWide = 2, kWideRows = 6, kColumns = 4;
#endif
constexpr int64_t kPanel = 32;  // keys of a packed panel

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

// --- products -----------------------------------------------------------------------------

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

// C[rows, width] = A[rows, inner] B[inner, width]
template <typename R>
void product(int64_t rows, int64_t width, int64_t inner, const R* a, int64_t lda, const R* b,
             int64_t ldb, R* c, int64_t ldc) {
  constexpr int lanes = Vector<R>::lanes;
  constexpr int64_t chunk = 128;  // rows of B that stay in the first cache
  for (int64_t j = 0; j < inner; j += chunk) {
    const int64_t size = std::min(chunk, inner - j);
    int64_t n = 0;
    for (; n + kWide * lanes <= width; n += kWide * lanes)
      product_columns<R, kWide>(rows, size, a + j, lda, b + j * ldb + n, ldb, c + n, ldc, j > 0);
    for (; n + lanes <= width; n += lanes)
      product_columns<R, 1>(rows, size, a + j, lda, b + j * ldb + n, ldb, c + n, ldc, j > 0);
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

// --- rows of scores -----------------------------------------------------------------------

inline double exponential(double x) { return std::exp(x); }

// e^x to 2 ulp for x <= 0; 0 below -87
inline float exponential(float x) {
  const float clamped = x < -87.0f ? -87.0f : x;
  const float n = std::rint(clamped * 1.442695041f);
  const float r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const int32_t power = (static_cast<int32_t>(n) + 127) << 23;
  float scale;
  std::memcpy(&scale, &power, 4);
  return x < -87.0f ? 0.0f : p * scale;
}

// Reductions in a fixed number of lanes, which compilers turn into vectors and which add in the
// same order everywhere.
constexpr int64_t kLanes = 32;

template <typename R, typename Step>
inline R summed(int64_t first, int64_t last, Step step) {
  R lanes[kLanes] = {};
  int64_t j = first;
  for (; j + kLanes <= last; j += kLanes)
    for (int64_t l = 0; l < kLanes; ++l) lanes[l] += step(j + l);
  R sum = 0;
  for (; j < last; ++j) sum += step(j);
  for (int64_t width = kLanes / 2; width; width /= 2)
    for (int64_t l = 0; l < width; ++l) lanes[l] += lanes[l + width];
  return sum + lanes[0];
}

template <typename R>
inline R largest(const R* s, int64_t first, int64_t last, R top) {
  R lanes[kLanes];
  std::fill_n(lanes, kLanes, top);
  int64_t j = first;
  for (; j + kLanes <= last; j += kLanes)
    for (int64_t l = 0; l < kLanes; ++l) lanes[l] = s[j + l] > lanes[l] ? s[j + l] : lanes[l];
  for (; j < last; ++j) top = s[j] > top ? s[j] : top;
  for (int64_t l = 0; l < kLanes; ++l) top = lanes[l] > top ? lanes[l] : top;
  return top;
}

// keys [first, last)
struct Reach {
  int64_t first, last;
};

struct Sizes {
  int64_t batch, queries, keys, heads, noise_heads, groups, width, value_width;
  int64_t causal, window;  // window 0 means none

  int64_t units() const { return noise_heads ? noise_heads : heads; }
  int64_t ratio() const { return noise_heads ? heads / noise_heads : 1; }

  // keys that any row of [start, stop) may see by position
  Reach reach(int64_t start, int64_t stop) const {
    const int64_t offset = keys - queries;
    int64_t first = 0, last = keys;
    if (causal) last = std::min(last, stop + offset);
    if (window && !causal) last = std::min(last, stop - 1 + offset + window);
    if (window) first = std::max<int64_t>(0, start + offset - window + 1);
    last = std::max<int64_t>(last, 0);
    return {std::min(first, last), last};
  }

};

// The scores of a block of rows: whole panels of keys from `first` on, `stride` of them in a row.
// Columns before `skip` and from `end` on belong to keys that no row of the block sees; they are
// never multiplied, for these keys may hold anything.
struct Block {
  const Sizes& z;
  int64_t start, rows, first, skip, end, stride;

  Block(const Sizes& sizes, int64_t from, int64_t height) : z(sizes), start(from) {
    rows = std::min(height, z.queries - start);
    const Reach all = z.reach(start, start + rows);
    first = all.first / kPanel * kPanel;
    skip = all.first - first;
    end = all.last - first;
    stride = (end + kPanel - 1) / kPanel * kPanel;
  }
  bool empty() const { return skip == end; }
  int64_t panels() const { return stride / kPanel; }
  int64_t cols() const { return end - skip; }
  int64_t key() const { return first + skip; }  // of the first column that counts
  Reach seen(int64_t row) const {
    const Reach own = z.reach(row, row + 1);
    const int64_t left = std::min(std::max(own.first - first, skip), end);
    return {left, std::max(std::min(own.last - first, end), left)};
  }
};

template <typename R>
constexpr R kNone = -std::numeric_limits<R>::infinity();

// What a row of scores sums up to.
template <typename R>
struct Sum {
  R lse;      // log-sum-exp; -inf where nothing is seen
  R inverse;  // turns what `softmax_row` leaves into the map; 0 where nothing is seen
};

// Scores of a row become exp(score - largest); outside of what it sees they become 0.
template <typename R>
inline Sum<R> softmax_row(R* row, const Block& block, Reach seen, const R* mask, int64_t step,
                          const R* sink) {
  std::fill(row + block.skip, row + seen.first, R(0));
  std::fill(row + seen.last, row + block.end, R(0));
  if (mask)
    for (int64_t j = seen.first; j < seen.last; ++j) row[j] += mask[j * step];
  const R top = largest(row, seen.first, seen.last, sink ? *sink : kNone<R>);
  if (top == kNone<R>) {
    // nothing is seen, or there is NaN, which is never the largest and must not be lost
    for (int64_t j = seen.first; j < seen.last; ++j) row[j] = row[j] == kNone<R> ? R(0) : row[j];
    const R sum = summed<R>(seen.first, seen.last, [&](int64_t j) { return row[j]; });
    return {sum == 0 ? kNone<R> : sum, sum};
  }
  const R sum = (sink ? std::exp(*sink - top) : R(0)) +
                summed<R>(seen.first, seen.last,
                          [&](int64_t j) { return row[j] = exponential(row[j] - top); });
  return {top + std::log(sum), R(1) / sum};
}

// Scores of a row become the map, by a known log-sum-exp.
template <typename R>
inline void map_row(R* row, const Block& block, Reach seen, const R* mask, int64_t step, R lse) {
  std::fill(row + block.skip, row + seen.first, R(0));
  std::fill(row + seen.last, row + block.end, R(0));
  if (lse == kNone<R>) {
    std::fill(row + seen.first, row + seen.last, R(0));
  } else if (mask) {
    for (int64_t j = seen.first; j < seen.last; ++j)
      row[j] = exponential(row[j] + mask[j * step] - lse);
  } else {
    for (int64_t j = seen.first; j < seen.last; ++j) row[j] = exponential(row[j] - lse);
  }
}

// --- tensors --------------------------------------------------------------------------------

// [B, T, heads, width]
template <typename R>
struct Rows {
  R* data;
  int64_t batch, time, head;
  R* at(int64_t b, int64_t t, int64_t h) const { return data + b * batch + t * time + h * head; }
};

// additive, [B, H, T, S] by strides, or none
template <typename R>
struct Mask {
  const R* data;
  int64_t batch, head, row, key;
  const R* at(int64_t b, int64_t h, int64_t t, int64_t j) const {
    return data ? data + b * batch + h * head + t * row + j * key : nullptr;
  }
};

template <typename R>
struct Inputs {
  Rows<const R> q, k, v, q_noise, k_noise;
  Mask<R> mask;
  const R *lam, *sink, *sink_noise;  // lam [B, T, H]
  R scale;
};

// Keys as panels [B, G][panel][width][kPanel], times a factor; the last panel ends in zeros.
template <typename R>
class Packed {
 public:
  Packed(const Sizes& z, Rows<const R> x, int64_t width, R factor)
      : panels_((z.keys + kPanel - 1) / kPanel), width_(width), groups_(z.groups) {
    const int64_t items = z.batch * z.groups * panels_;
    data_.reset(new (std::align_val_t(64)) R[items * width * kPanel]);
#pragma omp parallel for
    for (int64_t item = 0; item < items; ++item) {
      const int64_t panel = item % panels_, g = item / panels_ % groups_, b = item / panels_ / groups_;
      R* to = data_.get() + item * width * kPanel;
      for (int64_t n = 0; n < kPanel; ++n) {
        const int64_t key = panel * kPanel + n;
        const R* from = key < z.keys ? x.at(b, key, g) : nullptr;
        for (int64_t d = 0; d < width; ++d) to[d * kPanel + n] = from ? from[d] * factor : R(0);
      }
    }
  }
  const R* at(int64_t b, int64_t g, int64_t key) const {
    return data_.get() + ((b * groups_ + g) * panels_ + key / kPanel) * width_ * kPanel;
  }

 private:
  struct Free {
    void operator()(R* p) const { ::operator delete[](p, std::align_val_t(64)); }
  };
  int64_t panels_, width_, groups_;
  std::unique_ptr<R[], Free> data_;
};

template <typename R>
struct Buffer {
  explicit Buffer(int64_t size) : data(size ? new (std::align_val_t(64)) R[size] : nullptr) {}
  ~Buffer() { ::operator delete[](data, std::align_val_t(64)); }
  Buffer(const Buffer&) = delete;
  R* data;
};

int64_t block_height(int64_t keys, int64_t bytes_per_key, int64_t budget) {
  int64_t rows = 96;
  while (rows > 24 && rows * keys * bytes_per_key > budget) rows -= 24;
  return rows;
}

int64_t padded(int64_t keys) { return (keys + kPanel - 1) / kPanel * kPanel; }

// --- passes -----------------------------------------------------------------------------------

template <typename R>
void forward(const Sizes& z, const Inputs<R>& in, Rows<R> out, R* lse, R* lse_noise,
             int64_t budget) {
  const bool noise = z.noise_heads > 0, shared = in.k.data == in.k_noise.data;
  const int64_t units = z.units(), ratio = z.ratio();
  const Packed<R> keys(z, in.k, z.width, in.scale);
  const Packed<R> own(noise && !shared ? z : Sizes{}, in.k_noise, z.width, in.scale);
  const Packed<R>& keys_noise = noise && !shared ? own : keys;
  const int64_t height = block_height(z.keys, (1 + noise) * sizeof(R), budget);
  const int64_t blocks = (z.queries + height - 1) / height;
  const int64_t size = height * padded(z.keys);
#pragma omp parallel
  {
    Buffer<R> signal(size), other(noise ? size : 0);
    std::vector<R> inverse(height, R(0));
    // with causal order the last blocks see most keys: first come, first served from there
#pragma omp for schedule(dynamic)
    for (int64_t item = 0; item < z.batch * units * blocks; ++item) {
      const int64_t unit = item / blocks % units, b = item / blocks / units;
      const Block block(z, (blocks - 1 - item % blocks) * height, height);
      const int64_t start = block.start, ld = block.stride, group = unit * z.groups / units;
      if (noise) {
        scores<R>(block.rows, block.panels(), z.width, in.q_noise.at(b, start, unit),
                  in.q_noise.time, keys_noise.at(b, group, block.first), other.data, ld);
        for (int64_t i = 0; i < block.rows; ++i) {
          const int64_t t = start + i;
          const Sum<R> sum = softmax_row(other.data + i * ld, block, block.seen(t),
                                         in.mask.at(b, unit * ratio, t, block.first), in.mask.key,
                                         in.sink_noise ? in.sink_noise + unit : nullptr);
          lse_noise[(b * units + unit) * z.queries + t] = sum.lse;
          inverse[i] = sum.inverse;
        }
      }
      for (int64_t h = unit * ratio; h < (unit + 1) * ratio; ++h) {
        scores<R>(block.rows, block.panels(), z.width, in.q.at(b, start, h), in.q.time,
                  keys.at(b, group, block.first), signal.data, ld);
        for (int64_t i = 0; i < block.rows; ++i) {
          const int64_t t = start + i;
          R* row = signal.data + i * ld;
          const Sum<R> sum =
              softmax_row(row, block, block.seen(t), in.mask.at(b, h, t, block.first), in.mask.key,
                          in.sink ? in.sink + h : nullptr);
          lse[(b * z.heads + h) * z.queries + t] = sum.lse;
          if (noise) {
            const R* minus = other.data + i * ld;
            const R factor = in.lam[(b * z.queries + t) * z.heads + h] * inverse[i];
            for (int64_t j = block.skip; j < block.end; ++j)
              row[j] = row[j] * sum.inverse - minus[j] * factor;
          } else {
            for (int64_t j = block.skip; j < block.end; ++j) row[j] *= sum.inverse;
          }
        }
        if (block.empty()) {
          for (int64_t i = 0; i < block.rows; ++i)
            std::fill_n(out.at(b, start + i, h), z.value_width, R(0));
        } else {
          product<R>(block.rows, z.value_width, block.cols(), signal.data + block.skip, ld,
                     in.v.at(b, block.key(), group), in.v.time, out.at(b, start, h), out.time);
        }
      }
    }
  }
}

template <typename R>
struct Gradients {
  Rows<R> q, k, v, q_noise, k_noise;
  R *delta, *delta_noise;  // [B, H, T]: sum_j P dP of both maps, dP = dO v^T
};

template <typename R>
void backward(const Sizes& z, const Inputs<R>& in, Rows<const R> d_out, const R* lse,
              const R* lse_noise, const Gradients<R>& g, int64_t budget) {
  const bool noise = z.noise_heads > 0, shared = in.k.data == in.k_noise.data;
  const int64_t units = z.units(), ratio = z.ratio(), per_group = units / z.groups;
  const Packed<R> keys(z, in.k, z.width, in.scale), values(z, in.v, z.value_width, R(1));
  const Packed<R> own(noise && !shared ? z : Sizes{}, in.k_noise, z.width, in.scale);
  const Packed<R>& keys_noise = noise && !shared ? own : keys;
  const Rows<R>& d_k_noise = shared ? g.k : g.k_noise;
  const int64_t height = block_height(z.keys, (noise ? 4 : 2) * sizeof(R), budget);
  const int64_t size = height * padded(z.keys);
  const R s = in.scale;
#pragma omp parallel
  {
    Buffer<R> p(size), d(size), pn(noise ? size : 0), dn(noise ? size : 0);
    // gradients of keys and values are added up by one thread a group, always in one order
#pragma omp for schedule(dynamic)
    for (int64_t item = 0; item < z.batch * z.groups; ++item) {
      const int64_t group = item % z.groups, b = item / z.groups;
      for (int64_t unit = group * per_group; unit < (group + 1) * per_group; ++unit) {
        for (int64_t start = 0; start < z.queries; start += height) {
          const Block block(z, start, height);
          if (block.empty()) continue;
          const int64_t ld = block.stride, skip = block.skip, end = block.end;
          const int64_t rows = block.rows, cols = block.cols(), key = block.key();
          if (noise) {
            scores<R>(rows, block.panels(), z.width, in.q_noise.at(b, start, unit),
                      in.q_noise.time, keys_noise.at(b, group, block.first), pn.data, ld);
            for (int64_t i = 0; i < rows; ++i) {
              const int64_t t = start + i;
              map_row(pn.data + i * ld, block, block.seen(t),
                      in.mask.at(b, unit * ratio, t, block.first), in.mask.key,
                      lse_noise[(b * units + unit) * z.queries + t]);
            }
          }
          for (int64_t h = unit * ratio; h < (unit + 1) * ratio; ++h) {
            scores<R>(rows, block.panels(), z.width, in.q.at(b, start, h), in.q.time,
                      keys.at(b, group, block.first), p.data, ld);
            scores<R>(rows, block.panels(), z.value_width, d_out.at(b, start, h), d_out.time,
                      values.at(b, group, block.first), d.data, ld);
            for (int64_t i = 0; i < rows; ++i) {
              const int64_t t = start + i, at = (b * z.heads + h) * z.queries + t;
              R *row = p.data + i * ld, *dp = d.data + i * ld;
              map_row(row, block, block.seen(t), in.mask.at(b, h, t, block.first), in.mask.key,
                      lse[at]);
              const R sum = summed<R>(skip, end, [&](int64_t j) { return row[j] * dp[j]; });
              g.delta[at] = sum;
              if (!noise) {
                for (int64_t j = skip; j < end; ++j) dp[j] = s * row[j] * (dp[j] - sum);
                continue;
              }
              const R* other = pn.data + i * ld;
              R* dno = dn.data + i * ld;
              const R sum_noise =
                  summed<R>(skip, end, [&](int64_t j) { return other[j] * dp[j]; });
              g.delta_noise[at] = sum_noise;
              const R lam = in.lam[(b * z.queries + t) * z.heads + h], minus = -lam * s;
              if (h == unit * ratio) std::fill(dno + skip, dno + end, R(0));
              for (int64_t j = skip; j < end; ++j) {
                const R x = dp[j], seen = row[j], unseen = other[j];
                dp[j] = s * seen * (x - sum);
                dno[j] += minus * unseen * (x - sum_noise);
                row[j] = seen - lam * unseen;
              }
            }
            add_outer<R>(cols, z.value_width, rows, p.data + skip, ld, d_out.at(b, start, h),
                         d_out.time, g.v.at(b, key, group), g.v.time);
            product<R>(rows, z.width, cols, d.data + skip, ld, in.k.at(b, key, group), in.k.time,
                       g.q.at(b, start, h), g.q.time);
            add_outer<R>(cols, z.width, rows, d.data + skip, ld, in.q.at(b, start, h), in.q.time,
                         g.k.at(b, key, group), g.k.time);
          }
          if (noise) {
            product<R>(rows, z.width, cols, dn.data + skip, ld, in.k_noise.at(b, key, group),
                       in.k_noise.time, g.q_noise.at(b, start, unit), g.q_noise.time);
            add_outer<R>(cols, z.width, rows, dn.data + skip, ld, in.q_noise.at(b, start, unit),
                         in.q_noise.time, d_k_noise.at(b, key, group), d_k_noise.time);
          }
        }
      }
    }
  }
}

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

template <typename R>
Inputs<R> inputs(Listed& l, double scale) {
  // braces evaluate from left to right
  return {l.rows<const R>(), l.rows<const R>(), l.rows<const R>(), l.rows<const R>(),
          l.rows<const R>(), l.mask<R>(), l.pointer<const R>(), l.pointer<const R>(),
          l.pointer<const R>(), R(scale)};
}

template <typename R>
void run_forward(const Sizes& z, Listed l, double scale, int64_t budget) {
  const Inputs<R> in = inputs<R>(l, scale);
  const Rows<R> out = l.rows<R>();
  R* lse = l.pointer<R>();
  R* lse_noise = l.pointer<R>();
  forward(z, in, out, lse, lse_noise, budget);
}

template <typename R>
void run_backward(const Sizes& z, Listed l, double scale, int64_t budget) {
  const Inputs<R> in = inputs<R>(l, scale);
  const Rows<const R> d_out = l.rows<const R>();
  const R* lse = l.pointer<const R>();
  const R* lse_noise = l.pointer<const R>();
  const Gradients<R> g{l.rows<R>(), l.rows<R>(), l.rows<R>(), l.rows<R>(), l.rows<R>(),
                       l.pointer<R>(), l.pointer<R>()};
  backward(z, in, d_out, lse, lse_noise, g, budget);
}

}  // namespace

// In the order of `Inputs`, then out, lse, lse_noise; or d_out, lse, lse_noise, `Gradients`.
extern "C" void diff_attention_forward(int is_double, const Sizes* sizes, void* const* pointers,
                                       const int64_t* strides, double scale, int64_t budget) {
  (is_double ? run_forward<double> : run_forward<float>)(*sizes, {pointers, strides}, scale, budget);
}

extern "C" void diff_attention_backward(int is_double, const Sizes* sizes, void* const* pointers,
                                        const int64_t* strides, double scale, int64_t budget) {
  (is_double ? run_backward<double> : run_backward<float>)(*sizes, {pointers, strides}, scale,
                                                           budget);
}
