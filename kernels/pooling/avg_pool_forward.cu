// Average pooling, forward.
//
//   y[n,oh,ow,c] = sum over (kh, kw) of x[n, oh*SH - pad_h + kh, ow*SW - pad_w + kw, c] / divisor
//
// Shapes    x: [N, H, W, C], y: [N, OH, OW, C], fp16, bf16 or fp32, C a multiple of VEC (8, or 4 for fp32).
// Replaces  aten::avg_pool2d, and aten::_adaptive_avg_pool2d where all windows are of one size.
// Bytes     x once, y once. DenseNet's first transition in bf16, [256,128,56,56] k2 s2: 206 + 51 MB.
// Bound     DRAM bandwidth: 0.061 ms there at 4.24 TB/s. About 2 instructions a channel and tap.
// Grid      include/pool_window.cuh; a thread makes OUT_W neighbouring outputs of VEC channels.
// Numerics  fp32 sums in a fixed order, times the divisor's fp32 inverse, rounded once.
// Limits    no dilation (aten has none); H*W*C/VEC < 2^31 an image; N <= 65535.

#define DH 1
#define DW 1
#include "vector.cuh"
#include "overlap.cuh"
#include "pool_window.cuh"
#include "pool_strip.cuh"
#include "average_divisor.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) avg_pool_forward(
    const Vec16* __restrict__ x, Vec16* __restrict__ y, int vectors, int height, int width, int out_height,
    int out_width, int pad_h, int pad_w, int channel_tiles, float constant) {
  overlap_launches();
  const Place p = place_of(channel_tiles);
  const int ow = p.column * OUT_W;
  if (p.vector >= vectors || p.row >= out_height || ow >= out_width) return;
  const Vec16* image = x + (i64)blockIdx.z * height * width * vectors + p.vector;
  const int h0 = p.row * SH - pad_h, w0 = ow * SW - pad_w;
  float sum[OUT_W][VEC];
#pragma unroll
  for (int t = 0; t < OUT_W; ++t)
#pragma unroll
    for (int c = 0; c < VEC; ++c) sum[t][c] = 0.f;
#pragma unroll
  for (int base = 0; base < KH; base += ROWS_AT_ONCE) {
    Vec16 v[ROWS_AT_ONCE][COLUMNS];
    load_strip(v, image, base, h0, w0, vectors, height, width, {{0u, 0u, 0u, 0u}});
#pragma unroll
    for (int k = 0; k < ROWS_AT_ONCE; ++k)
#pragma unroll
      for (int column = 0; column < COLUMNS; ++column) {
        if (base + k >= KH || !used(column)) continue;
        float f[VEC];
        widen(v[k][column], f);
#pragma unroll
        for (int t = 0; t < OUT_W; ++t)
#pragma unroll
          for (int c = 0; c < VEC; ++c)
            if (has_tap(t, column)) sum[t][c] += f[c];
      }
  }
  const i64 at = (((i64)blockIdx.z * out_height + p.row) * out_width + ow) * vectors + p.vector;
#pragma unroll
  for (int t = 0; t < OUT_W; ++t) {
    if (ow + t >= out_width) break;
    const float scale = inverse_divisor(p.row, ow + t, height, width, pad_h, pad_w, constant);
#pragma unroll
    for (int c = 0; c < VEC; ++c) sum[t][c] *= scale;
    store(y + at + t * vectors, narrow(sum[t]));
  }
}
