// Which keys a block of query rows meets, by causal order and window.
#pragma once
#include <algorithm>
#include <cstdint>

constexpr int64_t kPanel = 32;            // keys of a packed panel
constexpr int64_t kTile = 256;            // keys whose scores are worked on at a time
constexpr int64_t kStride = kTile + 16;   // of the rows of a tile; a power of 2 would crowd a cache

// [first, last)
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

// Whole panels of keys from `key` on. Columns outside of [skip, end) belong to keys that no row of
// the block sees; they are never multiplied, for these keys may hold anything.
struct Tile {
  int64_t key, skip, end;
  int64_t panels() const { return (end + kPanel - 1) / kPanel; }
  int64_t columns() const { return panels() * kPanel; }
};

struct Block {
  const Sizes& z;
  int64_t start, rows;
  Reach all;

  Block(const Sizes& sizes, int64_t from, int64_t height)
      : z(sizes), start(from), rows(std::min(height, z.queries - from)),
        all(z.reach(from, from + rows)) {}

  int64_t first() const { return all.first / kPanel * kPanel; }
  int64_t tiles() const {
    return all.first == all.last ? 0 : (all.last - first() + kTile - 1) / kTile;
  }
  Tile tile(int64_t n) const {
    const int64_t key = first() + n * kTile;
    return {key, std::max<int64_t>(all.first - key, 0), std::min(all.last - key, kTile)};
  }
  // columns of a tile that row `t` of the queries sees
  Reach seen(int64_t t, const Tile& tile) const {
    const Reach own = z.reach(t, t + 1);
    const int64_t left = std::clamp(own.first - tile.key, tile.skip, tile.end);
    return {left, std::max(std::clamp(own.last - tile.key, tile.skip, tile.end), left)};
  }
};
