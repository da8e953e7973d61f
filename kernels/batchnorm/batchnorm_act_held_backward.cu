// Batch normalisation (+ residual add) + activation, training mode. Backward in one launch that reads dy and x once.
//
//   g = dy * act'(z)      dbias = sum_m g      dweight = invstd * sum_m g * (x - mean)
//   dx = weight * invstd * (g - dbias / M - (x - mean) * invstd^2 * sum_m g (x - mean) / M)      dresidual = g
//
// FORK      y was used twice: dy is the sum of two gradients, dy and dy2, as in batchnorm_act_backward.cu.
// Shapes    dy, dy2, x, dx, dresidual: [M, C] NHWC; mask and saved as either forward wrote them; weight, bias, dweight, dbias: [C] fp32.
// Replaces  the two launches of batchnorm_act_backward.cu where all rows of a channel tile fit the registers of one cluster.
// Bytes     2 reads (+1/16 mask; FORK: +1), 1 write (+1 where dresidual is not dy itself: an activation, or FORK): 3 passes over the
//           tensor in place of 5, or 4 in place of 6, or with FORK 5 in place of 7.
// Bound     as in batchnorm_act_held_forward.cu: latency up to some 10 MB, then DRAM.
// Grid      (CLUSTER, tiles), include/held_tile.cuh. HOLD rows of all tensors a thread: 2 or 3 HOLD loads of 16 bytes in flight.
// Numerics  those of the two launches (with FORK dx always comes of a rounded g): z by the forward's expression, or the forward's bits; fp64 across warps and blocks.
// Limits    M <= HOLD * CLUSTER * THREADS / tile; fewer than 2^31 vectors; with a residual only slopes of 0 or 1 (none, ReLU, ReLU6); sm_90 (clusters).

#include "vector.cuh"
#include "gelu.cuh"
#include "cluster.cuh"
#include "held_tile.cuh"
#include "overlap.cuh"

#ifndef FORK
#define FORK 0
#endif
#define BY_MASK (RESIDUAL && ACT != 0)
#define KEEPS_G (RESIDUAL && (ACT != 0 || FORK))  // dresidual is written: it is not dy itself
// Between the sums and dx the registers hold dy, of which g is made a second time, or g: dy or zero, or a sum.
#define MAKES_G_TWICE (ACT > 2 && !FORK)

// A per-channel constant of the tile, as this thread's VEC channels have it.
__device__ __forceinline__ void fetch(const float* constant, int tile, int tx, float (&k)[VEC]) {
#pragma unroll
  for (int j = 0; j < VEC; ++j) k[j] = constant[j * tile + tx];
}

extern "C" CLUSTERED __global__ void __launch_bounds__(THREADS, 256 / THREADS) batchnorm_act_held_backward(
    const Vec16* __restrict__ dy, const Vec16* __restrict__ dy2, const Vec16* __restrict__ x,
    const unsigned char* __restrict__ mask,
    const float* __restrict__ saved, const float* __restrict__ weight, const float* __restrict__ bias,
    Vec16* __restrict__ dx, Vec16* __restrict__ dresidual, float* __restrict__ dweight, float* __restrict__ dbias,
    int rows, int vectors, int tile, float slope) {
  overlap_launches();
  __shared__ float warps[HELD_WARPS * 2 * HELD_WIDTH], block[2 * HELD_WIDTH], constant[5 * HELD_WIDTH];
  const HeldTile t = held_tile(tile, vectors);
  const int width = tile * VEC, channels = vectors * VEC;
  const int end = t.vector < 0 ? 0 : rows;
  const int at = t.first * vectors + t.vector, step = t.stride * vectors;
  Vec16 vx[HOLD], vdy[HOLD];
#if FORK
  Vec16 vdy2[HOLD];
#endif
#if BY_MASK
  unsigned int bits[HOLD];
#endif
#pragma unroll
  for (int u = 0; u < HOLD; ++u) {
    if (t.first + u * t.stride < end) {
      vx[u] = load_last(x + at + u * step);
      vdy[u] = load_last(dy + at + u * step);
#if FORK
      vdy2[u] = load_last(dy2 + at + u * step);
#endif
#if BY_MASK
      bits[u] = mask[at + u * step];
#endif
    }
  }
  const int c = held_channel(tile, vectors);
  if (c >= 0) {  // while the loads are under way
    constant[threadIdx.x] = saved[c];
    constant[width + threadIdx.x] = saved[channels + c] * weight[c];
    constant[2 * width + threadIdx.x] = bias[c];
  }
  __syncthreads();
  float mean[VEC], scale[VEC], sum[VEC], product[VEC];
  fetch(constant, tile, t.tx, mean);
  fetch(constant + width, tile, t.tx, scale);
#if ACT != 0 && !RESIDUAL
  float offset[VEC];
  fetch(constant + 2 * width, tile, t.tx, offset);
#endif
#pragma unroll
  for (int j = 0; j < VEC; ++j) sum[j] = product[j] = 0.f;
#pragma unroll
  for (int u = 0; u < HOLD; ++u) {
    if (t.first + u * t.stride >= end) continue;
    float g[VEC], d[VEC];
    widen(vx[u], d);
    widen(vdy[u], g);
#if FORK
    float other[VEC];
    widen(vdy2[u], other);
#pragma unroll
    for (int j = 0; j < VEC; ++j) g[j] += other[j];
#endif
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      d[j] -= mean[j];
#if BY_MASK
      g[j] = (bits[u] >> j) & 1u ? g[j] : 0.f;
#elif ACT != 0
      g[j] = through_streaming(g[j], d[j] * scale[j] + offset[j], slope);
#endif
      sum[j] += g[j];
      product[j] += g[j] * d[j];
    }
#if !MAKES_G_TWICE && (ACT != 0 || FORK)
    vdy[u] = narrow(g);  // so that neither z nor the bits are needed again
#endif
  }
  double first, second;
  sum_held(tile, sum, product, warps, block, first, second);
  if (c >= 0) {
    const double invstd = (double)saved[channels + c], inverse = 1.0 / (double)rows;
    constant[3 * width + threadIdx.x] = (float)(first * inverse);
    constant[4 * width + threadIdx.x] = (float)(second * inverse * invstd * invstd);
    if (blockIdx.x == 0) {
      dbias[c] = (float)first;
      dweight[c] = (float)(second * invstd);
    }
  }
  __syncthreads();
  float c1[VEC], c2[VEC];
  fetch(constant + 3 * width, tile, t.tx, c1);
  fetch(constant + 4 * width, tile, t.tx, c2);
#pragma unroll
  for (int u = 0; u < HOLD; ++u) {
    if (t.first + u * t.stride >= end) continue;
    const int place = at + u * step;
    float g[VEC], d[VEC];
    widen(vx[u], d);
    widen(vdy[u], g);
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      d[j] -= mean[j];
#if MAKES_G_TWICE
      g[j] = through_streaming(g[j], d[j] * scale[j] + offset[j], slope);
#endif
    }
#if KEEPS_G
    store(dresidual + place, narrow(g));
#endif
#pragma unroll
    for (int j = 0; j < VEC; ++j) g[j] = scale[j] * (g[j] - c1[j] - d[j] * c2[j]);
    store(dx + place, narrow(g));
  }
  cluster_wait();
}
