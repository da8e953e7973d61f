// A new feature map into its channels of a growing concatenation, with its batch statistics; and its gradient back out of it.
//
//   forward     x[m, first + c] = feature[m, c]      mean[c] = 1/M sum_m feature[m,c]      variance[c]: biased
//   backward    dfeature[m, c] = gradient[m, c] - a[c] - (x[m, first + c] - mean[c]) * b[c]
//
// Shapes    feature, dfeature: [M, C] with M = N*H*W, rows contiguous (NHWC), fp16, bf16 or fp32. x and gradient: [M, C] too, but a
//           row begins `pitch` (`gradient_pitch`) vectors after the one before; both pointers are at the feature's first
//           channel. mean, variance, a, b: [C] fp32. C and pitches: multiples of VEC (8, or 4 for fp32).
//           gradient, a and b are what batchnorm_concat_backward.cu leaves of every norm behind this feature.
// Replaces  aten::cat over all features up to this one, the statistics of native_batch_norm over them, and one strided add a
//           later norm in the backward.
// Bytes     forward: 1 read, 1 write; backward: 2 reads, 1 write, of the new feature alone. 4 flops an element.
// Bound     DRAM bandwidth.
// Grid      (row blocks, channel tiles), include/channel_reduce.cuh, which says what partial and ticket are. Rows from the
//           beginning: batchnorm_concat_apply and _backward walk from the end, and meet in L2 what was written last.
// Numerics  fp32 sums of x - x[0,c] (shifted, so that a mean far from zero does not cancel), fp64 across blocks. Deterministic.
// Limits    M >= 2; sm_80.

#include "vector.cuh"
#include "overlap.cuh"
#include "channel_reduce.cuh"

#ifndef UNROLL
#define UNROLL 4  // independent 16-byte loads in flight a thread
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 2) batchnorm_concat_append(
    const Vec16* __restrict__ feature, Vec16* __restrict__ x, float* __restrict__ partial, unsigned int* __restrict__ ticket,
    float* __restrict__ mean, float* __restrict__ variance, i64 rows, int vectors, int pitch, int tile) {
  overlap_launches();
  __shared__ __align__(16) float shared[2 * VEC * THREADS];
  __shared__ double total[2 * VEC * MAX_TILE];
  const Tile t = tile_of(tile, vectors);
  float sum[VEC], square[VEC], shift[VEC];
#pragma unroll
  for (int j = 0; j < VEC; ++j) sum[j] = square[j] = shift[j] = 0.f;
  if (t.vector >= 0) {
    widen(load(feature + t.vector), shift);
    const i64 stride = (i64)gridDim.x * t.rows_per_pass;
    i64 row = (i64)blockIdx.x * t.rows_per_pass + t.ty;
    const Vec16* from = feature + row * vectors + t.vector;
    Vec16* to = x + row * pitch + t.vector;
    for (; row < rows; row += UNROLL * stride, from += UNROLL * stride * vectors, to += UNROLL * stride * pitch) {
      Vec16 v[UNROLL];
#pragma unroll
      for (int u = 0; u < UNROLL; ++u)
        if (row + u * stride < rows) v[u] = load_last(from + u * stride * vectors);
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        if (row + u * stride >= rows) continue;
        store(to + u * stride * pitch, v[u]);
        float f[VEC];
        widen(v[u], f);
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
          const float d = f[j] - shift[j];
          sum[j] += d;
          square[j] += d * d;
        }
      }
    }
  }
  if (!reduce_channels(t, tile, vectors, sum, square, partial, ticket, shared, total)) return;
  const int width = tile * VEC;
  for (int o = threadIdx.x; o < width; o += THREADS) {
    const int c = blockIdx.y * width + o;
    if (c >= vectors * VEC) continue;
    float first[VEC];
    widen(load(feature + c / VEC), first);
    float k = 0.f;
#pragma unroll
    for (int i = 0; i < VEC; ++i) k = i == c % VEC ? first[i] : k;
    const double inverse = 1.0 / (double)rows;
    const double d = total[o] * inverse;
    const double var = total[width + o] * inverse - d * d;
    mean[c] = (float)(d + (double)k);
    variance[c] = (float)(var > 0.0 ? var : (var != var ? var : 0.0));
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) batchnorm_concat_append_backward(
    const Vec16* __restrict__ gradient, const Vec16* __restrict__ x, const float* __restrict__ mean,
    const float* __restrict__ a, const float* __restrict__ b, Vec16* __restrict__ dfeature,
    i64 rows, int vectors, int gradient_pitch, int pitch, int tile) {
  overlap_launches();
  const Tile t = tile_of(tile, vectors);
  if (t.vector < 0) return;
  float centre[VEC], constant[VEC], linear[VEC];
#pragma unroll
  for (int j = 0; j < VEC; ++j) {
    const int c = t.vector * VEC + j;
    centre[j] = mean[c];
    constant[j] = a[c];
    linear[j] = b[c];
  }
  const i64 stride = (i64)gridDim.x * t.rows_per_pass;
  for (i64 first = (i64)blockIdx.x * t.rows_per_pass + t.ty; first < rows; first += UNROLL * stride) {
    Vec16 vg[UNROLL], vx[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const i64 row = first + u * stride;
      if (row < rows) {
        vg[u] = load_last(gradient + row * gradient_pitch + t.vector);
        vx[u] = load_last(x + row * pitch + t.vector);
      }
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const i64 row = first + u * stride;
      if (row >= rows) continue;
      float g[VEC], f[VEC];
      widen(vg[u], g);
      widen(vx[u], f);
#pragma unroll
      for (int j = 0; j < VEC; ++j) g[j] -= constant[j] + (f[j] - centre[j]) * linear[j];
      store(dfeature + row * vectors + t.vector, narrow(g));
    }
  }
}
