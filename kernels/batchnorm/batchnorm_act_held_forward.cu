// Batch normalisation in training mode, then an optional residual add, then an activation, in one launch that reads x once.
//
//   mean[c] = 1/M sum_m x[m,c]        var[c] = 1/M sum_m (x[m,c] - mean[c])^2        (biased)
//   z = (x - mean) * weight / sqrt(var + eps) + bias (+ residual)                    y = act(z)
//   running_mean += momentum * (mean - running_mean);  running_var likewise with var * M / (M - 1)
//
// Shapes    as in batchnorm_act_forward.cu: x, residual, y: [M, C] with M = N*H*W, rows contiguous (NHWC), fp16, bf16 or fp32;
//           C a multiple of VEC. weight, bias, running_*: [C] fp32 (running_*_out may be the same memory). saved: [2, C] fp32
//           (mean, 1/sqrt(var + eps)). mask: [M, C/VEC] bytes, only with a residual and an activation.
// Replaces  the two launches of batchnorm_act_forward.cu where all rows of a channel tile fit the registers of one cluster.
// Bytes     1 read (+1 residual), 1 write (+1/16 mask): a third, or a quarter, less than in two launches.
// Bound     128x512x4x4 bf16: 4.2 MB, 1 us at 4.2 TB/s; there latency bounds it: one launch, one load from DRAM (about 1 us),
//           one barrier of the cluster, one store; two launches pay each twice, and the partial sums' way through L2. On
//           256x2048x7x7 bf16, DRAM: 103 MB, 24 us, where two launches move 154.
// Grid      (CLUSTER, tiles), include/held_tile.cuh. HOLD loads of 16 bytes in flight a thread: up to 128 KiB an SM.
// Numerics  those of the two launches: fp32 sums of x - x[0,c], fp64 across warps and blocks.
// Limits    M <= HOLD * CLUSTER * THREADS / tile; fewer than 2^31 vectors; sm_90 (clusters).

#include "vector.cuh"
#include "gelu.cuh"
#include "cluster.cuh"
#include "held_tile.cuh"
#include "prefetch.cuh"
#include "overlap.cuh"

#ifndef UNROLL
#define UNROLL 4  // residual loads in flight a thread; they were prefetched
#endif

extern "C" CLUSTERED __global__ void __launch_bounds__(THREADS, 512 / THREADS) batchnorm_act_held_forward(
    const Vec16* __restrict__ x, const Vec16* __restrict__ residual, const float* running_mean, const float* running_var,
    const float* __restrict__ weight, const float* __restrict__ bias, float* __restrict__ saved, float* running_mean_out,
    float* running_var_out, Vec16* __restrict__ y, unsigned char* __restrict__ mask, int rows, int vectors, int tile,
    float momentum, float eps, float slope) {
  overlap_launches();
  __shared__ float warps[HELD_WARPS * 2 * HELD_WIDTH], block[2 * HELD_WIDTH], constant[5 * HELD_WIDTH];
  const HeldTile t = held_tile(tile, vectors);
  const int width = tile * VEC, channels = vectors * VEC;
  const int end = t.vector < 0 ? 0 : rows;
  const int at = t.first * vectors + t.vector, step = t.stride * vectors;
  Vec16 v[HOLD];
  float sum[VEC], square[VEC], shift[VEC];
#pragma unroll
  for (int u = 0; u < HOLD; ++u)
    if (t.first + u * t.stride < end) v[u] = load(x + at + u * step);
#pragma unroll
  for (int j = 0; j < VEC; ++j) sum[j] = square[j] = shift[j] = 0.f;
  if (t.vector >= 0) widen(load(x + t.vector), shift);
  const int c = held_channel(tile, vectors);
  if (c >= 0) {  // while the loads are under way: behind the barrier they would be waited for
    constant[width + threadIdx.x] = weight[c];
    constant[2 * width + threadIdx.x] = bias[c];
    if (blockIdx.x == 0) {
      constant[3 * width + threadIdx.x] = running_mean[c];
      constant[4 * width + threadIdx.x] = running_var[c];
    }
  }
  if (threadIdx.x < tile) {
#pragma unroll
    for (int j = 0; j < VEC; ++j) constant[j * tile + t.tx] = shift[j];
  }
#if RESIDUAL
#pragma unroll
  for (int u = 0; u < HOLD; ++u)
    if (t.first + u * t.stride < end) prefetch_l2(residual + at + u * step);
#endif
#pragma unroll
  for (int u = 0; u < HOLD; ++u) {
    if (t.first + u * t.stride >= end) continue;
    float f[VEC];
    widen(v[u], f);
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      const float d = f[j] - shift[j];
      sum[j] += d;
      square[j] += d * d;
    }
  }
  double first, second;
  sum_held(tile, sum, square, warps, block, first, second);
  if (c >= 0) {
    const double inverse = 1.0 / (double)rows;
    const double d = first * inverse;
    double var = second * inverse - d * d;
    var = var > 0.0 ? var : (var != var ? var : 0.0);
    const float mean = (float)(d + (double)constant[threadIdx.x]), invstd = (float)(1.0 / sqrt(var + (double)eps));
    constant[threadIdx.x] = mean;
    constant[width + threadIdx.x] *= invstd;
    if (blockIdx.x == 0) {
      saved[c] = mean;
      saved[channels + c] = invstd;
      const float old_mean = constant[3 * width + threadIdx.x], old_var = constant[4 * width + threadIdx.x];
      running_mean_out[c] = old_mean + momentum * (mean - old_mean);
      running_var_out[c] = old_var + momentum * ((float)(var * ((double)rows / ((double)rows - 1.0))) - old_var);
    }
  }
  __syncthreads();
  float mean[VEC], scale[VEC], offset[VEC];
#pragma unroll
  for (int j = 0; j < VEC; ++j) {
    mean[j] = constant[j * tile + t.tx];
    scale[j] = constant[width + j * tile + t.tx];
    offset[j] = constant[2 * width + j * tile + t.tx];
  }
#pragma unroll
  for (int base = 0; base < HOLD; base += UNROLL) {
#if RESIDUAL
    Vec16 r[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
      if (base + u < HOLD && t.first + (base + u) * t.stride < end) r[u] = load(residual + at + (base + u) * step);
#endif
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      if (base + u >= HOLD || t.first + (base + u) * t.stride >= end) continue;
      const int place = at + (base + u) * step;
      float f[VEC];
      widen(v[base + u], f);
#if RESIDUAL
      float g[VEC];
      widen(r[u], g);
      unsigned int bits = 0;
#endif
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        float z = (f[j] - mean[j]) * scale[j] + offset[j];
#if RESIDUAL
        z += g[j];
        bits |= (lives(z) ? 1u : 0u) << j;
#endif
        f[j] = activate_streaming(z, slope);
      }
      store(y + place, narrow(f));
#if RESIDUAL && ACT != 0
      mask[place] = (unsigned char)bits;  // fp32 uses the low four bits of its byte
#endif
    }
  }
  cluster_wait();
}
