// Batch normalisation by its running statistics (evaluation mode, "frozen"), then an optional residual add, then an activation.
//
//   z = (x - running_mean) * weight / sqrt(running_var + eps) + bias (+ residual)        y = act(z)
//
// Shapes    x, residual, y: [M, C] with M = N*H*W, rows contiguous (NHWC), fp16, bf16 or fp32; C a multiple of VEC.
//           running_mean, running_var, weight, bias: [C] fp32. mask: [M, C/VEC] bytes, one bit an element: act'(z) is not 0;
//           written with MASKED only.
// Replaces  aten::native_batch_norm (evaluation) + add_ + relu_ (and their intermediate tensors).
// Bytes     1 read (+1 residual), 1 write (+1/16 mask). About 5 flops an element.
// Bound     DRAM bandwidth.
// Grid      (row blocks, channel tiles), include/channel_reduce.cuh; UNROLL loads of 16 bytes in flight a thread and tensor.
// Numerics  fp32; one over the root is correctly rounded.

#include "vector.cuh"
#include "gelu.cuh"
#include "channel_reduce.cuh"
#include "overlap.cuh"

#ifndef UNROLL
#define UNROLL 4
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1) batchnorm_act_frozen_forward(
    const Vec16* __restrict__ x, const Vec16* __restrict__ residual, const float* __restrict__ running_mean,
    const float* __restrict__ running_var, const float* __restrict__ weight, const float* __restrict__ bias,
    Vec16* __restrict__ y, unsigned char* __restrict__ mask, i64 rows, int vectors, int tile, float eps, float slope) {
  overlap_launches();
  const Tile t = tile_of(tile, vectors);
  if (t.vector < 0) return;
  float mean[VEC], scale[VEC], offset[VEC];
#pragma unroll
  for (int j = 0; j < VEC; ++j) {
    const int c = t.vector * VEC + j;
    mean[j] = running_mean[c];
    scale[j] = 1.f / sqrtf(running_var[c] + eps) * weight[c];
    offset[j] = bias[c];
  }
  const i64 stride = (i64)gridDim.x * t.rows_per_pass;
  const i64 step = stride * vectors;
  i64 row = (i64)blockIdx.x * t.rows_per_pass + t.ty;
  for (i64 first = row * vectors + t.vector; row < rows; row += UNROLL * stride, first += UNROLL * step) {
    Vec16 v[UNROLL];
#if RESIDUAL
    Vec16 r[UNROLL];
#endif
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const i64 at = first + u * step;
      if (row + u * stride < rows) {
        v[u] = load(x + at);
#if RESIDUAL
        r[u] = load(residual + at);
#endif
      }
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      if (row + u * stride >= rows) continue;
      const i64 at = first + u * step;
      float f[VEC];
      widen(v[u], f);
#if RESIDUAL
      float g[VEC];
      widen(r[u], g);
#endif
#if MASKED
      unsigned int bits = 0;
#endif
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        float z = (f[j] - mean[j]) * scale[j] + offset[j];
#if RESIDUAL
        z += g[j];
#endif
#if MASKED
        bits |= (lives(z) ? 1u : 0u) << j;
#endif
        f[j] = activate_streaming(z, slope);
      }
      store(y + at, narrow(f));
#if MASKED
      mask[at] = (unsigned char)bits;  // fp32 uses the low four bits of its byte
#endif
    }
  }
}
