// Squeeze-and-excite over an NHWC tensor, the passes over x and dy. Backward.
//
//   reduce:  partial[n, split, c] = sum of dy * x over the split's pixels          apply:  dx = dy * gate(z2[n, c]) + dpool[n, c]
//
// Shapes    dy, x, dx: [N, HW, C], STORAGE; partial: [N, splits, C] fp32; z2, dpool: [N, C] fp32 (squeeze_excite_gate.cu).
// Replaces  the product's two backwards (with a full-size product and its sum), the pool's, and their addition: dx is
//           written once instead of three times.
// Bytes     reduce: 2 reads; apply: 1 read, 1 write. 4 flops an element.
// Bound     DRAM bandwidth. 256x96x56x56 bf16: 617 MB, 145 us at 4.24 TB/s; less where dy still lies in L2.
// Grid      one-dimensional, include/pixel_columns.cuh. apply walks the tensor from its end: dy that reduce read last is in L2.
// Numerics  fp32 sums in a fixed order. Deterministic.

#include "vector.cuh"
#include "gate.cuh"
#include "pixel_columns.cuh"
#include "overlap.cuh"

#ifndef UNROLL
#define UNROLL 8  // loads in flight a thread, of both tensors together
#endif
#define ROWS (UNROLL / 2)

extern "C" __global__ void __launch_bounds__(THREADS, 1) squeeze_excite_backward_reduce(
    const Vec16* __restrict__ dy, const Vec16* __restrict__ x, float* __restrict__ partial,
    int samples, int pixels, int vectors, int tile, int splits) {
  overlap_launches();
  __shared__ float shared[VEC * THREADS];
  const Column c = column_of(blockIdx.x, splits, tile, samples, pixels, vectors);
  float sum[VEC];
#pragma unroll
  for (int j = 0; j < VEC; ++j) sum[j] = 0.f;
  if (c.n >= 0) {
    const i64 at = c.at(0, pixels, vectors);
    for (int p = c.first + c.ty; p < c.end; p += ROWS * c.down) {
      Vec16 vx[ROWS], vdy[ROWS];
#pragma unroll
      for (int u = 0; u < ROWS; ++u) {
        if (p + u * c.down >= c.end) continue;
        vx[u] = load_last(x + at + (p + u * c.down) * vectors);
        vdy[u] = load(dy + at + (p + u * c.down) * vectors);
      }
#pragma unroll
      for (int u = 0; u < ROWS; ++u) {
        if (p + u * c.down >= c.end) continue;
        float f[VEC], g[VEC];
        widen(vx[u], f);
        widen(vdy[u], g);
#pragma unroll
        for (int j = 0; j < VEC; ++j) sum[j] += f[j] * g[j];
      }
    }
  }
  sum_column(c, tile, sum, shared);
  if (c.n >= 0 && c.ty == 0)
    store_floats(partial + (((i64)c.n * splits + blockIdx.x % splits) * vectors + c.vector) * VEC, sum);
}

extern "C" __global__ void __launch_bounds__(THREADS) squeeze_excite_backward_apply(
    const Vec16* __restrict__ dy, const float* __restrict__ z2, const float* __restrict__ dpool, Vec16* __restrict__ dx,
    int samples, int pixels, int vectors, int tile, int splits) {
  overlap_launches();
  const Column c = column_of(gridDim.x - 1 - blockIdx.x, splits, tile, samples, pixels, vectors);
  if (c.n < 0) return;
  const i64 at = c.at(0, pixels, vectors);
  float scale[VEC], offset[VEC];
  load_floats(z2 + ((i64)c.n * vectors + c.vector) * VEC, scale);
  load_floats(dpool + ((i64)c.n * vectors + c.vector) * VEC, offset);
#pragma unroll
  for (int j = 0; j < VEC; ++j) scale[j] = gate(scale[j]);
  for (int p = c.first + c.ty; p < c.end; p += UNROLL * c.down) {
    Vec16 v[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
      if (p + u * c.down < c.end) v[u] = load_last(dy + at + (p + u * c.down) * vectors);
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      if (p + u * c.down >= c.end) continue;
      float f[VEC];
      widen(v[u], f);
#pragma unroll
      for (int j = 0; j < VEC; ++j) f[j] = f[j] * scale[j] + offset[j];
      store(dx + at + (p + u * c.down) * vectors, narrow(f));
    }
  }
}
