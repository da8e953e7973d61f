// Bias of a convolution or a Linear layer (+ residual add) + activation. Forward.
//
//   y = act(x + bias[c] (+ residual))
//
// Shapes    x, residual, y: [M, C] with M = N*H*W or all that stands before a Linear layer's features, rows contiguous (NHWC),
//           fp16, bf16 or fp32; C a multiple of VEC (8, or 4 for fp32). y may be the same memory as x. bias: [C] fp32 (BIAS 1)
//           or not read (BIAS 0).
// Replaces  the convolution's own bias pass (add_) + relu_ (+ add_): 2 (3) passes that each read and write. Of a Linear layer,
//           whose bias costs nothing, the activation: 1 pass.
// Bytes     1 read (+1 residual), 1 write. Flops: about 3 an element, 10 to 20 with an exponential: with GELU two
//           blocks an SM, so that some load while others compute (BLOCKS).
// Bound     DRAM bandwidth: 4.2 TB/s on an H200 is 0.39 ms for 128x64x224x224 in bf16.
// Grid      (row blocks, channel tiles), rows walked from the end: what the convolution wrote last is still in L2.
// Numerics  fp32 in registers, rounded once; eager rounds after each of its passes.
// Limits    sm_80.

#include "vector.cuh"
#include "overlap.cuh"
#include "gelu.cuh"
#include "channel_reduce.cuh"
#include "parameters.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) bias_act_forward(
    const Vec16* x, const float* __restrict__ bias, const Vec16* __restrict__ residual, Vec16* y,
    i64 rows, int vectors, int tile, float slope) {
  overlap_launches();
  const Tile t = tile_of(tile, vectors);
  if (t.vector < 0) return;
#if BIAS
  float offset[VEC];
  load_parameters(bias, t.vector, offset);
#endif
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
      if (row - u * stride < 0) continue;
      v[u] = load_last(x + last - u * step);  // not the read-only path: y may be x
#if RESIDUAL
      r[u] = load_last(residual + last - u * step);
#endif
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      if (row - u * stride < 0) continue;
      float f[VEC];
      widen(v[u], f);
#if RESIDUAL
      float g[VEC];
      widen(r[u], g);
#endif
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        float z = f[j];
#if BIAS
        z += offset[j];
#endif
#if RESIDUAL
        z += g[j];
#endif
        f[j] = activate_streaming(z, slope);
      }
      store(y + last - u * step, narrow(f));
    }
  }
}
