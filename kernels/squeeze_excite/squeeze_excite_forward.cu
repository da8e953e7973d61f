// Squeeze-and-excite over an NHWC tensor, the two passes over x: the sums of the pool, and the scaling. Forward.
//
//   pool:  partial[n, split, c] = sum of x[n, hw, c] over the split's pixels          scale:  y = x * gate(z2[n, c])
//
// Shapes    x, y: [N, HW, C], STORAGE; partial: [N, splits, C] fp32; z2: [N, C] fp32, made by squeeze_excite_gate.cu.
// Replaces  aten::mean (or adaptive_avg_pool2d), sigmoid or hardsigmoid, and the broadcast product.
// Bytes     pool: 1 read; scale: 1 read, 1 write. 2 flops an element.
// Bound     DRAM bandwidth. 256x96x56x56 bf16: 462 MB, 109 us at 4.24 TB/s; less where x still lies in L2.
// Grid      (splits of HW, channel tiles, N). scale walks the samples from the last: what pool read last is still in L2.
// Numerics  fp32 sums in a fixed order. Deterministic.

#include "vector.cuh"
#include "gate.cuh"
#include "channel_reduce.cuh"
#include "sample_reduce.cuh"

#ifndef UNROLL
#define UNROLL 4  // independent 16-byte loads in flight a thread
#endif

extern "C" __global__ void __launch_bounds__(THREADS) squeeze_excite_pool(
    const Vec16* __restrict__ x, float* __restrict__ partial, int rows, int vectors, int tile) {
  __shared__ float shared[VEC * THREADS];
  const Tile t = tile_of(tile, vectors);
  const int n = blockIdx.z;
  x += (i64)n * rows * vectors;
  float sum[1][VEC];
#pragma unroll
  for (int j = 0; j < VEC; ++j) sum[0][j] = 0.f;
  if (t.vector >= 0) {
    const Rows r = rows_of(blockIdx.x, gridDim.x, rows);
    for (int row = r.first + t.ty; row < r.end; row += UNROLL * t.rows_per_pass) {
      Vec16 v[UNROLL];
#pragma unroll
      for (int u = 0; u < UNROLL; ++u)
        if (row + u * t.rows_per_pass < r.end) v[u] = load(x + (row + u * t.rows_per_pass) * vectors + t.vector);
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        if (row + u * t.rows_per_pass >= r.end) continue;
        float f[VEC];
        widen(v[u], f);
#pragma unroll
        for (int j = 0; j < VEC; ++j) sum[0][j] += f[j];
      }
    }
  }
  reduce_sample<1>(t, tile, vectors, sum, partial + ((i64)n * gridDim.x + blockIdx.x) * vectors * VEC, shared);
}

extern "C" __global__ void __launch_bounds__(THREADS) squeeze_excite_scale(
    const Vec16* __restrict__ x, const float* __restrict__ z2, Vec16* __restrict__ y, int rows, int vectors, int tile) {
  const Tile t = tile_of(tile, vectors);
  if (t.vector < 0) return;
  const int n = gridDim.z - 1 - blockIdx.z;
  x += (i64)n * rows * vectors;
  y += (i64)n * rows * vectors;
  float s[VEC];
#pragma unroll
  for (int j = 0; j < VEC; ++j) s[j] = gate(z2[((i64)n * vectors + t.vector) * VEC + j]);
  const Rows r = rows_of(blockIdx.x, gridDim.x, rows);
  for (int row = r.first + t.ty; row < r.end; row += UNROLL * t.rows_per_pass) {
    Vec16 v[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
      if (row + u * t.rows_per_pass < r.end) v[u] = load(x + (row + u * t.rows_per_pass) * vectors + t.vector);
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      if (row + u * t.rows_per_pass >= r.end) continue;
      float f[VEC];
      widen(v[u], f);
#pragma unroll
      for (int j = 0; j < VEC; ++j) f[j] *= s[j];
      store(y + (row + u * t.rows_per_pass) * vectors + t.vector, narrow(f));
    }
  }
}
