// Residual add + activation, with no bias. Backward.
//
//   dx = dy * act'(z)      dresidual = dx
//
// Shapes    dy, y, dx: [M, C] as in bias_act_forward.cu; y: that file's output, whose slope it shows (ReLU, ReLU6, LeakyReLU with slope >= 0).
// Replaces  threshold_backward: 2 reads, 1 write.
// Bytes     2 reads, 1 write. Flops: about 2 an element.
// Bound     DRAM bandwidth: 4.2 TB/s on an H200 is 0.29 ms for 256x256x56x56 in bf16.
// Grid      include/flat.cuh.
// Numerics  fp32 in registers, rounded once.
// Limits    fewer than 2^31 vectors; sm_80.

#include "vector.cuh"
#include "overlap.cuh"
#include "gelu.cuh"
#include "flat.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) add_act_backward(
    const Vec16* __restrict__ dy, const Vec16* __restrict__ y, Vec16* __restrict__ dx, unsigned int total, float slope) {
  overlap_launches();
  const unsigned int first = first_vector();
  Vec16 vy[UNROLL], vdy[UNROLL];
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
    const unsigned int at = first + u * THREADS;
    if (at >= total) continue;
    vy[u] = load_last(y + at);
    vdy[u] = load_last(dy + at);
  }
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
    const unsigned int at = first + u * THREADS;
    if (at >= total) continue;
    float f[VEC], g[VEC];
    widen(vy[u], f);
    widen(vdy[u], g);
#pragma unroll
    for (int j = 0; j < VEC; ++j) g[j] = through_streaming(g[j], f[j], slope);
    store(dx + at, narrow(g));
  }
}
