// Drop path (a factor a sample) and residual add, with no factor a channel. Backward.
//
//   d = dy + dhalf      dbranch = d * keep[n]      dresidual = d
//
// Shapes    dy like y, dhalf (TWIN 1) and dbranch as in scale_add_forward.cu; keep: [N] (include/keep.cuh); sample: a sample's vectors. dresidual is dy
//           itself and not written, but with TWIN: then it is like the residual.
// Replaces  a product: 2 passes; with TWIN dhalf's cast to fp32 and the addition of both gradients: 5 more.
// Bytes     1 read, 1 write; with TWIN 1 read and 1 write more. Flops: 2 an element.
// Bound     DRAM bandwidth: 4.2 TB/s on an H200 is 18 us for 256x24x56x56 in bf16.
// Grid      include/flat.cuh.
// Numerics  fp32 in registers, rounded once.
// Limits    fewer than 2^31 vectors; sm_80.

#include "vector.cuh"
#include "overlap.cuh"
#include "flat.cuh"
#include "keep.cuh"
#include "stream.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) drop_add_backward(
    const Vec16* __restrict__ dy, const Vec16* __restrict__ dhalf, const Keep* __restrict__ keep,
    Vec16* __restrict__ dbranch, Vec16* __restrict__ dresidual, unsigned int total, unsigned int sample) {
  overlap_launches();
  const unsigned int first = first_vector();
  Stream vdy[UNROLL];
#if TWIN
  Vec16 vhalf[UNROLL];
#endif
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
    const unsigned int at = first + u * THREADS;
    if (at >= total) continue;
    vdy[u] = load_stream(dy, at);  // it is the residual's gradient too: keep what fits in L2
#if TWIN
    vhalf[u] = load_last(dhalf + at);
#endif
  }
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
    const unsigned int at = first + u * THREADS;
    if (at >= total) continue;
    float g[VEC];
    widen_stream(vdy[u], g);
#if TWIN
    float h[VEC];
    widen(vhalf[u], h);
#pragma unroll
    for (int j = 0; j < VEC; ++j) g[j] += h[j];
    store_stream(dresidual, at, g, total % 2 == 0);
#endif
    const float k = widen_keep(keep[at / sample]);
#pragma unroll
    for (int j = 0; j < VEC; ++j) g[j] *= k;
    store(dbranch + at, narrow(g));
  }
}
