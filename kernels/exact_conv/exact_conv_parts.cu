// fp32 tensors as two fp16 parts for products on the tensor cores that are as exact as fp32's own.
//
//   exact_conv_largest   most = max(most, the largest finite magnitude of x, as bits)
//   exact_conv_split     rows of channels: high[p, c] + low[p, c] = x[p, c] * 2^e(most), zeros from channel C on to a multiple of 8
//   exact_conv_weight    the same of a weight [O, I, R, S] in any strides as rows [row][R][S][column]: row O and column I, or the other way
//
// Shapes    x: [P, C] fp32 (NHWC); high, low: [P, CP] fp16, CP being C filled up to a multiple of 8. most: one 32-bit word, zero before.
// Bytes     x once, and once more; both parts once: 12 bytes a value.
// Bound     DRAM bandwidth.
// Grid      a flat pass.
// Numerics  two_parts.cuh. What is not finite is a low part alone (x), or a high part alone (weights).
// Limits    below 2^31 octets of channels; sm_80.

#define STORAGE 0
#include "vector.cuh"
#include "half.cuh"
#include "two_parts.cuh"
#include "overlap.cuh"

#define THREADS 256
#define UNROLL 4

extern "C" __global__ void __launch_bounds__(THREADS) exact_conv_largest(
    const float* __restrict__ x, unsigned int* __restrict__ most, i64 values) {
  overlap_launches();
  unsigned int found = 0u;
  const i64 vectors = values / VEC, at_once = (i64)gridDim.x * THREADS;
  const i64 first = (i64)blockIdx.x * THREADS + threadIdx.x;
  for (i64 i = first; i < vectors; i += UNROLL * at_once) {
    Vec16 v[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) v[u] = load((const Vec16*)x + (i + u * at_once < vectors ? i + u * at_once : i));
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const unsigned int one = magnitude(__uint_as_float(v[u].w[w]));
        found = one > found ? one : found;
      }
  }
  for (i64 i = vectors * VEC + first; i < values; i += at_once) {
    const unsigned int one = magnitude(x[i]);
    found = one > found ? one : found;
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    const unsigned int other = __shfl_xor_sync(0xffffffffu, found, lanes);
    found = other > found ? other : found;
  }
  if (threadIdx.x % 32 == 0) atomicMax(most, found);
}

__device__ __forceinline__ void store_parts(Vec16* high, Vec16* low, const unsigned int (&parts)[8]) {
  Vec16 h, l;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    h.w[i] = (parts[2 * i] & 0xffffu) | parts[2 * i + 1] << 16;
    l.w[i] = parts[2 * i] >> 16 | (parts[2 * i + 1] & 0xffff0000u);
  }
  store(high, h);
  store(low, l);
}

extern "C" __global__ void __launch_bounds__(THREADS) exact_conv_split(
    const float* __restrict__ x, const unsigned int* __restrict__ most, Vec16* __restrict__ high, Vec16* __restrict__ low, i64 octets,
    int channels) {
  overlap_launches();
  const float scale = power_of_two(exponent_for(*most));
  const int across = (channels + 7) / 8;
  const i64 at_once = (i64)gridDim.x * THREADS;
  for (i64 i = (i64)blockIdx.x * THREADS + threadIdx.x; i < octets; i += at_once) {
    float f[8];
    if (channels % 8 == 0) {
      const Vec16 a = load((const Vec16*)x + 2 * i), b = load((const Vec16*)x + 2 * i + 1);
#pragma unroll
      for (int e = 0; e < 4; ++e) f[e] = __uint_as_float(a.w[e]), f[4 + e] = __uint_as_float(b.w[e]);
    } else {
      const i64 row = i / across;
      const int c = (int)(i % across) * 8;
#pragma unroll
      for (int e = 0; e < 8; ++e) f[e] = c + e < channels ? x[row * channels + c + e] : 0.f;
    }
    unsigned int parts[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) parts[e] = two_parts<true>(f[e] * scale);
    store_parts(high + i, low + i, parts);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) exact_conv_weight(
    const float* __restrict__ weight, const unsigned int* __restrict__ most, Vec16* __restrict__ high, Vec16* __restrict__ low, int rows,
    int columns, int taps_h, int taps_w, i64 row_stride, i64 column_stride, i64 h_stride, i64 w_stride) {
  overlap_launches();
  const float scale = power_of_two(exponent_for(*most));
  const int across = (columns + 7) / 8, taps = taps_h * taps_w;
  const i64 octets = (i64)rows * taps * across, at_once = (i64)gridDim.x * THREADS;
  for (i64 i = (i64)blockIdx.x * THREADS + threadIdx.x; i < octets; i += at_once) {
    const int c = (int)(i % across) * 8, tap = (int)(i / across % taps);
    const float* from = weight + i / across / taps * row_stride + tap / taps_w * h_stride + tap % taps_w * w_stride;
    unsigned int parts[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) parts[e] = two_parts<false>(c + e < columns ? from[(c + e) * column_stride] * scale : 0.f);
    store_parts(high + i, low + i, parts);
  }
}
