// Bias of a convolution or a Linear layer (+ residual add) + activation. Forward.
//
//   y = act(x + bias[c] (+ residual))
//
// Shapes    x, residual, y: [M, C] with M = N*H*W or all that stands before a Linear layer's features, rows contiguous (NHWC),
//           fp16, bf16 or fp32; C a multiple of VEC (8, or 4 for fp32). y may be the same memory as x. bias: [C] fp32 (BIAS 1)
//           or not read (BIAS 0). mask: [M, C / VEC] bytes, one bit an element where the slope is 1 (MASK 1: ReLU, ReLU6, LeakyReLU).
// Replaces  the convolution's own bias pass (add_) + relu_ (+ add_): 2 (3) passes that each read and write. Of a Linear layer,
//           whose bias costs nothing, the activation: 1 pass.
// Bytes     1 read (+1 residual), 1 write (+1/16 mask). Flops: about 3 an element, 10 to 20 with an exponential: GELU is held to few registers
//           (BLOCKS of a full SM), so that some blocks load while others compute.
// Bound     DRAM bandwidth: 4.2 TB/s on an H200 is 0.39 ms for 128x64x224x224 in bf16.
// Grid      include/flat.cuh.
// Numerics  fp32 in registers, rounded once; eager rounds after each of its passes.
// Limits    fewer than 2^31 vectors; sm_80.

#include "vector.cuh"
#include "overlap.cuh"
#include "gelu.cuh"
#include "flat.cuh"
#include "parameters.cuh"
#include "steep.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) bias_act_forward(
    const Vec16* x, const float* __restrict__ bias, const Vec16* __restrict__ residual, Vec16* y,
    unsigned char* __restrict__ mask, unsigned int total, unsigned int vectors, float slope) {
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
    float f[VEC];
    widen(v[u], f);
#if RESIDUAL
    float g[VEC];
    widen(r[u], g);
#endif
#if BIAS
    float offset[VEC];
    load_parameters(bias, at % vectors, offset);
#endif
#if MASK
    unsigned int bits = 0;
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
#if MASK
      bits |= (steep(z) ? 1u : 0u) << j;
#endif
      f[j] = activate_streaming(z, slope);
    }
    store(y + at, narrow(f));
#if MASK
    mask[at] = (unsigned char)bits;  // fp32 uses the low four bits of its byte
#endif
  }
}
