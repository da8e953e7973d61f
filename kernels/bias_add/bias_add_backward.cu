// Gradient of a convolution's bias: the sum over all pixels of what comes from above, which is the gradient of x itself.
//
//   dbias[c] = sum_m dy[m, c]
//
// Shapes    dy: [M, C] NHWC as in the forward file; dbias: [C] fp32. partial: [gridDim.x, 2, C] fp32 scratch; ticket: one zeroed counter a
//           channel tile.
// Replaces  aten::sum over (0, 2, 3), which the convolution's backward runs: 34 us on an H200 where the bytes take 8.
// Bytes     1 read.
// Bound     DRAM bandwidth, L2's where dy was written just now.
// Grid      (row blocks, channel tiles); the sums as in include/channel_reduce.cuh. Rows are walked from the end, which is still in L2.
// Numerics  fp32 sums, fp64 across blocks; the order is fixed.
// Limits    sm_80.

#include "vector.cuh"
#include "overlap.cuh"
#include "channel_reduce.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) bias_add_backward(
    const Vec16* __restrict__ dy, float* __restrict__ partial, unsigned int* __restrict__ ticket,
    float* __restrict__ dbias, i64 rows, int vectors, int tile) {
  overlap_launches();
  const Tile t = tile_of(tile, vectors);
  __shared__ __align__(16) float shared[2 * VEC * THREADS];
  __shared__ double total[2 * VEC * MAX_TILE];
  float sum[VEC], unused[VEC];
#pragma unroll
  for (int j = 0; j < VEC; ++j) sum[j] = unused[j] = 0.f;
  if (t.vector >= 0) {
    const i64 stride = (i64)gridDim.x * t.rows_per_pass;
    const i64 step = stride * vectors;
    i64 row = rows - 1 - ((i64)blockIdx.x * t.rows_per_pass + t.ty);
    for (i64 last = row * vectors + t.vector; row >= 0; row -= UNROLL * stride, last -= UNROLL * step) {
      Vec16 v[UNROLL];
#pragma unroll
      for (int u = 0; u < UNROLL; ++u)
        if (row - u * stride >= 0) v[u] = load(dy + last - u * step);
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        if (row - u * stride < 0) continue;
        float g[VEC];
        widen(v[u], g);
#pragma unroll
        for (int j = 0; j < VEC; ++j) sum[j] += g[j];
      }
    }
  }
  if (!reduce_channels(t, tile, vectors, sum, unused, partial, ticket, shared, total)) return;
  for (int o = threadIdx.x; o < tile * VEC; o += THREADS) {
    const int c = blockIdx.y * tile * VEC + o;
    if (c < vectors * VEC) dbias[c] = (float)total[o];
  }
}
