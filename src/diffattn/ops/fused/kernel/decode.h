// A few queries against many keys: a cache is read where it lies, once for all heads of a group.
#pragma once
#include <type_traits>
#include <vector>

#include "forward.h"

constexpr int64_t kFewQueries = 4;

// C[rows, keys] = A[rows, wide] B[keys, width]^T, B as it lies; width fits into vectors
template <typename R>
void dots(int64_t rows, int64_t keys, int64_t width, const R* a, int64_t wide, const R* b,
          int64_t ldb, R* c, int64_t ldc) {
  constexpr int lanes = Vector<R>::lanes;
  for (int64_t j = 0; j < keys; j += lanes) {
    for (int64_t i = 0; i < rows; ++i) {
      V<R> sums[lanes];
      for (int n = 0; n < lanes; ++n) {
        // beyond the last key, the last once more
        const R* key = b + std::min(j + reversed<R>(n), keys - 1) * ldb;
        V<R> sum = {};
        for (int64_t d = 0; d < width; d += lanes) sum += load(a + i * wide + d) * load(key + d);
        sums[n] = sum;
      }
      const V<R> found = lane_sums<R>(sums);
      if (j + lanes <= keys)
        store(c + i * ldc + j, found);
      else
        std::memcpy(c + i * ldc + j, &found, (keys - j) * sizeof(R));
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

template <typename S, typename R>
void decode(const Sizes& z, const Inputs<S, R>& in, Rows<S> out, R* lse, R* lse_noise) {
  const bool noise = z.noise_heads > 0, own_keys = in.k_noise.data;
  const int64_t ratio = z.ratio(), times = z.queries, heads = z.heads / z.groups;
  const int64_t noise_heads = z.noise_heads / z.groups, rows = heads * times;
  const int64_t noise_rows = noise_heads * times;
  const int64_t wide = padded_width(z.width), value_wide = padded_width(z.value_width);
  const Block block(z, 0, times);
  const int64_t tiles = block.tiles(), all = rows + noise_rows;
#pragma omp parallel
  {
    Exponentials<R> maps(tiles, all);  // signal rows, then noise rows
    Buffer<R> q(all * wide), sums(rows * value_wide), copy(kTile * std::max(wide, value_wide));
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
      const auto meet = [&](const Rows<const S>& k, const Tile& tile, const R* a, int64_t count,
                            R* to) {
        for (const Reach& run : runs[(tile.key - block.first()) / kTile]) {
          const int64_t keys = run.last - run.first;
          const Lying<S, R> lying(k.at(b, tile.key + run.first, g), k.time, keys, z.width,
                                  copy.data);
          dots<R>(count, keys, wide, a, wide, lying.data, lying.step, to + run.first, kStride);
        }
      };
      maps.fill(
          block, all, in.mask.key,
          [&](const Tile& tile, R* to) {
            meet(in.k, tile, q.data, own_keys ? rows : all, to);
            if (own_keys) meet(in.k_noise, tile, q_noise, noise_rows, to + rows * kStride);
          },
          place);
      std::fill_n(sums.data, rows * value_wide, R(0));
      for (int64_t n = 0; n < tiles; ++n) {
        const Tile tile = block.tile(n);
        for (int64_t i = 0; i < rows; ++i) {
          if (noise) {
            const int64_t t = i % times, minus = rows + i / times / ratio * times + t;
            const R lam = in.lam[(b * times + t) * z.heads + head(i)];
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
          product<R>(rows, value_wide, keys, maps.row(n, 0) + run.first, kStride, lying.data,
                     lying.step, sums.data, value_wide, true);
        }
      }
      for (int64_t i = 0; i < rows; ++i)
        write_rows(sums.data + i * value_wide, 1, z.value_width, out.at(b, i % times, head(i)), 0);
    }
  }
}
