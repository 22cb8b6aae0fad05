// Rows of scores become rows of attention maps.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "blocks.h"

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

template <typename R>
constexpr R kNone = -std::numeric_limits<R>::infinity();

template <typename R>
inline void add_mask(R* row, Reach seen, const R* mask, int64_t step) {
  // a hidden key may hold anything
  for (int64_t j = seen.first; j < seen.last; ++j)
    row[j] = mask[j * step] == kNone<R> ? kNone<R> : row[j] + mask[j * step];
}

template <typename R>
inline void clear_unseen(R* row, int64_t columns, Reach seen) {
  std::fill(row, row + seen.first, R(0));
  std::fill(row + seen.last, row + columns, R(0));
}

// The softmax of a row as far as it has been read.
template <typename R>
struct Running {
  R top = kNone<R>, sum = 0;  // largest score, and the sum of exp(score - top)

  Running() = default;
  explicit Running(const R* sink) {
    if (sink) top = *sink, sum = top == kNone<R> ? 0 : 1;
  }

  // Scores become exp(score - top); unseen columns become 0.
  void read(R* row, int64_t columns, Reach seen, const R* mask, int64_t step) {
    clear_unseen(row, columns, seen);
    if (mask) add_mask(row, seen, mask, step);
    const R now = largest(row, seen.first, seen.last, top);
    if (now == kNone<R>) {
      // nothing is seen, or there is NaN, which is never the largest and must not be lost
      for (int64_t j = seen.first; j < seen.last; ++j) row[j] = row[j] == kNone<R> ? R(0) : row[j];
      sum += summed<R>(seen.first, seen.last, [&](int64_t j) { return row[j]; });
      return;
    }
    if (now != top) sum *= std::exp(top - now);
    top = now;
    sum += summed<R>(seen.first, seen.last,
                     [&](int64_t j) { return row[j] = exponential(row[j] - now); });
  }
  // -inf where nothing is seen
  R lse() const { return top == kNone<R> ? (sum == 0 ? kNone<R> : sum) : top + std::log(sum); }
  // what turns exp(score - earlier) into the map; 0 where nothing is seen
  R factor(R earlier) const { return top == kNone<R> ? sum : std::exp(earlier - top) / sum; }
};

// Scores of a row become the map, by a known log-sum-exp.
template <typename R>
inline void map_row(R* row, int64_t columns, Reach seen, const R* mask, int64_t step, R lse) {
  clear_unseen(row, columns, seen);
  if (lse == kNone<R>) {
    std::fill(row + seen.first, row + seen.last, R(0));
    return;
  }
  if (mask) add_mask(row, seen, mask, step);
  for (int64_t j = seen.first; j < seen.last; ++j) row[j] = exponential(row[j] - lse);
}
