// Average pooling, backward: every element gathers from the windows that cover it.
//
//   dx[n,h,w,c] = sum over windows (oh, ow) that cover (h, w) of dy[n,oh,ow,c] / divisor(oh, ow)
//
// Shapes    dy: [N, OH, OW, C], dx: [N, H, W, C], as the forward's. Every element is written.
// Replaces  aten::avg_pool2d_backward, and aten::_adaptive_avg_pool2d_backward where all windows are of one size.
// Bytes     dy once, dx once. DenseNet's first transition in bf16, [256,128,56,56] k2 s2: 51 + 206 MB.
// Bound     DRAM bandwidth: 0.061 ms there at 4.24 TB/s.
// Grid      include/pool_window.cuh over groups of SH x (GROUP_W * SW) elements: each window near a group is read once for it.
// Numerics  fp32 sums in a fixed order, rounded once; deterministic, no atomics.
// Limits    as the forward; strides up to 4 (accumulators in registers).

#define DH 1
#define DW 1
#include "vector.cuh"
#include "overlap.cuh"
#include "pool_window.cuh"
#include "average_divisor.cuh"

#ifndef GROUP_W
#define GROUP_W 1
#endif
#define PHASE_ROWS (SH * SW * GROUP_W <= 4 ? SH : 1)

extern "C" __global__ void __launch_bounds__(THREADS, 1) avg_pool_backward(
    const Vec16* __restrict__ dy, Vec16* __restrict__ dx, int vectors, int height, int width, int out_height,
    int out_width, int pad_h, int pad_w, int channel_tiles, float constant) {
  overlap_launches();
  const Place p = place_of(channel_tiles);
  if (p.vector >= vectors) return;
  const int qh = p.row + pad_h / SH, qw = p.column * GROUP_W + pad_w / SW;
  const int h0 = qh * SH - pad_h, w0 = qw * SW - pad_w;
  if (h0 >= height || w0 >= width) return;
  const Vec16* windows = dy + (i64)blockIdx.z * out_height * out_width * vectors + p.vector;
  Vec16* image = dx + (i64)blockIdx.z * height * width * vectors + p.vector;
#pragma unroll
  for (int r = 0; r < SH; r += PHASE_ROWS) {
    float sum[PHASE_ROWS][GROUP_W * SW][VEC];
#pragma unroll
    for (int i = 0; i < PHASE_ROWS; ++i)
#pragma unroll
      for (int j = 0; j < GROUP_W * SW; ++j)
#pragma unroll
        for (int c = 0; c < VEC; ++c) sum[i][j][c] = 0.f;
#pragma unroll
    for (int a = 0; a < BACK_H; ++a) {
      const int oh = qh - a;
      bool covers = false;
#pragma unroll
      for (int i = 0; i < PHASE_ROWS; ++i) covers |= tap(r + i, a, SH, 1, KH) >= 0;
      if (!covers || oh < 0 || oh >= out_height) continue;
      Vec16 v[BACK_W + GROUP_W - 1];
#pragma unroll
      for (int b = 0; b < BACK_W + GROUP_W - 1; ++b) {
        const int ow = qw + GROUP_W - 1 - b;
        v[b] = {{0u, 0u, 0u, 0u}};
        if (ow >= 0 && ow < out_width) v[b] = load(windows + (oh * out_width + ow) * vectors);
      }
#pragma unroll
      for (int b = 0; b < BACK_W + GROUP_W - 1; ++b) {
        const int ow = qw + GROUP_W - 1 - b;
        if (ow < 0 || ow >= out_width) continue;
        const float scale = inverse_divisor(oh, ow, height, width, pad_h, pad_w, constant);
        float g[VEC];
        widen(v[b], g);
#pragma unroll
        for (int c = 0; c < VEC; ++c) g[c] *= scale;
#pragma unroll
        for (int i = 0; i < PHASE_ROWS; ++i)
#pragma unroll
          for (int group = 0; group < GROUP_W; ++group)
#pragma unroll
            for (int s = 0; s < SW; ++s) {
              const int back = b - (GROUP_W - 1 - group);  // this window is ow = q - back for that group
              const bool within = back >= 0 && back < BACK_W && tap(s, back, SW, 1, KW) >= 0;
              if (!within || tap(r + i, a, SH, 1, KH) < 0) continue;
#pragma unroll
              for (int c = 0; c < VEC; ++c) sum[i][group * SW + s][c] += g[c];
            }
      }
    }
#pragma unroll
    for (int i = 0; i < PHASE_ROWS; ++i)
#pragma unroll
      for (int j = 0; j < GROUP_W * SW; ++j) {
        const int h = h0 + r + i, w = w0 + j;
        if (h >= 0 && h < height && w >= 0 && w < width) store(image + (h * width + w) * vectors, narrow(sum[i][j]));
      }
  }
}
