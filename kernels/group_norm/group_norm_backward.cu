// Group normalisation of an NHWC tensor, then an activation. Backward.
//
//   g = dy * act'(z)     h = (x - mean) * rstd     dbias = sum_{n,hw} g     dweight = sum_{n,hw} g * h
//   dx = rstd * (g w - 1/m sum_group g w - h * 1/m sum_group g w h)          m = HW * D
//
// Shapes    as in the forward file; dy: [N, HW, C], OUT; dx like x; dweight, dbias: [C] fp32.
//           partial: [N, splits, 2, C] fp32 (sums over pixels of g and of g * (x - mean)).
// Replaces  aten::native_group_norm_backward, its copies to NCHW and back, the activation's backward.
// Bytes     reduce: 2 reads; apply: 2 reads, 1 write. About 16 flops an element.
// Bound     DRAM bandwidth. 256x256x56x56 bf16: 2.06 GB, 484 us at 4.24 TB/s.
// Grid      reduce: (splits of HW, channel tiles, N). apply: one-dimensional; the first `parameter_blocks` blocks add the
//           partial sums over the samples for dweight and dbias, beside the others that stream; those join their groups'
//           sums themselves, and walk the samples from the last.
// Numerics  z is made again from x by the forward's own expression. fp32 sums, joined in fp64. Deterministic.

#include "vector.cuh"
#include "mixed.cuh"
#include "activation_approx.cuh"
#include "channel_reduce.cuh"
#include "sample_reduce.cuh"
#include "group_sums.cuh"
#include "overlap.cuh"

#ifndef UNROLL
#define UNROLL 4  // two tensors are read: 8 loads of 16 bytes in flight a thread
#endif

struct Channels {
  float mean[VEC], scale[VEC], offset[VEC];
};

__device__ __forceinline__ void load_channels(
    Channels& k, int vector, int per_group, const float* saved, const float* weight, const float* bias) {
#pragma unroll
  for (int j = 0; j < VEC; ++j) {
    const int c = vector * VEC + j, g = c / per_group;
    k.mean[j] = saved[2 * g];
    k.scale[j] = saved[2 * g + 1] * (weight ? weight[c] : 1.f);
    k.offset[j] = bias ? bias[c] : 0.f;
  }
}

// g[j] = dy[j] * act'(z[j]);  d[j] = x[j] - mean[j]
__device__ __forceinline__ void gradient(
    const Channels& k, const Vec16& vx, const OutVec& vdy, float slope, float (&g)[VEC], float (&d)[VEC]) {
  float f[VEC];
  widen(vx, f);
  widen_out(vdy, g);
#pragma unroll
  for (int j = 0; j < VEC; ++j) {
    d[j] = f[j] - k.mean[j];
#if ACT != 0
    g[j] = through_approx(g[j], d[j] * k.scale[j] + k.offset[j], slope);
#endif
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) group_norm_backward_reduce(
    const OutVec* __restrict__ dy, const Vec16* __restrict__ x, const float* __restrict__ saved,
    const float* __restrict__ weight, const float* __restrict__ bias, float* __restrict__ partial,
    int rows, int vectors, int tile, int per_group, float slope) {
  overlap_launches();
  __shared__ float shared[2 * VEC * THREADS];
  const Tile t = tile_of(tile, vectors);
  const int channels = vectors * VEC, n = blockIdx.z;
  x += (i64)n * rows * vectors;
  dy += (i64)n * rows * vectors;
  float sum[2][VEC];
#pragma unroll
  for (int j = 0; j < VEC; ++j) sum[0][j] = sum[1][j] = 0.f;
  if (t.vector >= 0) {
    Channels k;
    load_channels(k, t.vector, per_group, saved + (i64)n * (channels / per_group) * 2, weight, bias);
    const Rows r = rows_of(blockIdx.x, gridDim.x, rows);
    for (int row = r.first + t.ty; row < r.end; row += UNROLL * t.rows_per_pass) {
      Vec16 vx[UNROLL];
      OutVec vdy[UNROLL];
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        if (row + u * t.rows_per_pass >= r.end) continue;
        vx[u] = load(x + (row + u * t.rows_per_pass) * vectors + t.vector);
        vdy[u] = load_out(dy + (row + u * t.rows_per_pass) * vectors + t.vector);
      }
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        if (row + u * t.rows_per_pass >= r.end) continue;
        float g[VEC], d[VEC];
        gradient(k, vx[u], vdy[u], slope, g, d);
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
          sum[0][j] += g[j];
          sum[1][j] += g[j] * d[j];
        }
      }
    }
  }
  reduce_sample<2>(t, tile, vectors, sum, partial + ((i64)n * gridDim.x + blockIdx.x) * 2 * channels, shared);
}

// dbias[c] and dweight[c]: 32 columns of [g sums, g d sums] at a time, THREADS / 32 threads a column over samples and splits.
__device__ __forceinline__ void parameter_gradients(
    const float* partial, const float* saved, float* dweight, float* dbias,
    int samples, int parts, int channels, int per_group, int block, int blocks, double* shared) {
  const int x = threadIdx.x % 32, y = threadIdx.x / 32, strips = THREADS / 32;
  for (int base = block * 32; base < 2 * channels; base += blocks * 32) {
    const int column = base + x;
    double sum = 0.0;
    if (column < 2 * channels) {
      const int g = column % channels / per_group;
#pragma unroll 8
      for (int i = y; i < samples * parts; i += strips) {
        const float v = __ldcg(partial + (i64)i * 2 * channels + column);
        sum += column < channels ? v : v * saved[((i64)(i / parts) * (channels / per_group) + g) * 2 + 1];
      }
    }
    shared[threadIdx.x] = sum;
    __syncthreads();
    if (y == 0 && column < 2 * channels) {
      for (int k = 1; k < strips; ++k) sum += shared[threadIdx.x + 32 * k];
      if (column < channels)
        dbias[column] = (float)sum;
      else
        dweight[column - channels] = (float)sum;
    }
    __syncthreads();
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) group_norm_backward_apply(
    const OutVec* __restrict__ dy, const Vec16* __restrict__ x, const float* __restrict__ saved,
    const float* __restrict__ weight, const float* __restrict__ bias, const float* __restrict__ partial,
    Vec16* __restrict__ dx, float* __restrict__ dweight, float* __restrict__ dbias,
    int samples, int rows, int vectors, int tile, int tiles, int per_group, int lanes, int parts, int splits,
    int parameter_blocks, float slope) {
  overlap_launches();
  __shared__ double shared[THREADS];
  __shared__ float c1[VEC * MAX_TILE], c2[VEC * MAX_TILE];
  const int channels = vectors * VEC, group_count = channels / per_group;
  if (blockIdx.x < parameter_blocks) {
    parameter_gradients(
        partial, saved, dweight, dbias, samples, parts, channels, per_group, blockIdx.x, parameter_blocks, shared);
    return;
  }
  const int block = blockIdx.x - parameter_blocks;
  const int split = block % splits, column = block / splits % tiles;
  const int n = samples - 1 - block / splits / tiles;
  Tile t = tile_of(tile, vectors);
  t.vector = t.ty < t.rows_per_pass && column * tile + t.tx < vectors ? column * tile + t.tx : -1;
  x += (i64)n * rows * vectors;
  dy += (i64)n * rows * vectors;
  dx += (i64)n * rows * vectors;
  saved += (i64)n * group_count * 2;
  partial += (i64)n * parts * 2 * channels;
  const double inverse = 1.0 / ((double)rows * per_group);  // a call, so before what is in registers
  const Rows r = rows_of(split, splits, rows);
  Vec16 vx[UNROLL];
  OutVec vdy[UNROLL];
  const auto fetch = [&](int row) {
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      if (row + u * t.rows_per_pass >= r.end) continue;
      vx[u] = load_last(x + (row + u * t.rows_per_pass) * vectors + t.vector);
      vdy[u] = load_out(dy + (row + u * t.rows_per_pass) * vectors + t.vector);
    }
  };
  int row = r.first + t.ty;
  if (t.vector >= 0) fetch(row);  // under way while the block joins its groups' sums
  const int begin = column * tile * VEC, end = begin + tile * VEC < channels ? begin + tile * VEC : channels;
  const Groups groups = {begin / per_group, (end - 1) / per_group};
  sum_groups(
      groups, per_group, lanes,
      [&](int group, int c, int strip, int strips, double& a, double& b) {
        double sum = 0.0, product = 0.0;
#pragma unroll 8
        for (int s = strip; s < parts; s += strips) {
          sum += __ldcg(partial + (i64)s * 2 * channels + c);
          product += __ldcg(partial + (i64)s * 2 * channels + channels + c);
        }
        const double w = weight ? weight[c] : 1.f;
        a += w * sum;
        b += w * product;
      },
      [&](int group, double a, double b) {
        const double rstd = saved[2 * group + 1];
        c1[group - groups.first] = (float)(a * inverse * rstd);
        c2[group - groups.first] = (float)(b * inverse * rstd * rstd * rstd);
      });
  __syncthreads();
  if (t.vector < 0) return;
  Channels k;
  load_channels(k, t.vector, per_group, saved, weight, bias);
  float a[VEC], b[VEC];
#pragma unroll
  for (int j = 0; j < VEC; ++j) {
    const int g = (t.vector * VEC + j) / per_group - groups.first;
    a[j] = c1[g];
    b[j] = c2[g];
  }
  for (; row < r.end; row += UNROLL * t.rows_per_pass, fetch(row)) {
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      if (row + u * t.rows_per_pass >= r.end) continue;
      float g[VEC], d[VEC];
      gradient(k, vx[u], vdy[u], slope, g, d);
#pragma unroll
      for (int j = 0; j < VEC; ++j) g[j] = g[j] * k.scale[j] - a[j] - d[j] * b[j];
      store(dx + (row + u * t.rows_per_pass) * vectors + t.vector, narrow(g));
    }
  }
}
