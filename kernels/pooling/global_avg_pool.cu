// Mean over all pixels of each image and channel, forward and backward.
//
//   y[n,c] = 1/P sum_p x[n,p,c]          dx[n,p,c] = dy[n,c] / P          P = H*W
//
// Shapes    x, dx: [N, P, C], y, dy: [N, C], fp16, bf16 or fp32, C a multiple of VEC (8, or 4 for fp32).
// Replaces  aten::mean over (2, 3) and aten::adaptive_avg_pool2d to 1 x 1; backward: expand, div and the copy into NHWC that
//           the next kernel asks for, because div of an expanded tensor is written as NCHW.
// Bytes     forward: x once; backward: dx once. ResNet-50's in bf16, [256,2048,7,7]: 51 MB each.
// Bound     DRAM bandwidth: 0.012 ms there at 4.24 TB/s (in training x often still lies in L2).
// Grid      forward: include/pixel_columns.cuh, a thread walks down every down-th pixel of a channel vector, UNROLL loads of 16
//           bytes in flight. 49 pixels are four threads' work: all their loads are under way at once. backward: (channel tiles,
//           pixel tiles, N), a thread reads its gradient once and writes PIXELS pixels.
// Numerics  fp32 sums in a fixed order, divided, rounded once; deterministic.
// Limits    N <= 65535; P*C/VEC < 2^31 an image; N*C/VEC < 2^31.

#include "vector.cuh"
#include "overlap.cuh"
#include "pixel_columns.cuh"

#ifndef UNROLL
#define UNROLL 13  // independent 16-byte loads in flight a thread
#endif
#ifndef PIXELS
#define PIXELS 8  // stores of a thread
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 2) global_avg_pool_forward(
    const Vec16* __restrict__ x, Vec16* __restrict__ y, int samples, int pixels, int vectors, int tile) {
  overlap_launches();
  __shared__ float shared[VEC * THREADS];
  const Column c = column_of(blockIdx.x, 1, tile, samples, pixels, vectors);
  float sum[VEC];
#pragma unroll
  for (int j = 0; j < VEC; ++j) sum[j] = 0.f;
  if (c.n >= 0) {
    const Vec16* from = x + c.at(0, pixels, vectors);
    for (int p = c.ty; p < pixels; p += UNROLL * c.down) {
      Vec16 v[UNROLL];
#pragma unroll
      for (int u = 0; u < UNROLL; ++u)
        if (p + u * c.down < pixels) v[u] = load(from + (p + u * c.down) * vectors);
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        if (p + u * c.down >= pixels) continue;
        float f[VEC];
        widen(v[u], f);
#pragma unroll
        for (int j = 0; j < VEC; ++j) sum[j] += f[j];
      }
    }
  }
  sum_column(c, tile, sum, shared);
  if (c.n < 0 || c.ty != 0) return;
#pragma unroll
  for (int j = 0; j < VEC; ++j) sum[j] /= (float)pixels;
  store(y + (i64)c.n * vectors + c.vector, narrow(sum));
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) global_avg_pool_backward(
    const Vec16* __restrict__ dy, Vec16* __restrict__ dx, int vectors, int pixels) {
  overlap_launches();
  const int vector = blockIdx.x * blockDim.x + threadIdx.x;
  if (vector >= vectors) return;
  float g[VEC];
  widen(load(dy + (i64)blockIdx.z * vectors + vector), g);
#pragma unroll
  for (int c = 0; c < VEC; ++c) g[c] /= (float)pixels;
  const Vec16 value = narrow(g);
  Vec16* image = dx + (i64)blockIdx.z * pixels * vectors + vector;
  const int first = blockIdx.y * PIXELS * blockDim.y + threadIdx.y;
#pragma unroll
  for (int u = 0; u < PIXELS; ++u) {
    const int p = first + u * blockDim.y;
    if (p < pixels) store(image + p * vectors, value);
  }
}
