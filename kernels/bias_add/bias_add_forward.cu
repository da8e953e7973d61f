// Bias of a convolution (+ residual add), where no activation follows. Forward.
//
//   y = x + bias[c] (+ residual)
//
// Shapes    x, residual, y: [M, C] with M = N*H*W, rows contiguous (NHWC), fp16, bf16 or fp32; C a multiple of VEC (8, or 4 for fp32). y may
//           be the same memory as x. bias: [C] fp32.
// Replaces  the convolution's own bias pass, aten::add_ of a broadcast tensor, which loads it value by value (+ the residual's add).
// Bytes     1 read (+1 residual), 1 write.
// Bound     DRAM bandwidth.
// Grid      include/flat.cuh.
// Numerics  fp32 in registers, rounded once; eager rounds after each of its passes.
// Limits    fewer than 2^31 vectors; sm_80.

#include "vector.cuh"
#include "overlap.cuh"
#include "flat.cuh"
#include "parameters.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) bias_add_forward(
    const Vec16* x, const float* __restrict__ bias, const Vec16* __restrict__ residual, Vec16* y, unsigned int total,
    unsigned int vectors) {
  overlap_launches();
  const unsigned int first = first_vector();
  Vec16 v[UNROLL];
#if RESIDUAL
  Vec16 r[UNROLL];
#endif
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
    const unsigned int at = first + u * THREADS;
    if (at >= total) continue;
    v[u] = load_last(x + at);  // not the read-only path: y may be x
#if RESIDUAL
    r[u] = load_last(residual + at);
#endif
  }
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
    const unsigned int at = first + u * THREADS;
    if (at >= total) continue;
    float f[VEC], offset[VEC];
    widen(v[u], f);
    load_parameters(bias, at % vectors, offset);
#pragma unroll
    for (int j = 0; j < VEC; ++j) f[j] += offset[j];
#if RESIDUAL
    float g[VEC];
    widen(r[u], g);
#pragma unroll
    for (int j = 0; j < VEC; ++j) f[j] += g[j];
#endif
    store(y + at, narrow(f));
  }
}
