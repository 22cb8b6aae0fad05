// A few queries against many keys: a cache is read where it lies, once for all heads of a group.
#pragma once
#include <type_traits>
#include <vector>

#include "forward.h"

constexpr int64_t kFewQueries = 4, kAhead = 32;

// Fetch the row that is read some keys later: what streams from memory is not to be waited for.
template <typename R>
inline void fetch(const R* row, int64_t width) {
  for (int64_t d = 0; d < width; d += 64 / int64_t(sizeof(R))) __builtin_prefetch(row + d);
}

// Rows of queries, of which those from `split` on meet the channels from `shift` on of the keys.
template <typename R>
struct Queries {
  const R* data;
  int64_t rows, width, split, shift;
};

// C[COUNT, lanes] of the rows from `i` on, with the keys from `j` on; the last one stands in for
// keys beyond it
template <typename R, int COUNT>
inline void dots_block(const Queries<R>& a, int64_t i, int64_t j, int64_t keys, const R* b,
                       int64_t ldb, R* c, int64_t ldc) {
  constexpr int lanes = Vector<R>::lanes;
  V<R> sums[COUNT][lanes];
  for (int n = 0; n < lanes; ++n) {
    const R* key = b + std::min(j + reversed<R>(n), keys - 1) * ldb;
    if (i == 0) fetch(key + kAhead * ldb, a.shift + a.width);
    for (int m = 0; m < COUNT; ++m) {
      const R *row = a.data + (i + m) * a.width, *met = i + m < a.split ? key : key + a.shift;
      V<R> sum = {};
      for (int64_t d = 0; d < a.width; d += lanes) sum += load(row + d) * load(met + d);
      sums[m][n] = sum;
    }
  }
  for (int m = 0; m < COUNT; ++m) {
    const V<R> found = lane_sums<R>(sums[m]);
    R* to = c + (i + m) * ldc + j;
    if (j + lanes <= keys)
      store(to, found);
    else
      std::memcpy(to, &found, (keys - j) * sizeof(R));
  }
}

// C[rows, keys] = A[rows, width] B[keys, width]^T, B as it lies; width fits into vectors
template <typename R>
void dots(const Queries<R>& a, int64_t keys, const R* b, int64_t ldb, R* c, int64_t ldc) {
  for (int64_t j = 0; j < keys; j += Vector<R>::lanes) {
    int64_t i = 0;
    for (; i + 4 <= a.rows; i += 4) dots_block<R, 4>(a, i, j, keys, b, ldb, c, ldc);
    for (; i + 2 <= a.rows; i += 2) dots_block<R, 2>(a, i, j, keys, b, ldb, c, ldc);
    if (i < a.rows) dots_block<R, 1>(a, i, j, keys, b, ldb, c, ldc);
  }
}

// C[rows, width] += A[rows, keys] B[keys, width], B as it lies; width fits into vectors
template <typename R>
void weigh(int64_t rows, int64_t width, int64_t keys, const R* a, int64_t lda, const R* b,
           int64_t ldb, R* c, int64_t ldc) {
  constexpr int lanes = Vector<R>::lanes, vectors = 4;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t d = 0; d < width; d += vectors * lanes) {
      const int count = int(std::min<int64_t>(vectors, (width - d) / lanes));
      V<R> even[vectors] = {}, odd[vectors] = {};
      const auto add = [&](int64_t j, V<R>* to, auto size) {
        const R* value = b + j * ldb + d;
        const R x = a[i * lda + j];
        if (i == 0) fetch(value + kAhead * ldb, size() * lanes);
        for (int n = 0; n < size(); ++n) to[n] += x * load(value + n * lanes);
      };
      const auto all = [&](auto size) {
        int64_t j = 0;
        for (; j + 2 <= keys; j += 2) add(j, even, size), add(j + 1, odd, size);
        if (j < keys) add(j, even, size);
      };
      if (count == vectors)
        all(std::integral_constant<int, vectors>());
      else
        all([count] { return count; });
      for (int n = 0; n < count; ++n) {
        R* to = c + i * ldc + d + n * lanes;
        store(to, load(to) + even[n] + odd[n]);
      }
    }
  }
}

// Some rows of a cache as the inner loops read them: where they lie, or a copy of them.
template <typename S, typename R>
struct Lying {
  const R* data;
  int64_t step;

  Lying(const S* from, int64_t from_step, int64_t keys, int64_t width, R* copy) {
    if constexpr (std::is_same_v<S, R>) {
      if (width % 16 == 0) {
        data = from, step = from_step;
        return;
      }
    }
    read_rows(from, from_step, keys, width, copy);
    data = copy, step = padded_width(width);
  }
};

// Columns of a tile that some of the rows see, as runs [first, last).
template <typename R>
std::vector<Reach> visible(const Block& block, const Tile& tile, const std::vector<Row<R>>& rows,
                           int64_t step) {
  if (!rows.front().mask) return {{tile.skip, tile.end}};
  std::vector<Reach> runs;
  for (int64_t j = tile.skip; j < tile.end; ++j) {
    const bool seen = std::any_of(rows.begin(), rows.end(), [&](const Row<R>& row) {
      const Reach reach = block.seen(row.t, tile);
      return reach.first <= j && j < reach.last && row.mask[(tile.key + j) * step] != kNone<R>;
    });
    if (!seen) continue;
    if (runs.empty() || runs.back().last < j) runs.push_back({j, j});
    runs.back().last = j + 1;
  }
  return runs;
}

// The norm of each head, y = x / sqrt(mean(x^2) + eps) gain factor, or none.
template <typename R>
struct HeadNorm {
  const R* gain;
  R factor, eps;

  void apply(R* x, int64_t width) const {
    if (!gain) return;
    const R squares = summed<R>(0, width, [&](int64_t d) { return x[d] * x[d]; });
    const R scale = factor / std::sqrt(squares / R(width) + eps);
    for (int64_t d = 0; d < width; ++d) x[d] *= scale * gain[d];
  }
};

template <typename S, typename R>
void decode(const Sizes& z, const Inputs<S, R>& in, const HeadNorm<R>& norm, Rows<S> out, R* lse,
            R* lse_noise) {
  const bool noise = z.noise_heads > 0, own_keys = in.k_noise.data;
  const int64_t ratio = z.ratio(), times = z.queries, heads = z.heads / z.groups;
  const int64_t noise_heads = z.noise_heads / z.groups, rows = heads * times;
  const int64_t noise_rows = noise_heads * times;
  const int64_t wide = padded_width(z.width), value_wide = padded_width(z.value_width);
  // noise keys that lie behind the signal's are read with them
  const bool joined = own_keys && in.k_noise.data == in.k.data + z.width && z.width == wide;
  const Block block(z, 0, times);
  const int64_t tiles = block.tiles(), all = rows + noise_rows;
#pragma omp parallel
  {
    Exponentials<R> maps(tiles, all);  // signal rows, then noise rows
    Buffer<R> q(all * wide), sums(rows * value_wide), copy(kTile * std::max(2 * wide, value_wide));
    R* const q_noise = q.data + rows * wide;
#pragma omp for schedule(dynamic)
    for (int64_t item = 0; item < z.batch * z.groups; ++item) {
      const int64_t g = item % z.groups, b = item / z.groups;
      // row i is head i / times of the group, at time i % times
      const auto head = [&](int64_t i) { return g * heads + i / times; };
      const auto noise_head = [&](int64_t i) { return g * noise_heads + i / times; };
      const auto place = [&](int64_t i) -> Row<R> {
        const int64_t t = i % times;
        if (i < rows) {
          const int64_t h = head(i);
          return {t, in.mask.at(b, h, t, 0), in.sink ? in.sink + h : nullptr,
                  lse + (b * z.heads + h) * times + t};
        }
        const int64_t h = noise_head(i - rows);
        return {t, in.mask.at(b, h * ratio, t, 0), in.sink_noise ? in.sink_noise + h : nullptr,
                lse_noise + (b * z.noise_heads + h) * times + t};
      };
      std::vector<Row<R>> looking;  // one row for all heads where these share a mask
      for (int64_t i = 0; i < (in.mask.head ? rows : times); ++i) looking.push_back(place(i));
      for (int64_t i = 0; i < rows; ++i)
        read_rows(in.q.at(b, i % times, head(i)), 0, 1, z.width, q.data + i * wide, in.scale);
      for (int64_t i = 0; i < noise_rows; ++i)
        read_rows(in.q_noise.at(b, i % times, noise_head(i)), 0, 1, z.width, q_noise + i * wide,
                  in.scale);
      std::vector<std::vector<Reach>> runs;
      for (int64_t n = 0; n < tiles; ++n)
        runs.push_back(visible(block, block.tile(n), looking, in.mask.key));
      const auto meet = [&](const Rows<const S>& k, const Tile& tile, const Queries<R>& queries,
                            R* to) {
        for (const Reach& run : runs[(tile.key - block.first()) / kTile]) {
          const int64_t keys = run.last - run.first;
          const Lying<S, R> lying(k.at(b, tile.key + run.first, g), k.time, keys,
                                  queries.shift + z.width, copy.data);
          dots<R>(queries, keys, lying.data, lying.step, to + run.first, kStride);
        }
      };
      maps.fill(
          block, all, in.mask.key,
          [&](const Tile& tile, R* to) {
            if (!own_keys || joined) {
              meet(in.k, tile, {q.data, all, wide, rows, joined ? z.width : 0}, to);
            } else {
              meet(in.k, tile, {q.data, rows, wide, rows, 0}, to);
              meet(in.k_noise, tile, {q_noise, noise_rows, wide, noise_rows, 0},
                   to + rows * kStride);
            }
          },
          place);
      std::fill_n(sums.data, rows * value_wide, R(0));
      for (int64_t n = 0; n < tiles; ++n) {
        const Tile tile = block.tile(n);
        for (int64_t i = 0; i < rows; ++i) {
          if (noise) {
            const int64_t t = i % times, minus = rows + i / times / ratio * times + t;
            const R lam = *in.lam.at(b, t, head(i));
            difference(maps.row(n, i), maps.row(n, minus), tile.columns(), maps.factor(n, i),
                       lam * maps.factor(n, minus));
          } else {
            scaled(maps.row(n, i), tile.columns(), maps.factor(n, i));
          }
        }
        for (const Reach& run : runs[n]) {
          const int64_t keys = run.last - run.first;
          const Lying<S, R> lying(in.v.at(b, tile.key + run.first, g), in.v.time, keys,
                                  z.value_width, copy.data);
          weigh<R>(rows, value_wide, keys, maps.row(n, 0) + run.first, kStride, lying.data,
                   lying.step, sums.data, value_wide);
        }
      }
      for (int64_t i = 0; i < rows; ++i) norm.apply(sums.data + i * value_wide, z.value_width);
      for (int64_t i = 0; i < rows; ++i)
        write_rows(sums.data + i * value_wide, 1, z.value_width, out.at(b, i % times, head(i)), 0);
    }
  }
}
