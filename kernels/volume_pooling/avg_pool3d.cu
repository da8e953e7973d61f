// Average pooling of NDHWC volumes without padding, forward and backward.
//
//   y[n,od,oh,ow,c] = sum over (kd, kh, kw) of x[n, od*SD + kd, oh*SH + kh, ow*SW + kw, c] / (KD*KH*KW)
//   dx[n,d,h,w,c] = sum of dy over the windows that cover (d, h, w) / (KD*KH*KW)
//
// Shapes    x, dx: [N, D, H, W, C], y, dy: [N, OD, OH, OW, C], fp16, bf16 or fp32, C a multiple of VEC (8, or 4 for fp32).
// Replaces  aten::avg_pool3d with its copy to NCDHW; avg_pool3d_backward, which adds atomically where windows overlap.
// Bytes     each tensor once.
// Bound     DRAM bandwidth.
// Grid      flat, a thread a vector of what is written.
// Numerics  fp32 sums in a fixed order, times the count's fp32 inverse, rounded once.
// Limits    fewer than 2^31 vectors.

#include "vector.cuh"
#include "overlap.cuh"
#include "volume.cuh"

__device__ __forceinline__ void add(float (&sum)[VEC], const Vec16* at) {
  float f[VEC];
  widen(load(at), f);
#pragma unroll
  for (int c = 0; c < VEC; ++c) sum[c] += f[c];
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) avg_pool3d_forward(
    const Vec16* __restrict__ x, Vec16* __restrict__ y, unsigned int count, int vectors, int depth, int height,
    int width, int out_depth, int out_height, int out_width) {
  overlap_launches();
  const Voxel p = voxel_of(count, out_depth, out_height, out_width, vectors);
  if (p.n < 0) return;
  float sum[VEC];
#pragma unroll
  for (int c = 0; c < VEC; ++c) sum[c] = 0.f;
#pragma unroll
  for (int kd = 0; kd < KD; ++kd)
#pragma unroll
    for (int kh = 0; kh < KH; ++kh) {
      const Vec16* row =
          x + at_voxel(p.n, p.d * SD + kd, p.h * SH + kh, p.w * SW, depth, height, width, vectors) + p.vector;
#pragma unroll
      for (int kw = 0; kw < KW; ++kw) add(sum, row + kw * vectors);
    }
#pragma unroll
  for (int c = 0; c < VEC; ++c) sum[c] *= 1.f / (KD * KH * KW);
  store(y + at_voxel(p.n, p.d, p.h, p.w, out_depth, out_height, out_width, vectors) + p.vector, narrow(sum));
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) avg_pool3d_backward(
    const Vec16* __restrict__ dy, Vec16* __restrict__ dx, unsigned int count, int vectors, int depth, int height,
    int width, int out_depth, int out_height, int out_width) {
  overlap_launches();
  const Voxel p = voxel_of(count, depth, height, width, vectors);
  if (p.n < 0) return;
  float sum[VEC];
#pragma unroll
  for (int c = 0; c < VEC; ++c) sum[c] = 0.f;
#pragma unroll
  for (int a = 0; a < BACK_D; ++a) {
    const int od = p.d / SD - a;
    if (od < 0 || od >= out_depth || p.d - od * SD >= KD) continue;
#pragma unroll
    for (int b = 0; b < BACK_H; ++b) {
      const int oh = p.h / SH - b;
      if (oh < 0 || oh >= out_height || p.h - oh * SH >= KH) continue;
      const Vec16* row = dy + at_voxel(p.n, od, oh, 0, out_depth, out_height, out_width, vectors) + p.vector;
#pragma unroll
      for (int e = 0; e < BACK_W; ++e) {
        const int ow = p.w / SW - e;
        if (ow >= 0 && ow < out_width && p.w - ow * SW < KW) add(sum, row + (i64)ow * vectors);
      }
    }
  }
#pragma unroll
  for (int c = 0; c < VEC; ++c) sum[c] *= 1.f / (KD * KH * KW);
  store(dx + at_voxel(p.n, p.d, p.h, p.w, depth, height, width, vectors) + p.vector, narrow(sum));
}
