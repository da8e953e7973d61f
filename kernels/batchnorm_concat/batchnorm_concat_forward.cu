// Batch normalisation in training mode of the first C channels of a growing concatenation, then an activation. Forward.
//
//   z = (x - mean) * weight / sqrt(variance + eps) + bias      y = act(z)
//   running_mean += momentum * (mean - running_mean);  running_var likewise with variance * M / (M - 1)
//
// Shapes    x: [M, C] with M = N*H*W, fp16, bf16 or fp32, a row `pitch` vectors after the one before (the concatenation has more
//           channels than this norm sees). y: [M, C], rows contiguous (NHWC). C, pitch: multiples of VEC. mean, variance: [C] fp32
//           as batchnorm_concat_append.cu wrote them, a feature at a time; weight, bias, running_*: [C] fp32.
// Replaces  aten::cat + native_batch_norm + relu. A channel's batch statistics are the same in every norm that sees it: they
//           are not taken again.
// Bytes     1 read, 1 write. About 5 flops an element.
// Bound     DRAM bandwidth.
// Grid      (row blocks, channel tiles), rows from the end: the feature that was appended last is in L2 there.
// Numerics  fp32; one over the root is correctly rounded.
// Limits    M >= 2; sm_80.

#include "vector.cuh"
#include "overlap.cuh"
#include "activation.cuh"
#include "channel_reduce.cuh"
#include "parameters.cuh"

#ifndef UNROLL
#define UNROLL 4
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1) batchnorm_concat_apply(
    const Vec16* __restrict__ x, const float* __restrict__ mean, const float* __restrict__ variance,
    const float* __restrict__ weight, const float* __restrict__ bias, float* __restrict__ running_mean,
    float* __restrict__ running_var, Vec16* __restrict__ y, i64 rows, int vectors, int pitch, int tile, float momentum,
    float eps, float slope) {
  overlap_launches();
  const Tile t = tile_of(tile, vectors);
  if (t.vector < 0) return;
  float centre[VEC], scale[VEC], factor[VEC], offset[VEC];
  load_parameters(mean, t.vector, centre);
  load_parameters(variance, t.vector, scale);
  load_parameters(weight, t.vector, factor);
  load_parameters(bias, t.vector, offset);
#pragma unroll
  for (int j = 0; j < VEC; ++j) scale[j] = 1.f / sqrtf(scale[j] + eps) * factor[j];
  if (blockIdx.x == 0 && t.ty == 0) {
    const double unbiased = (double)rows / ((double)rows - 1.0);
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      const int c = t.vector * VEC + j;
      running_mean[c] += momentum * (centre[j] - running_mean[c]);
      running_var[c] += momentum * ((float)(variance[c] * unbiased) - running_var[c]);
    }
  }
  const i64 stride = (i64)gridDim.x * t.rows_per_pass;
  i64 row = rows - 1 - ((i64)blockIdx.x * t.rows_per_pass + t.ty);
  const Vec16* from = x + row * pitch + t.vector;
  Vec16* to = y + row * vectors + t.vector;
  for (; row >= 0; row -= UNROLL * stride, from -= UNROLL * stride * pitch, to -= UNROLL * stride * vectors) {
    Vec16 v[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
      if (row - u * stride >= 0) v[u] = load(from - u * stride * pitch);  // the next norm reads it again
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      if (row - u * stride < 0) continue;
      float f[VEC];
      widen(v[u], f);
#pragma unroll
      for (int j = 0; j < VEC; ++j) f[j] = activate((f[j] - centre[j]) * scale[j] + offset[j], slope);
      store(to - u * stride * vectors, narrow(f));
    }
  }
}
