// The forward pass of a block of query rows against all of its keys.
#pragma once
#include <vector>

#include "maps.h"
#include "products.h"
#include "tensors.h"

// [B, G][keys], packed or dense, for all threads
template <typename R>
class Shared {
 public:
  template <typename S>
  Shared(const Sizes& z, Rows<const S> x, int64_t width, bool packed)
      : groups_(z.groups), wide_(padded_width(width)), keys_(padded_keys(z.keys)),
        data_(z.batch * groups_ * keys_ * wide_) {
    constexpr int64_t chunk = 8 * kPanel;
    const int64_t chunks = (z.keys + chunk - 1) / chunk;
#pragma omp parallel
    {
      Buffer<R> dense(packed ? chunk * wide_ : 0);
#pragma omp for
      for (int64_t item = 0; item < z.batch * groups_ * chunks; ++item) {
        const int64_t key = item % chunks * chunk, g = item / chunks % groups_;
        const int64_t b = item / chunks / groups_, count = std::min(chunk, z.keys - key);
        R* to = data_.data + ((b * groups_ + g) * keys_ + key) * wide_;
        read_rows(x.at(b, key, g), x.time, count, width, packed ? dense.data : to);
        if (packed) pack(dense.data, count, wide_, to);
      }
    }
  }
  // a packed one wants a multiple of kPanel
  const R* at(int64_t b, int64_t g, int64_t key) const {
    return data_.data + ((b * groups_ + g) * keys_ + key) * wide_;
  }

 private:
  int64_t groups_, wide_, keys_;
  Buffer<R> data_;
};

// Where a row of scores stands: its time, its mask from key 0 on, its sink, its log-sum-exp.
template <typename R>
struct Row {
  int64_t t;
  const R *mask, *sink;
  R* lse;
};

// exp(score - largest so far) of some rows, tile by tile, and the factors that make it the map
template <typename R>
struct Exponentials {
  Buffer<R> values, factors;  // [tile][height][kStride], [tile][height]
  int64_t height;

  Exponentials(int64_t tiles, int64_t rows)
      : values(tiles * rows * kStride), factors(tiles * rows), height(rows) {}
  R* row(int64_t tile, int64_t i) { return values.data + (tile * height + i) * kStride; }
  R& factor(int64_t tile, int64_t i) { return factors.data[tile * height + i]; }

  // score(tile, to) writes the scores of all rows, place(i) tells where row i stands
  template <typename Score, typename Place>
  void fill(const Block& block, int64_t rows, int64_t mask_step, Score score, Place place) {
    std::vector<Running<R>> so_far;
    for (int64_t i = 0; i < rows; ++i) so_far.emplace_back(place(i).sink);
    for (int64_t n = 0; n < block.tiles(); ++n) {
      const Tile tile = block.tile(n);
      score(tile, row(n, 0));
      for (int64_t i = 0; i < rows; ++i) {
        const Row<R> at = place(i);
        so_far[i].read(row(n, i), tile.columns(), block.seen(at.t, tile),
                       at.mask ? at.mask + tile.key * mask_step : nullptr, mask_step);
        factor(n, i) = so_far[i].top;
      }
    }
    for (int64_t n = 0; n < block.tiles(); ++n)
      for (int64_t i = 0; i < rows; ++i) factor(n, i) = so_far[i].factor(factor(n, i));
    for (int64_t i = 0; i < rows; ++i) *place(i).lse = so_far[i].lse();
  }
};

// row = a row - b minus
template <typename R>
inline void difference(R* row, const R* minus, int64_t columns, R a, R b) {
  for (int64_t j = 0; j < columns; j += Vector<R>::lanes)
    store(row + j, load(row + j) * a - load(minus + j) * b);
}

template <typename R>
inline void scaled(R* row, int64_t columns, R a) {
  for (int64_t j = 0; j < columns; j += Vector<R>::lanes) store(row + j, load(row + j) * a);
}

// Rows of a block: few enough for the second cache, or, where that leaves too few for the keys that
// each block reads, for the third.
inline int64_t block_height(int64_t keys, int64_t bytes_per_key) {
  constexpr int64_t step = 24, most = 96, second = 2 << 20, third = 12 << 20;
  const int64_t fit = second / (keys * bytes_per_key) / step * step;
  if (fit >= 2 * step) return std::min(fit, most);
  return std::clamp(third / (keys * bytes_per_key) / step * step, step, most);
}

template <typename S, typename R>
void forward(const Sizes& z, const Inputs<S, R>& in, Rows<S> out, R* lse, R* lse_noise) {
  const bool noise = z.noise_heads > 0, own_keys = in.k_noise.data;
  const int64_t units = z.units(), ratio = z.ratio();
  const int64_t wide = padded_width(z.width), value_wide = padded_width(z.value_width);
  const Shared<R> keys(z, in.k, z.width, true), values(z, in.v, z.value_width, false);
  const Shared<R> own(own_keys ? z : Sizes{}, in.k_noise, z.width, true);
  const Shared<R>& keys_noise = own_keys ? own : keys;
  const int64_t height = block_height(z.keys, (1 + noise) * sizeof(R));
  const int64_t blocks = (z.queries + height - 1) / height;
  const int64_t tiles = (z.keys + kPanel + kTile - 1) / kTile;
#pragma omp parallel
  {
    Exponentials<R> signal(tiles, height), other(noise ? tiles : 0, height);
    Buffer<R> q(height * wide), sums(height * value_wide);
    // with causal order the last blocks see most keys: first come, first served from there
#pragma omp for schedule(dynamic)
    for (int64_t item = 0; item < z.batch * units * blocks; ++item) {
      const int64_t unit = item / blocks % units, b = item / blocks / units;
      const Block block(z, (blocks - 1 - item % blocks) * height, height);
      const int64_t start = block.start, group = unit * z.groups / units;
      if (noise) {
        read_rows(in.q_noise.at(b, start, unit), in.q_noise.time, block.rows, z.width, q.data,
                  in.scale);
        other.fill(
            block, block.rows, in.mask.key,
            [&](const Tile& tile, R* to) {
              scores<R>(block.rows, tile.panels(), wide, q.data, wide,
                        keys_noise.at(b, group, tile.key), to, kStride);
            },
            [&](int64_t i) -> Row<R> {
              return {start + i, in.mask.at(b, unit * ratio, start + i, 0),
                      in.sink_noise ? in.sink_noise + unit : nullptr,
                      lse_noise + (b * units + unit) * z.queries + start + i};
            });
      }
      for (int64_t h = unit * ratio; h < (unit + 1) * ratio; ++h) {
        read_rows(in.q.at(b, start, h), in.q.time, block.rows, z.width, q.data, in.scale);
        signal.fill(
            block, block.rows, in.mask.key,
            [&](const Tile& tile, R* to) {
              scores<R>(block.rows, tile.panels(), wide, q.data, wide,
                        keys.at(b, group, tile.key), to, kStride);
            },
            [&](int64_t i) -> Row<R> {
              return {start + i, in.mask.at(b, h, start + i, 0), in.sink ? in.sink + h : nullptr,
                      lse + (b * z.heads + h) * z.queries + start + i};
            });
        if (!block.tiles()) std::fill_n(sums.data, block.rows * value_wide, R(0));
        for (int64_t n = 0; n < block.tiles(); ++n) {
          const Tile tile = block.tile(n);
          for (int64_t i = 0; i < block.rows; ++i) {
            R* row = signal.row(n, i);
            if (noise) {
              const R lam = *in.lam.at(b, start + i, h);
              difference(row, other.row(n, i), tile.columns(), signal.factor(n, i),
                         lam * other.factor(n, i));
            } else {
              scaled(row, tile.columns(), signal.factor(n, i));
            }
          }
          product<R>(block.rows, value_wide, tile.end - tile.skip, signal.row(n, 0) + tile.skip,
                     kStride, values.at(b, group, tile.key + tile.skip), value_wide, sums.data,
                     value_wide, n > 0);
        }
        write_rows(sums.data, block.rows, z.value_width, out.at(b, start, h), out.time);
      }
    }
  }
}
