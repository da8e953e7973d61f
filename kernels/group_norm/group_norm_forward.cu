// Group normalisation of an NHWC tensor, then an activation. Forward. Instance normalisation is C groups of one channel.
//
//   mean, var[n,g] = over the HW pixels and the D = C/G channels of the group (biased)
//   z = (x - mean) / sqrt(var + eps) * weight[c] + bias[c]        y = act(z)
//
// Shapes    x: [N, HW, C], STORAGE; y: the same, OUT. weight, bias: [C] fp32 or null. partial: [N, splits, 2, C] fp32;
//           saved: [N, G, 2] fp32 (mean, 1/std). C a multiple of VEC; D any divisor of C.
// Replaces  aten::native_group_norm, its copy to NCHW and back, the activation; aten::instance_norm likewise.
// Bytes     stats: 1 read; apply: 1 read, 1 write. About 10 flops an element.
// Bound     DRAM bandwidth. 256x256x56x56 bf16: 1.23 GB, 291 us at 4.24 TB/s.
// Grid      (splits of HW, channel tiles, N). apply walks the samples from the last: what stats read last is still in L2,
//           and a tensor that fits there is read from DRAM once. Each apply block joins the splits and channels of its
//           groups itself, some kilobytes from L2, so no third launch and no waiting.
// Numerics  fp32 sums of x - x[n,0,c] (no cancellation for a mean far from zero), joined in fp64. Deterministic.

#include "vector.cuh"
#include "mixed.cuh"
#include "activation_approx.cuh"
#include "channel_reduce.cuh"
#include "sample_reduce.cuh"
#include "group_sums.cuh"
#include "overlap.cuh"

#ifndef UNROLL
#define UNROLL 4  // independent 16-byte loads in flight a thread
#endif

__device__ __forceinline__ float value(const Vec16* x, int channel) {
  float f[VEC];
  widen(load(x + channel / VEC), f);
  float v = 0.f;
#pragma unroll
  for (int j = 0; j < VEC; ++j) v = j == channel % VEC ? f[j] : v;
  return v;
}

extern "C" __global__ void __launch_bounds__(THREADS) group_norm_stats(
    const Vec16* __restrict__ x, float* __restrict__ partial, int rows, int vectors, int tile) {
  overlap_launches();
  __shared__ float shared[2 * VEC * THREADS];
  const Tile t = tile_of(tile, vectors);
  const int n = blockIdx.z;
  x += (i64)n * rows * vectors;
  float sum[2][VEC], shift[VEC];
#pragma unroll
  for (int j = 0; j < VEC; ++j) sum[0][j] = sum[1][j] = shift[j] = 0.f;
  if (t.vector >= 0) {
    widen(load(x + t.vector), shift);
    const Rows r = rows_of(blockIdx.x, gridDim.x, rows);
    for (int row = r.first + t.ty; row < r.end; row += UNROLL * t.rows_per_pass) {
      Vec16 v[UNROLL];
#pragma unroll
      for (int u = 0; u < UNROLL; ++u)
        if (row + u * t.rows_per_pass < r.end) v[u] = load(x + (row + u * t.rows_per_pass) * vectors + t.vector);
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        if (row + u * t.rows_per_pass >= r.end) continue;
        float f[VEC];
        widen(v[u], f);
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
          const float d = f[j] - shift[j];
          sum[0][j] += d;
          sum[1][j] += d * d;
        }
      }
    }
  }
  reduce_sample<2>(t, tile, vectors, sum, partial + ((i64)n * gridDim.x + blockIdx.x) * 2 * vectors * VEC, shared);
}

// `parts` is the stats launch's splits; this launch may cut the rows otherwise.
extern "C" __global__ void __launch_bounds__(THREADS) group_norm_apply(
    const Vec16* __restrict__ x, const float* __restrict__ partial, const float* __restrict__ weight,
    const float* __restrict__ bias, float* __restrict__ saved, OutVec* __restrict__ y,
    int rows, int vectors, int tile, int per_group, int lanes, int parts, float eps, float slope) {
  overlap_launches();
  __shared__ float mean[VEC * MAX_TILE], rstd[VEC * MAX_TILE];
  const Tile t = tile_of(tile, vectors);
  const int channels = vectors * VEC;
  const int n = gridDim.z - 1 - blockIdx.z;
  x += (i64)n * rows * vectors;
  y += (i64)n * rows * vectors;
  partial += (i64)n * parts * 2 * channels;
  const double inverse = 1.0 / (double)rows, share = 1.0 / (double)per_group;  // a call each, so before what is in registers
  const Rows r = rows_of(blockIdx.x, gridDim.x, rows);
  Vec16 v[UNROLL];
  const auto fetch = [&](int row) {
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
      if (row + u * t.rows_per_pass < r.end) v[u] = load(x + (row + u * t.rows_per_pass) * vectors + t.vector);
  };
  int row = r.first + t.ty;
  if (t.vector >= 0) fetch(row);  // under way while the block joins its groups' sums
  const Groups groups = groups_of(tile, channels, per_group);
  sum_groups(
      groups, per_group, lanes,
      // a: sum of the channels' means, b: of their mean squares, both about the group's first value
      [&](int group, int c, int strip, int strips, double& a, double& b) {
        double sum = 0.0, square = 0.0;
#pragma unroll 8
        for (int s = strip; s < parts; s += strips) {
          sum += __ldcg(partial + (i64)s * 2 * channels + c);
          square += __ldcg(partial + (i64)s * 2 * channels + channels + c);
        }
        const double d = (double)value(x, c) - (double)value(x, group * per_group);
        a += (strip ? 0.0 : d) + sum * inverse;
        b += (strip ? 0.0 : d * d) + square * inverse + 2.0 * d * sum * inverse;
      },
      [&](int group, double a, double b) {
        a *= share;
        double var = b * share - a * a;
        var = var > 0.0 ? var : (var != var ? var : 0.0);
        const float m = (float)(a + (double)value(x, group * per_group));
        const float s = rsqrtf((float)(var + (double)eps));
        mean[group - groups.first] = m;
        rstd[group - groups.first] = s;
        if (blockIdx.x == 0 && group * per_group >= blockIdx.y * tile * VEC) {  // one block a group keeps them
          saved[((i64)n * (channels / per_group) + group) * 2] = m;
          saved[((i64)n * (channels / per_group) + group) * 2 + 1] = s;
        }
      });
  __syncthreads();
  if (t.vector < 0) return;
  float center[VEC], scale[VEC], offset[VEC];
#pragma unroll
  for (int j = 0; j < VEC; ++j) {
    const int c = t.vector * VEC + j, g = c / per_group - groups.first;
    center[j] = mean[g];
    scale[j] = rstd[g] * (weight ? weight[c] : 1.f);
    offset[j] = bias ? bias[c] : 0.f;
  }
  const bool paired = tile % 2 == 0 && vectors % 2 == 0;
  for (; row < r.end; row += UNROLL * t.rows_per_pass, fetch(row)) {
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      if (row + u * t.rows_per_pass >= r.end) continue;
      float f[VEC];
      widen(v[u], f);
#pragma unroll
      for (int j = 0; j < VEC; ++j) f[j] = activate_approx((f[j] - center[j]) * scale[j] + offset[j], slope);
      store_out(y + (row + u * t.rows_per_pass) * vectors + t.vector, f, paired);
    }
  }
}
