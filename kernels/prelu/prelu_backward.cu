// LeakyReLU whose slope is a parameter, one a channel. Backward.
//
//   dx = x > 0 ? dy : weight[c] * dy      dweight[c] = sum_m (x[m, c] > 0 ? 0 : x[m, c] * dy[m, c])
//
// Shapes    dy, x, dx: [M, C] NHWC as in the forward file; weight, dweight: [C] fp32. partial: [gridDim.x, 2, C] fp32 scratch; ticket: one
//           zeroed counter a channel tile.
// Replaces  aten::_prelu_kernel_backward, which writes a weight's gradient for each value, and the sum over all of these.
// Bytes     2 reads, 1 write; PyTorch's 3 reads, 2 writes.
// Bound     DRAM bandwidth.
// Grid      (row blocks, channel tiles), rows walked from the end; the sums as in include/channel_reduce.cuh.
// Numerics  fp32 sums of the unrounded products, fp64 across blocks; the order is fixed.
// Limits    sm_80.

#include "vector.cuh"
#include "overlap.cuh"
#include "channel_reduce.cuh"
#include "parameters.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) prelu_backward(
    const Vec16* __restrict__ dy, const Vec16* __restrict__ x, const float* __restrict__ weight, Vec16* __restrict__ dx,
    float* __restrict__ partial, unsigned int* __restrict__ ticket, float* __restrict__ dweight, i64 rows, int vectors,
    int tile) {
  overlap_launches();
  const Tile t = tile_of(tile, vectors);
  __shared__ __align__(16) float shared[2 * VEC * THREADS];
  __shared__ double total[2 * VEC * MAX_TILE];
  float sum[VEC], unused[VEC];
#pragma unroll
  for (int j = 0; j < VEC; ++j) sum[j] = unused[j] = 0.f;
  if (t.vector >= 0) {
    float slope[VEC];
    load_parameters(weight, t.vector, slope);
    const i64 stride = (i64)gridDim.x * t.rows_per_pass;
    const i64 step = stride * vectors;
    i64 row = rows - 1 - ((i64)blockIdx.x * t.rows_per_pass + t.ty);
    for (i64 last = row * vectors + t.vector; row >= 0; row -= UNROLL * stride, last -= UNROLL * step) {
      Vec16 vx[UNROLL], vdy[UNROLL];
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        if (row - u * stride < 0) continue;
        vx[u] = load_last(x + last - u * step);
        vdy[u] = load_last(dy + last - u * step);
      }
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        if (row - u * stride < 0) continue;
        float f[VEC], g[VEC];
        widen(vx[u], f);
        widen(vdy[u], g);
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
          if (!(f[j] > 0.f)) {
            sum[j] += f[j] * g[j];
            g[j] *= slope[j];
          }
        }
        store(dx + last - u * step, narrow(g));
      }
    }
  }
  if (!reduce_channels(t, tile, vectors, sum, unused, partial, ticket, shared, total)) return;
  for (int o = threadIdx.x; o < tile * VEC; o += THREADS) {
    const int c = blockIdx.y * tile * VEC + o;
    if (c < vectors * VEC) dweight[c] = (float)total[o];
  }
}
