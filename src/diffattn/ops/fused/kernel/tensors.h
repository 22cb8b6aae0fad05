// Tensors as the caller holds them, and copies of them as the inner loops read them.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <new>

#include "blocks.h"

struct BFloat16 {
  uint16_t bits;
  BFloat16() = default;
  // to nearest, ties to even
  explicit BFloat16(float x) {
    uint32_t all;
    std::memcpy(&all, &x, 4);
    const uint32_t rounded = (all + 0x7fff + (all >> 16 & 1)) >> 16;
    bits = static_cast<uint16_t>(x == x ? rounded : 0x7fc0);
  }
  operator float() const {
    const uint32_t all = static_cast<uint32_t>(bits) << 16;
    float x;
    std::memcpy(&x, &all, 4);
    return x;
  }
};

// [B, T, heads, width], the width contiguous; strides in elements
template <typename S>
struct Rows {
  S* data;
  int64_t batch, time, head;
  S* at(int64_t b, int64_t t, int64_t h) const { return data + b * batch + t * time + h * head; }
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

// S is how tensors are stored, R how they are computed with
template <typename S, typename R>
struct Inputs {
  Rows<const S> q, k, v, q_noise, k_noise;  // without k_noise, noise queries meet the signal's keys
  Mask<R> mask;
  Rows<const R> lam;  // [B, T, H]
  const R *sink, *sink_noise;
  R scale;
};

template <typename R>
struct Buffer {
  explicit Buffer(int64_t size) : data(size ? new (std::align_val_t(64)) R[size] : nullptr) {}
  ~Buffer() { ::operator delete[](data, std::align_val_t(64)); }
  Buffer(const Buffer&) = delete;
  R* data;
};

// widths and counts of keys are filled up with zeros
inline int64_t padded_width(int64_t width) { return (width + 15) / 16 * 16; }
inline int64_t padded_keys(int64_t keys) { return (keys + kPanel - 1) / kPanel * kPanel; }

// rows `step` apart become dense rows of padded_width(width)
template <typename S, typename R>
void read_rows(const S* from, int64_t step, int64_t rows, int64_t width, R* to, R factor = 1) {
  const int64_t wide = padded_width(width);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t d = 0; d < width; ++d) to[i * wide + d] = R(from[i * step + d]) * factor;
    std::fill(to + i * wide + width, to + (i + 1) * wide, R(0));
  }
}

template <typename S, typename R>
void write_rows(const R* from, int64_t rows, int64_t width, S* to, int64_t step, R factor = 1) {
  const int64_t wide = padded_width(width);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t d = 0; d < width; ++d) to[i * step + d] = S(from[i * wide + d] * factor);
}

// dense rows become panels [panel][width][kPanel]; the last panel ends in zeros
template <typename R>
void pack(const R* from, int64_t keys, int64_t wide, R* to) {
  for (int64_t key = 0; key < keys; key += kPanel, to += wide * kPanel) {
    const int64_t count = std::min(kPanel, keys - key);
    for (int64_t d = 0; d < wide; ++d) {
      for (int64_t n = 0; n < count; ++n) to[d * kPanel + n] = from[(key + n) * wide + d];
      std::fill(to + d * kPanel + count, to + (d + 1) * kPanel, R(0));
    }
  }
}
