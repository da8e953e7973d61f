// Batch normalisation of the first C channels of a growing concatenation, then an activation. Backward, in one pass.
//
//   g = dy * act'(z)      dbias = sum_m g      dweight = invstd * sum_m g * (x - mean)
//   dx = scale * g - [scale * dbias / M] - (x - mean) * [scale * invstd^2 * sum_m g (x - mean) / M]      scale = weight * invstd
//
// The gradient of a feature is the sum of dx over every norm behind it. What stands in brackets needs the sums over all rows,
// but it is the same for all rows of a channel, and mean and invstd are the same in every norm. So the norms add up
//
//   gradient = later + scale * g      a = later_a + scale * dbias / M      b = later_b + scale * invstd^2 * sum_m g (x - mean) / M
//
// and batchnorm_concat_append_backward takes a and (x - mean) * b off once, where a feature's gradient leaves the concatenation.
//
// Shapes    dy, gradient: [M, C] with M = N*H*W, rows contiguous (NHWC), fp16, bf16 or fp32. x: [M, C], a row `pitch` vectors after
//           the one before; later (with LATER only): [M, C], likewise `later_pitch`: the first C channels of the next norm's
//           gradient. mean, variance, weight, bias, later_a, later_b, a, b, dweight, dbias: [C] fp32. later is not changed.
// Replaces  aten::native_batch_norm_backward + threshold_backward + the strided adds of the slices of cat's gradients.
// Bytes     2 reads (+1 with LATER), 1 write. Two launches, a reduction and then dx, would read dy and x twice. About 14 flops
//           an element.
// Bound     DRAM bandwidth.
// Grid      (row blocks, channel tiles), include/channel_reduce.cuh, rows from the end, where dy was written last.
// Numerics  z is recomputed from x by the forward's own expression. fp32 sums, fp64 across blocks. The running sum over norms is
//           rounded to the storage type at each norm, as autograd's own is. Deterministic.
// Limits    M >= 2; sm_80.

#include "vector.cuh"
#include "overlap.cuh"
#include "activation.cuh"
#include "channel_reduce.cuh"

#ifndef UNROLL
#define UNROLL 3  // three tensors are read: 9 loads of 16 bytes in flight a thread, 72 KiB an SM
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1) batchnorm_concat_backward(
    const Vec16* __restrict__ dy, const Vec16* __restrict__ x, const Vec16* __restrict__ later,
    const float* __restrict__ mean, const float* __restrict__ variance, const float* __restrict__ weight,
    const float* __restrict__ bias, const float* __restrict__ later_a, const float* __restrict__ later_b,
    float* __restrict__ partial, unsigned int* __restrict__ ticket, Vec16* __restrict__ gradient, float* __restrict__ a,
    float* __restrict__ b, float* __restrict__ dweight, float* __restrict__ dbias,
    i64 rows, int vectors, int pitch, int later_pitch, int tile, float eps, float slope) {
  overlap_launches();
  __shared__ __align__(16) float shared[2 * VEC * THREADS];
  __shared__ double total[2 * VEC * MAX_TILE];
  const Tile t = tile_of(tile, vectors);
  float sum[VEC], product[VEC];
#pragma unroll
  for (int j = 0; j < VEC; ++j) sum[j] = product[j] = 0.f;
  if (t.vector >= 0) {
    float centre[VEC], scale[VEC];
#if ACT != 0
    float offset[VEC];
#endif
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      const int c = t.vector * VEC + j;
      centre[j] = mean[c];
      scale[j] = 1.f / sqrtf(variance[c] + eps) * weight[c];
#if ACT != 0
      offset[j] = bias[c];
#endif
    }
    const i64 stride = (i64)gridDim.x * t.rows_per_pass;
    for (i64 last = rows - 1 - ((i64)blockIdx.x * t.rows_per_pass + t.ty); last >= 0; last -= UNROLL * stride) {
      Vec16 vx[UNROLL], vdy[UNROLL];
#if LATER
      Vec16 vl[UNROLL];
#endif
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        const i64 row = last - u * stride;
        if (row >= 0) {
          vx[u] = load(x + row * pitch + t.vector);  // the norm before reads most of it again
          vdy[u] = load_last(dy + row * vectors + t.vector);
#if LATER
          vl[u] = load_last(later + row * later_pitch + t.vector);
#endif
        }
      }
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        const i64 row = last - u * stride;
        if (row < 0) continue;
        float f[VEC], g[VEC];
        widen(vx[u], f);
        widen(vdy[u], g);
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
          const float d = f[j] - centre[j];
#if ACT != 0
          g[j] = through(g[j], d * scale[j] + offset[j], slope);
#endif
          sum[j] += g[j];
          product[j] += g[j] * d;
          g[j] *= scale[j];
        }
#if LATER
        widen(vl[u], f);
#pragma unroll
        for (int j = 0; j < VEC; ++j) g[j] += f[j];
#endif
        store(gradient + row * vectors + t.vector, narrow(g));
      }
    }
  }
  if (!reduce_channels(t, tile, vectors, sum, product, partial, ticket, shared, total)) return;
  const int width = tile * VEC;
  for (int o = threadIdx.x; o < width; o += THREADS) {
    const int c = blockIdx.y * width + o;
    if (c >= vectors * VEC) continue;
    const double invstd = 1.f / sqrtf(variance[c] + eps), inverse = 1.0 / (double)rows, scale = invstd * weight[c];
    dbias[c] = (float)total[o];
    dweight[c] = (float)(total[width + o] * invstd);
    const float mine_a = (float)(scale * total[o] * inverse);
    const float mine_b = (float)(scale * total[width + o] * inverse * invstd * invstd);
#if LATER
    a[c] = later_a[c] + mine_a;
    b[c] = later_b[c] + mine_b;
#else
    a[c] = mine_a;
    b[c] = mine_b;
#endif
  }
}
