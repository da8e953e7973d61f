// Bias of a convolution or a Linear layer (+ residual add) + activation. Backward.
//
//   dx = dy * act'(z)      dresidual = dx      dbias[c] = sum_m dx[m, c]
//
// Shapes    dy, x, dx: [M, C] NHWC as in the forward file. mask: as that file writes it, for ReLU, ReLU6 and LeakyReLU (ACT 1 to 3), and
//           x is not read; else x, and z = x + bias is computed again. bias, dbias: [C] fp32.
//           partial: [gridDim.x, 2, C] fp32 scratch; ticket: one zeroed counter a channel tile.
// Replaces  threshold_backward (2 reads, 1 write) + the sum over all pixels for the bias (1 read).
// Bytes     1 read, 1/16 read, 1 write; with x 2 reads, 1 write. Flops: about 2 an element, 12 to 25 with an exponential: with GELU two
//           blocks an SM, so that some load while others compute (BLOCKS).
// Bound     DRAM bandwidth: 4.2 TB/s on an H200 is 0.40 ms for 128x64x224x224 in bf16, with x 0.59.
// Grid      (row blocks, channel tiles), rows walked from the end; the sums as in include/channel_reduce.cuh.
// Numerics  fp32 sums of the unrounded products, fp64 across blocks; the order is fixed.
// Limits    sm_80.

#include "vector.cuh"
#include "overlap.cuh"
#include "gelu.cuh"
#include "channel_reduce.cuh"
#include "parameters.cuh"
#include "steep.cuh"

#define MASKED (ACT <= 3)

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) bias_act_backward(
    const Vec16* __restrict__ dy, const Vec16* __restrict__ x, const unsigned char* __restrict__ mask, const float* __restrict__ bias,
    Vec16* __restrict__ dx, float* __restrict__ partial, unsigned int* __restrict__ ticket, float* __restrict__ dbias,
    i64 rows, int vectors, int tile, float slope) {
  overlap_launches();
  const Tile t = tile_of(tile, vectors);
  __shared__ __align__(16) float shared[2 * VEC * THREADS];
  __shared__ double total[2 * VEC * MAX_TILE];
  float sum[VEC], unused[VEC];
#pragma unroll
  for (int j = 0; j < VEC; ++j) sum[j] = unused[j] = 0.f;
  if (t.vector >= 0) {
#if !MASKED
    float offset[VEC];
    load_parameters(bias, t.vector, offset);
#endif
    const i64 stride = (i64)gridDim.x * t.rows_per_pass;
    const i64 step = stride * vectors;
    i64 row = rows - 1 - ((i64)blockIdx.x * t.rows_per_pass + t.ty);
    for (i64 last = row * vectors + t.vector; row >= 0; row -= UNROLL * stride, last -= UNROLL * step) {
      Vec16 vdy[UNROLL];
#if MASKED
      unsigned int bits[UNROLL];
#else
      Vec16 vx[UNROLL];
#endif
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        if (row - u * stride < 0) continue;
        vdy[u] = load_last(dy + last - u * step);
#if MASKED
        bits[u] = mask[last - u * step];
#else
        vx[u] = load_last(x + last - u * step);
#endif
      }
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        if (row - u * stride < 0) continue;
        float g[VEC];
        widen(vdy[u], g);
#if !MASKED
        float f[VEC];
        widen(vx[u], f);
#endif
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
#if MASKED
          g[j] = through_bit(g[j], (bits[u] >> j) & 1u, slope);
#else
          g[j] = through_streaming(g[j], f[j] + offset[j], slope);
#endif
          sum[j] += g[j];
        }
        store(dx + last - u * step, narrow(g));
      }
    }
  }
  if (!reduce_channels(t, tile, vectors, sum, unused, partial, ticket, shared, total)) return;
  for (int o = threadIdx.x; o < tile * VEC; o += THREADS) {
    const int c = blockIdx.y * tile * VEC + o;
    if (c < vectors * VEC) dbias[c] = (float)total[o];
  }
}
