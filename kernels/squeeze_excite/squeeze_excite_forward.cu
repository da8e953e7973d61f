// Squeeze-and-excite over an NHWC tensor, the two passes over x: the sums of the pool, and the scaling. Forward.
//
//   pool:  partial[n, split, c] = sum of x[n, hw, c] over the split's pixels          scale:  y = x * gate(z2[n, c])
//
// Shapes    x, y: [N, HW, C], STORAGE; partial: [N, splits, C] fp32; z2: [N, C] fp32, made by squeeze_excite_gate.cu.
// Replaces  aten::mean (or adaptive_avg_pool2d), sigmoid or hardsigmoid, and the broadcast product.
// Bytes     pool: 1 read; scale: 1 read, 1 write. 2 flops an element.
// Bound     DRAM bandwidth. 256x96x56x56 bf16: 462 MB, 109 us at 4.24 TB/s; less where x still lies in L2.
// Grid      one-dimensional, include/pixel_columns.cuh. scale walks the tensor from its end: what pool read last is still in L2.
// Numerics  fp32 sums in a fixed order. Deterministic.

#include "vector.cuh"
#include "gate.cuh"
#include "pixel_columns.cuh"
#include "overlap.cuh"

#ifndef UNROLL
#define UNROLL 8  // independent 16-byte loads in flight a thread
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1) squeeze_excite_pool(
    const Vec16* __restrict__ x, float* __restrict__ partial, int samples, int pixels, int vectors, int tile, int splits) {
  overlap_launches();
  __shared__ float shared[VEC * THREADS];
  const Column c = column_of(blockIdx.x, splits, tile, samples, pixels, vectors);
  float sum[VEC];
#pragma unroll
  for (int j = 0; j < VEC; ++j) sum[j] = 0.f;
  if (c.n >= 0) {
    const Vec16* from = x + c.at(0, pixels, vectors);
    for (int p = c.first + c.ty; p < c.end; p += UNROLL * c.down) {
      Vec16 v[UNROLL];
#pragma unroll
      for (int u = 0; u < UNROLL; ++u)
        if (p + u * c.down < c.end) v[u] = load(from + (p + u * c.down) * vectors);
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        if (p + u * c.down >= c.end) continue;
        float f[VEC];
        widen(v[u], f);
#pragma unroll
        for (int j = 0; j < VEC; ++j) sum[j] += f[j];
      }
    }
  }
  sum_column(c, tile, sum, shared);
  if (c.n >= 0 && c.ty == 0)
    store_floats(partial + (((i64)c.n * splits + blockIdx.x % splits) * vectors + c.vector) * VEC, sum);
}

extern "C" __global__ void __launch_bounds__(THREADS) squeeze_excite_scale(
    const Vec16* __restrict__ x, const float* __restrict__ z2, Vec16* __restrict__ y,
    int samples, int pixels, int vectors, int tile, int splits) {
  overlap_launches();
  const Column c = column_of(gridDim.x - 1 - blockIdx.x, splits, tile, samples, pixels, vectors);
  if (c.n < 0) return;
  const i64 at = c.at(0, pixels, vectors);
  float s[VEC];
  load_floats(z2 + ((i64)c.n * vectors + c.vector) * VEC, s);
#pragma unroll
  for (int j = 0; j < VEC; ++j) s[j] = gate(s[j]);
  for (int p = c.first + c.ty; p < c.end; p += UNROLL * c.down) {
    Vec16 v[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
      if (p + u * c.down < c.end) v[u] = load(x + at + (p + u * c.down) * vectors);
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      if (p + u * c.down >= c.end) continue;
      float f[VEC];
      widen(v[u], f);
#pragma unroll
      for (int j = 0; j < VEC; ++j) f[j] *= s[j];
      store(y + at + (p + u * c.down) * vectors, narrow(f));
    }
  }
}
