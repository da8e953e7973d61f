// Layer scale (a factor a channel), drop path (a factor a sample) and residual add. Forward.
//
//   y = residual + (branch + bias[c]) * scale[c] * keep[n]      half = y
//
// Shapes    branch, residual, y: [M, C] with M = N*H*W, rows contiguous (NHWC); C a multiple of VEC. branch fp16, bf16 or
//           fp32; residual and y the same, or fp32 beside a 16-bit branch (WIDE 1: what autocast makes of an fp32 scale), where
//           the residual may still be like the branch (MIXED 1: what a convolution gave). bias: [C] fp32 or null, with SCALE 1.
//           scale: [C] fp32 (SCALE 1); keep: [N] fp32, zero or one over the survival rate (KEEP 1); pixels: H*W. half: like the
//           branch (TWIN 1, with WIDE 1): y as autocast would cast it for the convolution that follows.
// Replaces  mul + mul + add_: 7 passes over the tensor; with one factor mul + add_: 5; with TWIN the cast: 2 more.
// Bytes     2 reads, 1 write, with TWIN another of 2 bytes an element. Flops: 4 an element.
// Bound     DRAM bandwidth: 4.2 TB/s on an H200 is 0.37 ms for 256x96x56x56, branch bf16, residual fp32.
// Grid      (row blocks, channel tiles), rows walked from the end: what was written last is still in L2.
// Numerics  fp32 in registers, rounded once.
// Limits    M < 2^31; sm_80.

#include "vector.cuh"
#include "overlap.cuh"
#include "channel_reduce.cuh"
#include "parameters.cuh"
#include "stream.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) scale_add_forward(
    const Vec16* __restrict__ branch, const float* __restrict__ bias, const float* __restrict__ scale,
    const float* __restrict__ keep, const Vec16* __restrict__ residual, Vec16* __restrict__ y, Vec16* __restrict__ half,
    int rows, int pixels, int vectors, int tile) {
  overlap_launches();
  const Tile t = tile_of(tile, vectors);
  if (t.vector < 0) return;
#if SCALE
  float factor[VEC], offset[VEC] = {};
  load_parameters(scale, t.vector, factor);
  if (bias) load_parameters(bias, t.vector, offset);
#endif
  const bool paired = tile % 2 == 0 && vectors % 2 == 0;
  const int stride = gridDim.x * t.rows_per_pass;
  const i64 step = (i64)stride * vectors;
  i64 row = rows - 1 - ((i64)blockIdx.x * t.rows_per_pass + t.ty);
  for (i64 last = row * vectors + t.vector; row >= 0; row -= UNROLL * (i64)stride, last -= UNROLL * step) {
    Vec16 v[UNROLL];
#if MIXED
    Vec16 r[UNROLL];
#else
    Stream r[UNROLL];
#endif
    float k[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const i64 at_row = row - u * (i64)stride;
      if (at_row < 0) continue;
      v[u] = load(branch + last - u * step);  // the backward reads it again
#if MIXED
      r[u] = load(residual + last - u * step);
#else
      r[u] = load_stream(residual, last - u * step);
#endif
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
#if MIXED
      widen(r[u], g);
#else
      widen_stream(r[u], g);
#endif
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
#if SCALE
        f[j] = (f[j] + offset[j]) * factor[j];
#endif
        g[j] += f[j] * k[u];
      }
      store_stream(y, last - u * step, g, paired);
#if TWIN
      store(half + last - u * step, narrow(g));
#endif
    }
  }
}
