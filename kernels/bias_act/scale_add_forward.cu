// Layer scale (a factor a channel), drop path (a factor a sample) and residual add. Forward.
//
//   y = residual + branch * scale[c] * keep[n]
//
// Shapes    branch, residual, y: [M, C] with M = N*H*W, rows contiguous (NHWC); C a multiple of VEC. branch fp16, bf16 or
//           fp32; residual and y the same, or fp32 beside a 16-bit branch (WIDE 1: what autocast makes of an fp32 scale).
//           scale: [C] fp32 (SCALE 1); keep: [N] fp32, zero or one over the survival rate (KEEP 1); pixels: H*W.
// Replaces  mul + mul + add_: 7 passes over the tensor; with one factor mul + add_: 5.
// Bytes     2 reads, 1 write. Flops: 3 an element.
// Bound     DRAM bandwidth: 4.2 TB/s on an H200 is 0.37 ms for 256x96x56x56, branch bf16, residual fp32.
// Grid      (row blocks, channel tiles), rows walked from the end: what was written last is still in L2.
// Numerics  fp32 in registers, rounded once.
// Limits    M < 2^31; sm_80.

#include "vector.cuh"
#include "channel_reduce.cuh"
#include "stream.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) scale_add_forward(
    const Vec16* __restrict__ branch, const float* __restrict__ scale, const float* __restrict__ keep,
    const Vec16* __restrict__ residual, Vec16* __restrict__ y, int rows, int pixels, int vectors, int tile) {
  const Tile t = tile_of(tile, vectors);
  if (t.vector < 0) return;
#if SCALE
  float factor[VEC];
#pragma unroll
  for (int j = 0; j < VEC; ++j) factor[j] = scale[t.vector * VEC + j];
#endif
  const int stride = gridDim.x * t.rows_per_pass;
  const i64 step = (i64)stride * vectors;
  i64 row = rows - 1 - ((i64)blockIdx.x * t.rows_per_pass + t.ty);
  for (i64 last = row * vectors + t.vector; row >= 0; row -= UNROLL * (i64)stride, last -= UNROLL * step) {
    Vec16 v[UNROLL];
    Stream r[UNROLL];
    float k[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const i64 at_row = row - u * (i64)stride;
      if (at_row < 0) continue;
      v[u] = load(branch + last - u * step);  // the backward reads it again
      r[u] = load_stream(residual, last - u * step);
#if KEEP
      k[u] = keep[(unsigned int)at_row / (unsigned int)pixels];
#else
      k[u] = 1.f;
#endif
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      if (row - u * (i64)stride < 0) continue;
      float f[VEC], g[VEC];
      widen(v[u], f);
      widen_stream(r[u], g);
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
#if SCALE
        f[j] *= factor[j];
#endif
        g[j] += f[j] * k[u];
      }
      store_stream(y, last - u * step, g);
    }
  }
}
