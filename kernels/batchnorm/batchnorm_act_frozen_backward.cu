// Batch normalisation by its running statistics (+ residual add) + activation. Backward, in one pass.
//
//   g = dy * act'(z)      dx = g * weight / sqrt(running_var + eps)      dresidual = g
//   dbias = sum_m g       dweight = sum_m g * (x - running_mean) / sqrt(running_var + eps)        with REDUCE only
//
// Shapes    dy, x, dx, dresidual: [M, C] NHWC, mask: as in the forward file; running_*, weight, bias, dweight, dbias: [C] fp32.
//           x is read when it is needed: for dweight (REDUCE), or for act' where no mask holds it.
// Replaces  aten::native_batch_norm_backward (evaluation) + threshold_backward (+ the add's gradient copies).
// Bytes     dy, x where needed (or 1/16 mask), dx (+ dresidual): 2 or 3 passes over the tensor (+1). About 10 flops an element.
// Bound     DRAM bandwidth.
// Grid      (row blocks, channel tiles), include/channel_reduce.cuh. partial, ticket: as there, with REDUCE only.
// Numerics  z is recomputed from x by the forward's own expression; fp32 sums, fp64 across blocks. Deterministic.
// Limits    with a residual only activations whose slope is 0 or 1 (none, ReLU, ReLU6).

#include "vector.cuh"
#include "gelu.cuh"
#include "channel_reduce.cuh"
#include "overlap.cuh"

#ifndef UNROLL
#define UNROLL 4  // two tensors are read: 8 loads of 16 bytes in flight a thread
#endif
#define NEEDS_Z (ACT != 0 && !MASKED)
#define NEEDS_X (REDUCE || NEEDS_Z)

extern "C" __global__ void __launch_bounds__(THREADS) batchnorm_act_frozen_backward(
    const Vec16* __restrict__ dy, const Vec16* __restrict__ x, const unsigned char* __restrict__ mask,
    const float* __restrict__ running_mean, const float* __restrict__ running_var, const float* __restrict__ weight,
    const float* __restrict__ bias, float* __restrict__ partial, unsigned int* __restrict__ ticket, Vec16* __restrict__ dx,
    Vec16* __restrict__ dresidual, float* __restrict__ dweight, float* __restrict__ dbias, i64 rows, int vectors, int tile,
    float eps, float slope) {
  overlap_launches();
  const Tile t = tile_of(tile, vectors);
#if REDUCE
  float sum[VEC], product[VEC];
#pragma unroll
  for (int j = 0; j < VEC; ++j) sum[j] = product[j] = 0.f;
#endif
  if (t.vector >= 0) {
    float scale[VEC];
#if NEEDS_X
    float mean[VEC];
#endif
#if NEEDS_Z
    float offset[VEC];
#endif
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      const int c = t.vector * VEC + j;
      scale[j] = 1.f / sqrtf(running_var[c] + eps) * weight[c];
#if NEEDS_X
      mean[j] = running_mean[c];
#endif
#if NEEDS_Z
      offset[j] = bias[c];
#endif
    }
    const i64 stride = (i64)gridDim.x * t.rows_per_pass;
    const i64 step = stride * vectors;
    i64 row = (i64)blockIdx.x * t.rows_per_pass + t.ty;
    for (i64 first = row * vectors + t.vector; row < rows; row += UNROLL * stride, first += UNROLL * step) {
      Vec16 vdy[UNROLL];
#if NEEDS_X
      Vec16 vx[UNROLL];
#endif
#if MASKED
      unsigned int bits[UNROLL];
#endif
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        const i64 at = first + u * step;
        if (row + u * stride < rows) {
          vdy[u] = load_last(dy + at);
#if NEEDS_X
          vx[u] = load_last(x + at);
#endif
#if MASKED
          bits[u] = mask[at];
#endif
        }
      }
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        if (row + u * stride >= rows) continue;
        const i64 at = first + u * step;
        float g[VEC];
        widen(vdy[u], g);
#if NEEDS_X
        float d[VEC];
        widen(vx[u], d);
#endif
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
#if NEEDS_X
          d[j] -= mean[j];
#endif
#if MASKED
          g[j] = (bits[u] >> j) & 1u ? g[j] : 0.f;
#elif NEEDS_Z
          g[j] = through_streaming(g[j], d[j] * scale[j] + offset[j], slope);
#endif
#if REDUCE
          sum[j] += g[j];
          product[j] += g[j] * d[j];
#endif
        }
#if RESIDUAL
        store(dresidual + at, narrow(g));
#endif
#pragma unroll
        for (int j = 0; j < VEC; ++j) g[j] *= scale[j];
        store(dx + at, narrow(g));
      }
    }
  }
#if REDUCE
  __shared__ __align__(16) float shared[2 * VEC * THREADS];
  __shared__ double total[2 * VEC * MAX_TILE];
  if (!reduce_channels(t, tile, vectors, sum, product, partial, ticket, shared, total)) return;
  const int width = tile * VEC;
  for (int o = threadIdx.x; o < width; o += THREADS) {
    const int c = blockIdx.y * width + o;
    if (c >= vectors * VEC) continue;
    dbias[c] = (float)total[o];
    dweight[c] = (float)(total[width + o] / sqrt((double)running_var[c] + (double)eps));
  }
#endif
}
