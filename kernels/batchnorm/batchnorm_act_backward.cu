// Batch normalisation (+ residual add) + activation, training mode. Backward.
//
//   g = dy * act'(z)      dbias = sum_m g      dweight = invstd * sum_m g * (x - mean)
//   dx = weight * invstd * (g - dbias / M - (x - mean) * invstd^2 * sum_m g (x - mean) / M)      dresidual = g
//
// FORK      y was used twice: dy is the sum of two gradients, dy and dy2, which nobody has added up before.
// Shapes    dy, dy2, x, dx, dresidual: [M, C] NHWC as in the forward file; mask as written there; saved: [2, C];
//           coefficient: [2, C] fp32 scratch (dbias / M, invstd^2 * sum / M).
// Replaces  aten::native_batch_norm_backward + threshold_backward (+ the add's gradient copies; FORK: + autograd's sum).
// Bytes     reduce: 2 reads; apply: 2 reads, 1 write. FORK: 1 more read in each.
//           Where the reduction has to make dresidual (KEEPS_G), it writes it, 1 write, and has read dy (1/16 mask too) for the
//           last time: the second launch reads g in its place, and FORK costs it nothing. FORK then moves 7 tensors, where a
//           sum of its own and two launches move 9. About 14 flops an element.
// Bound     DRAM bandwidth.
// Numerics  z is recomputed from x by the forward's own expression, so the mask agrees with the forward bit for bit;
//           with a residual the forward's bit mask is read instead. fp32 sums, fp64 across blocks.
//           dy + dy2 stays in fp32 for the sums; dresidual is rounded once, and dx comes of it.
// Limits    with a residual only activations whose slope is 0 or 1 (none, ReLU, ReLU6).

#include "vector.cuh"
#include "gelu.cuh"
#include "channel_reduce.cuh"
#include "overlap.cuh"

#ifndef FORK
#define FORK 0
#endif
// The reduction writes g. Without activation and FORK it is dy itself.
#define KEEPS_G (RESIDUAL && (ACT != 0 || FORK))

#ifndef UNROLL
#if FORK && ACT > 2
#define UNROLL 3  // 9 loads of 16 bytes in flight a thread: as many as its registers hold beside the slope's arithmetic
#else
#define UNROLL 4  // two tensors are read: 8 loads of 16 bytes in flight a thread; three with FORK
#endif
#endif

struct Channel {
  float mean[VEC], scale[VEC], offset[VEC];
};

__device__ __forceinline__ void load_channel(
    Channel& k, int vector, int channels, const float* saved, const float* weight, const float* bias) {
#pragma unroll
  for (int j = 0; j < VEC; ++j) {
    const int c = vector * VEC + j;
    k.mean[j] = saved[c];
    k.scale[j] = saved[channels + c] * weight[c];
    k.offset[j] = bias[c];
  }
}

// What comes from above.
struct Above { Vec16 part[1 + FORK]; };

__device__ __forceinline__ Above load_above(const Vec16* dy, const Vec16* dy2, i64 at, bool last) {
  Above above;
  above.part[0] = last ? load_last(dy + at) : load(dy + at);
#if FORK
  above.part[1] = last ? load_last(dy2 + at) : load(dy2 + at);
#endif
  return above;
}

// g[j] = dy[j] * act'(z[j]);  d[j] = x[j] - mean[j]
__device__ __forceinline__ void gradient(
    const Channel& k, const Vec16& vx, const Above& above, unsigned int bits, float slope, float (&g)[VEC], float (&d)[VEC]) {
  float f[VEC];
  widen(vx, f);
  widen(above.part[0], g);
#if FORK
  float other[VEC];
  widen(above.part[1], other);
#pragma unroll
  for (int j = 0; j < VEC; ++j) g[j] += other[j];
#endif
#pragma unroll
  for (int j = 0; j < VEC; ++j) {
    d[j] = f[j] - k.mean[j];
#if RESIDUAL && ACT != 0
    g[j] = (bits >> j) & 1u ? g[j] : 0.f;
#elif ACT != 0
    g[j] = through_streaming(g[j], d[j] * k.scale[j] + k.offset[j], slope);
#endif
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) batchnorm_act_backward_reduce(
    const Vec16* __restrict__ dy, const Vec16* __restrict__ dy2, const Vec16* __restrict__ x,
    const unsigned char* __restrict__ mask,
    const float* __restrict__ saved, const float* __restrict__ weight, const float* __restrict__ bias,
    Vec16* __restrict__ dresidual, float* __restrict__ partial, unsigned int* __restrict__ ticket, float* __restrict__ coefficient,
    float* __restrict__ dweight, float* __restrict__ dbias, i64 rows, int vectors, int tile, float slope) {
  overlap_launches();
  __shared__ __align__(16) float shared[2 * VEC * THREADS];
  __shared__ double total[2 * VEC * MAX_TILE];
  const Tile t = tile_of(tile, vectors);
  const int channels = vectors * VEC;
  float sum[VEC], product[VEC];
#pragma unroll
  for (int j = 0; j < VEC; ++j) sum[j] = product[j] = 0.f;
  if (t.vector >= 0) {
    Channel k;
    load_channel(k, t.vector, channels, saved, weight, bias);
    const i64 stride = (i64)gridDim.x * t.rows_per_pass;
    const i64 step = stride * vectors;
    i64 row = (i64)blockIdx.x * t.rows_per_pass + t.ty;
    for (i64 first = row * vectors + t.vector; row < rows; row += UNROLL * stride, first += UNROLL * step) {
      Vec16 vx[UNROLL];
      Above above[UNROLL];
      unsigned int bits[UNROLL];
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        const i64 at = first + u * step;
        if (row + u * stride < rows) {
          vx[u] = load(x + at);
          above[u] = load_above(dy, dy2, at, KEEPS_G);
#if RESIDUAL && ACT != 0
          bits[u] = mask[at];
#else
          bits[u] = 0;
#endif
        }
      }
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        if (row + u * stride >= rows) continue;
        float g[VEC], d[VEC];
        gradient(k, vx[u], above[u], bits[u], slope, g, d);
#if KEEPS_G
        store(dresidual + first + u * step, narrow(g));
#endif
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
          sum[j] += g[j];
          product[j] += g[j] * d[j];
        }
      }
    }
  }
  if (!reduce_channels(t, tile, vectors, sum, product, partial, ticket, shared, total)) return;
  const int width = tile * VEC;
  for (int o = threadIdx.x; o < width; o += THREADS) {
    const int c = blockIdx.y * width + o;
    if (c >= channels) continue;
    const double invstd = (double)saved[channels + c], inverse = 1.0 / (double)rows;
    dbias[c] = (float)total[o];
    dweight[c] = (float)(total[width + o] * invstd);
    coefficient[c] = (float)(total[o] * inverse);
    coefficient[channels + c] = (float)(total[width + o] * inverse * invstd * invstd);
  }
}

// dy: where KEEPS_G, the reduction's dresidual.
extern "C" __global__ void __launch_bounds__(THREADS) batchnorm_act_backward_apply(
    const Vec16* __restrict__ dy, const Vec16* __restrict__ dy2, const Vec16* __restrict__ x,
    const float* __restrict__ saved, const float* __restrict__ weight, const float* __restrict__ bias,
    const float* __restrict__ coefficient, Vec16* __restrict__ dx,
    i64 rows, int vectors, int tile, float slope) {
  overlap_launches();
  const Tile t = tile_of(tile, vectors);
  if (t.vector < 0) return;
  const int channels = vectors * VEC;
  Channel k;
  load_channel(k, t.vector, channels, saved, weight, bias);
  float c1[VEC], c2[VEC];
#pragma unroll
  for (int j = 0; j < VEC; ++j) {
    c1[j] = coefficient[t.vector * VEC + j];
    c2[j] = coefficient[channels + t.vector * VEC + j];
  }
  const i64 stride = (i64)gridDim.x * t.rows_per_pass;
  const i64 step = stride * vectors;
  i64 row = rows - 1 - ((i64)blockIdx.x * t.rows_per_pass + t.ty);
  for (i64 last = row * vectors + t.vector; row >= 0; row -= UNROLL * stride, last -= UNROLL * step) {
    Vec16 vx[UNROLL];
#if KEEPS_G
    Vec16 vg[UNROLL];
#else
    Above above[UNROLL];
#endif
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const i64 at = last - u * step;
      if (row - u * stride >= 0) {
        vx[u] = load_last(x + at);
#if KEEPS_G
        vg[u] = load_last(dy + at);
#else
        above[u] = load_above(dy, dy2, at, true);
#endif
      }
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      if (row - u * stride < 0) continue;
      const i64 at = last - u * step;
      float g[VEC], d[VEC];
#if KEEPS_G
      widen(vg[u], g);
      widen(vx[u], d);
#pragma unroll
      for (int j = 0; j < VEC; ++j) d[j] -= k.mean[j];
#else
      gradient(k, vx[u], above[u], 0u, slope, g, d);
#endif
#pragma unroll
      for (int j = 0; j < VEC; ++j) g[j] = k.scale[j] * (g[j] - c1[j] - d[j] * c2[j]);
      store(dx + at, narrow(g));
    }
  }
}
