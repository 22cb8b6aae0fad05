// The backward pass: both maps again from their log-sum-exps, dP = dO v^T once for both.
//
//   delta = sum_j P dP of each map;  dS = P (dP - delta);  dS' = -lam P' (dP - delta')
#pragma once
#include "forward.h"

template <typename S, typename R>
struct Gradients {
  Rows<S> q, k, v, q_noise, k_noise;
  R *delta, *delta_noise;  // [B, H, T]
};

// The keys or values of one group, and their gradient as it is added up.
template <typename R>
struct Group {
  Buffer<R> rows, panels, gradient;  // rows: dense, where they are asked for
  Group(int64_t keys, int64_t width, bool dense)
      : rows(dense ? keys * padded_width(width) : 0),
        panels(padded_keys(keys) * padded_width(width)), gradient(keys * padded_width(width)) {}

  template <typename S>
  void read(const S* from, int64_t step, int64_t keys, int64_t width) {
    R* const dense = rows.data ? rows.data : gradient.data;
    read_rows(from, step, keys, width, dense);
    pack(dense, keys, padded_width(width), panels.data);
    std::fill_n(gradient.data, keys * padded_width(width), R(0));
  }
};

// x = dP, seen = P, unseen = P' of a row: they become dS, P - lam P' and, in `noise`, the sum over
// signal heads of dS'; `noise` may be `unseen`
template <typename R>
inline void score_gradients(R* x, R* seen, const R* unseen, R* noise, bool add, int64_t columns,
                            R lam, R delta, R delta_noise) {
  for (int64_t j = 0; j < columns; j += Vector<R>::lanes) {
    const V<R> dp = load(x + j), p = load(seen + j), weighed = lam * load(unseen + j);
    V<R> ds = weighed * (delta_noise - dp);
    if (add) ds += load(noise + j);
    store(noise + j, ds);
    store(x + j, p * (dp - delta));
    store(seen + j, p - weighed);
  }
}

template <typename R>
inline void score_gradients(R* x, const R* seen, int64_t columns, R delta) {
  for (int64_t j = 0; j < columns; j += Vector<R>::lanes)
    store(x + j, load(seen + j) * (load(x + j) - delta));
}

template <typename S, typename R>
void backward(const Sizes& z, const Inputs<S, R>& in, Rows<const S> d_out, const R* lse,
              const R* lse_noise, const Gradients<S, R>& g) {
  const bool noise = z.noise_heads > 0, own_keys = in.k_noise.data;
  const int64_t units = z.units(), ratio = z.ratio(), per_group = units / z.groups;
  const bool several = noise && ratio > 1;  // signal heads of a noise head
  const int64_t wide = padded_width(z.width), value_wide = padded_width(z.value_width);
  const int64_t height = block_height(z.keys, (noise ? 3 : 2) * sizeof(R));
  const int64_t tiles = (z.keys + kPanel + kTile - 1) / kTile, size = tiles * height * kStride;
#pragma omp parallel
  {
    Buffer<R> maps(size), of_maps(size), maps_noise(noise ? size : 0), sums(several ? size : 0);
    Buffer<R> q(height * wide), q_noise(noise ? height * wide : 0), d_rows(height * value_wide);
    Buffer<R> d_q(height * wide), d_q_noise(noise ? height * wide : 0), delta(2 * height);
    Group<R> keys(z.keys, z.width, true), values(z.keys, z.value_width, false);
    Group<R> own(own_keys ? z.keys : 0, z.width, true);
    Group<R>& keys_noise = own_keys ? own : keys;
    R *const deltas = delta.data, *const deltas_noise = delta.data + height;
    R* const of_noise = several ? sums.data : maps_noise.data;
    // gradients of keys and values are added up by one thread a group, always in one order
#pragma omp for schedule(dynamic)
    for (int64_t item = 0; item < z.batch * z.groups; ++item) {
      const int64_t group = item % z.groups, b = item / z.groups;
      keys.read(in.k.at(b, 0, group), in.k.time, z.keys, z.width);
      values.read(in.v.at(b, 0, group), in.v.time, z.keys, z.value_width);
      if (own_keys) own.read(in.k_noise.at(b, 0, group), in.k_noise.time, z.keys, z.width);
      for (int64_t unit = group * per_group; unit < (group + 1) * per_group; ++unit) {
        for (int64_t start = 0; start < z.queries; start += height) {
          const Block block(z, start, height);
          const int64_t rows = block.rows;
          if (!block.tiles()) {
            std::fill_n(d_q.data, rows * wide, R(0));
            if (noise) std::fill_n(d_q_noise.data, rows * wide, R(0));
          }
          if (noise) {
            read_rows(in.q_noise.at(b, start, unit), in.q_noise.time, rows, z.width, q_noise.data,
                      in.scale);
            for (int64_t n = 0; n < block.tiles(); ++n) {
              const Tile tile = block.tile(n);
              R* const to = maps_noise.data + n * height * kStride;
              scores<R>(rows, tile.panels(), wide, q_noise.data, wide,
                        keys_noise.panels.data + tile.key * wide, to, kStride);
              for (int64_t i = 0; i < rows; ++i)
                map_row(to + i * kStride, tile.columns(), block.seen(start + i, tile),
                        in.mask.at(b, unit * ratio, start + i, tile.key), in.mask.key,
                        lse_noise[(b * units + unit) * z.queries + start + i]);
            }
          }
          for (int64_t h = unit * ratio; h < (unit + 1) * ratio; ++h) {
            const int64_t at = (b * z.heads + h) * z.queries + start;
            const bool first = h == unit * ratio;
            read_rows(in.q.at(b, start, h), in.q.time, rows, z.width, q.data, in.scale);
            read_rows(d_out.at(b, start, h), d_out.time, rows, z.value_width, d_rows.data);
            std::fill_n(deltas, 2 * height, R(0));
            for (int64_t n = 0; n < block.tiles(); ++n) {
              const Tile tile = block.tile(n);
              const int64_t place = n * height * kStride, columns = tile.columns();
              scores<R>(rows, tile.panels(), wide, q.data, wide,
                        keys.panels.data + tile.key * wide, maps.data + place, kStride);
              scores<R>(rows, tile.panels(), value_wide, d_rows.data, value_wide,
                        values.panels.data + tile.key * value_wide, of_maps.data + place, kStride);
              for (int64_t i = 0; i < rows; ++i) {
                const int64_t from = place + i * kStride;
                R *p = maps.data + from, *dp = of_maps.data + from;
                const R* other = maps_noise.data + from;
                map_row(p, columns, block.seen(start + i, tile),
                        in.mask.at(b, h, start + i, tile.key), in.mask.key, lse[at + i]);
                clear_unseen(dp, columns, {tile.skip, tile.end});
                deltas[i] += summed<R>(0, columns, [&](int64_t j) { return p[j] * dp[j]; });
                if (noise)
                  deltas_noise[i] +=
                      summed<R>(0, columns, [&](int64_t j) { return other[j] * dp[j]; });
              }
            }
            std::copy_n(deltas, rows, g.delta + at);
            if (noise) std::copy_n(deltas_noise, rows, g.delta_noise + at);
            for (int64_t n = 0; n < block.tiles(); ++n) {
              const Tile tile = block.tile(n);
              const int64_t place = n * height * kStride, count = tile.end - tile.skip;
              const int64_t key = tile.key + tile.skip;
              for (int64_t i = 0; i < rows; ++i) {
                const int64_t from = place + i * kStride;
                R *p = maps.data + from, *dp = of_maps.data + from;
                if (noise)
                  score_gradients(dp, p, maps_noise.data + from, of_noise + from,
                                  several && !first, tile.columns(),
                                  *in.lam.at(b, start + i, h), deltas[i],
                                  deltas_noise[i]);
                else
                  score_gradients(dp, p, tile.columns(), deltas[i]);
              }
              const R *p = maps.data + place + tile.skip, *ds = of_maps.data + place + tile.skip;
              add_outer<R>(count, value_wide, rows, p, kStride, d_rows.data, value_wide,
                           values.gradient.data + key * value_wide, value_wide);
              product<R>(rows, wide, count, ds, kStride, keys.rows.data + key * wide, wide,
                         d_q.data, wide, n > 0);
              add_outer<R>(count, wide, rows, ds, kStride, q.data, wide,
                           keys.gradient.data + key * wide, wide);
              if (noise && h + 1 == (unit + 1) * ratio) {
                const R* ds_noise = of_noise + place + tile.skip;
                product<R>(rows, wide, count, ds_noise, kStride, keys_noise.rows.data + key * wide,
                           wide, d_q_noise.data, wide, n > 0);
                add_outer<R>(count, wide, rows, ds_noise, kStride, q_noise.data, wide,
                             keys_noise.gradient.data + key * wide, wide);
              }
            }
            write_rows(d_q.data, rows, z.width, g.q.at(b, start, h), g.q.time, in.scale);
          }
          if (noise)
            write_rows(d_q_noise.data, rows, z.width, g.q_noise.at(b, start, unit), g.q_noise.time,
                       in.scale);
        }
      }
      write_rows(keys.gradient.data, z.keys, z.width, g.k.at(b, 0, group), g.k.time);
      write_rows(values.gradient.data, z.keys, z.value_width, g.v.at(b, 0, group), g.v.time);
      if (own_keys)
        write_rows(own.gradient.data, z.keys, z.width, g.k_noise.at(b, 0, group), g.k_noise.time);
    }
  }
}
