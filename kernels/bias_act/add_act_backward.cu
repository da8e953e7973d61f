// Residual add + activation, with no bias. Backward.
//
//   dx = dy * act'(z)      dresidual = dx
//
// Shapes    dy, dx: [M, C] as in bias_act_forward.cu; mask: as that file writes it.
// Replaces  threshold_backward: 2 reads, 1 write.
// Bytes     1 read, 1/16 read, 1 write. Flops: about 1 an element.
// Bound     DRAM bandwidth: 4.2 TB/s on an H200 is 0.20 ms for 256x256x56x56 in bf16.
// Grid      include/flat.cuh.
// Numerics  exact.
// Limits    fewer than 2^31 vectors; sm_80.

#include "vector.cuh"
#include "overlap.cuh"
#include "gelu.cuh"
#include "flat.cuh"
#include "steep.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) add_act_backward(
    const Vec16* __restrict__ dy, const unsigned char* __restrict__ mask, Vec16* __restrict__ dx, unsigned int total, float slope) {
  overlap_launches();
  const unsigned int first = first_vector();
  Vec16 vdy[UNROLL];
  unsigned int bits[UNROLL];
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
    const unsigned int at = first + u * THREADS;
    if (at >= total) continue;
    vdy[u] = load_last(dy + at);
    bits[u] = mask[at];
  }
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
    const unsigned int at = first + u * THREADS;
    if (at >= total) continue;
    float g[VEC];
    widen(vdy[u], g);
#pragma unroll
    for (int j = 0; j < VEC; ++j) g[j] = through_bit(g[j], (bits[u] >> j) & 1u, slope);
    store(dx + at, narrow(g));
  }
}
