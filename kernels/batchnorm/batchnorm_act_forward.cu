// Batch normalisation in training mode, then an optional residual add, then an activation. Forward.
//
//   mean[c] = 1/M sum_m x[m,c]        var[c] = 1/M sum_m (x[m,c] - mean[c])^2        (biased)
//   z = (x - mean) * weight / sqrt(var + eps) + bias (+ residual)                    y = act(z)
//   running_mean += momentum * (mean - running_mean);  running_var likewise with var * M / (M - 1)
//
// Shapes    x, residual, y: [M, C] with M = N*H*W, rows contiguous (NHWC), fp16, bf16 or fp32; C a multiple of VEC
//           (8, or 4 for fp32). weight, bias, running_*: [C] fp32 (running_*_out may be the same memory). saved: [2, C] fp32 (mean, 1/sqrt(var + eps)).
//           mask: [M, C/VEC] bytes, one bit an element: act'(z) is not 0; only with a residual and an activation.
// Replaces  aten::native_batch_norm + add_ + relu_ (and their intermediate tensors).
// Bytes     stats: 1 read; apply: 1 read (+1 residual), 1 write (+1/16 mask). Flops: about 8 an element.
// Bound     DRAM bandwidth. Eager reads and writes 2R+1W for the norm and 1R1W (add: 2R1W) for each op after it.
// Grid      stats: see include/channel_reduce.cuh. apply: (row blocks, channel tiles), rows walked from the end, so that
//           what the stats pass read last is still in L2.
// Numerics  fp32 sums of x - x[0,c] (shifted, so that a mean far from zero does not cancel), fp64 across blocks.
// Limits    momentum and affine parameters required; M >= 2; sm_80.

#include "vector.cuh"
#include "gelu.cuh"
#include "channel_reduce.cuh"
#include "overlap.cuh"

#ifndef UNROLL
#define UNROLL 4  // independent 16-byte loads in flight a thread
#endif

extern "C" __global__ void __launch_bounds__(THREADS) batchnorm_act_stats(
    const Vec16* __restrict__ x, float* __restrict__ partial, unsigned int* __restrict__ ticket,
    float* __restrict__ saved, const float* running_mean, const float* running_var,
    float* running_mean_out, float* running_var_out,
    i64 rows, int vectors, int tile, float momentum, float eps) {
  overlap_launches();
  __shared__ __align__(16) float shared[2 * VEC * THREADS];
  __shared__ double total[2 * VEC * MAX_TILE];
  const Tile t = tile_of(tile, vectors);
  const int channels = vectors * VEC;
  float sum[VEC], square[VEC], shift[VEC];
#pragma unroll
  for (int j = 0; j < VEC; ++j) sum[j] = square[j] = shift[j] = 0.f;
  if (t.vector >= 0) {
    widen(load(x + t.vector), shift);
    const i64 stride = (i64)gridDim.x * t.rows_per_pass;
    const i64 step = stride * vectors;
    i64 row = (i64)blockIdx.x * t.rows_per_pass + t.ty;
    for (const Vec16* at = x + row * vectors + t.vector; row < rows; row += UNROLL * stride, at += UNROLL * step) {
      Vec16 v[UNROLL];
#pragma unroll
      for (int u = 0; u < UNROLL; ++u)
        if (row + u * stride < rows) v[u] = load(at + u * step);
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        if (row + u * stride >= rows) continue;  // no loop for the rest: each turn would wait for memory once more
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
    if (c >= channels) continue;
    const int vector = c / VEC, j = c % VEC;
    float first[VEC];
    widen(load(x + vector), first);
    float k = 0.f;
#pragma unroll
    for (int i = 0; i < VEC; ++i) k = i == j ? first[i] : k;
    const double inverse = 1.0 / (double)rows;
    const double d = total[o] * inverse;
    double var = total[width + o] * inverse - d * d;
    var = var > 0.0 ? var : (var != var ? var : 0.0);
    const float mean = (float)(d + (double)k);
    saved[c] = mean;
    saved[channels + c] = (float)(1.0 / sqrt(var + (double)eps));
    const float old_mean = running_mean[c], old_var = running_var[c];
    running_mean_out[c] = old_mean + momentum * (mean - old_mean);
    running_var_out[c] = old_var + momentum * ((float)(var * ((double)rows / ((double)rows - 1.0))) - old_var);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) batchnorm_act_apply(
    const Vec16* __restrict__ x, const Vec16* __restrict__ residual, const float* __restrict__ saved,
    const float* __restrict__ weight, const float* __restrict__ bias, Vec16* __restrict__ y,
    unsigned char* __restrict__ mask, i64 rows, int vectors, int tile, float slope) {
  overlap_launches();
  const Tile t = tile_of(tile, vectors);
  if (t.vector < 0) return;
  const int channels = vectors * VEC;
  float mean[VEC], scale[VEC], offset[VEC];
#pragma unroll
  for (int j = 0; j < VEC; ++j) {
    const int c = t.vector * VEC + j;
    mean[j] = saved[c];
    scale[j] = saved[channels + c] * weight[c];
    offset[j] = bias[c];
  }
  const i64 stride = (i64)gridDim.x * t.rows_per_pass;
  const i64 step = stride * vectors;
  i64 row = rows - 1 - ((i64)blockIdx.x * t.rows_per_pass + t.ty);
  for (i64 last = row * vectors + t.vector; row >= 0; row -= UNROLL * stride, last -= UNROLL * step) {
    Vec16 v[UNROLL];
#if RESIDUAL
    Vec16 r[UNROLL];
#endif
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const i64 at = last - u * step;
      if (row - u * stride >= 0) {
        v[u] = load(x + at);  // backward reads x again: keep what fits in L2
#if RESIDUAL
        r[u] = load(residual + at);
#endif
      }
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      if (row - u * stride < 0) continue;
      const i64 at = last - u * step;
      float f[VEC];
      widen(v[u], f);
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
      store(y + at, narrow(f));
#if RESIDUAL && ACT != 0
      mask[at] = (unsigned char)bits;  // fp32 uses the low four bits of its byte
#endif
    }
  }
}
