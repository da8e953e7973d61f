// Layer scale (a factor a channel), drop path (a factor a sample) and residual add. Forward.
//
//   y = residual + (branch + bias[c]) * scale[c] * keep[n]      half = y
//
// Shapes    branch, residual, y: [M, C] with M = N*H*W, rows contiguous (NHWC); C a multiple of VEC. branch fp16, bf16 or
//           fp32; residual and y the same, or fp32 beside a 16-bit branch (WIDE 1: what autocast makes of an fp32 scale), where
//           the residual may still be like the branch (MIXED 1: what a convolution gave). bias: [C] fp32 or null, with SCALE 1.
//           scale: [C] fp32 (SCALE 1); keep: [N] (include/keep.cuh), or not read (KEEP 0); sample: a sample's vectors. half: like the
//           branch (TWIN 1, with WIDE 1): y as autocast would cast it for the convolution that follows.
// Replaces  mul + mul + add_: 7 passes over the tensor; with one factor mul + add_: 5; with TWIN the cast: 2 more.
// Bytes     2 reads, 1 write, with TWIN another of 2 bytes an element. Flops: 4 an element.
// Bound     DRAM bandwidth: 4.2 TB/s on an H200 is 0.37 ms for 256x96x56x56, branch bf16, residual fp32.
// Grid      include/flat.cuh.
// Numerics  fp32 in registers, rounded once.
// Limits    fewer than 2^31 vectors; sm_80.

#include "vector.cuh"
#include "overlap.cuh"
#include "flat.cuh"
#include "keep.cuh"
#include "parameters.cuh"
#include "stream.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) scale_add_forward(
    const Vec16* __restrict__ branch, const float* __restrict__ bias, const float* __restrict__ scale,
    const Keep* __restrict__ keep, const Vec16* __restrict__ residual, Vec16* __restrict__ y, Vec16* __restrict__ half,
    unsigned int total, unsigned int sample, unsigned int vectors) {
  overlap_launches();
  const unsigned int first = first_vector();
  Vec16 v[UNROLL];
#if MIXED
  Vec16 r[UNROLL];
#else
  Stream r[UNROLL];
#endif
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
    const unsigned int at = first + u * THREADS;
    if (at >= total) continue;
    v[u] = load(branch + at);  // the backward reads it again
#if MIXED
    r[u] = load(residual + at);
#else
    r[u] = load_stream(residual, at);
#endif
  }
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
    const unsigned int at = first + u * THREADS;
    if (at >= total) continue;
    float f[VEC], g[VEC];
    widen(v[u], f);
#if MIXED
    widen(r[u], g);
#else
    widen_stream(r[u], g);
#endif
#if SCALE
    float factor[VEC], offset[VEC] = {};
    load_parameters(scale, at % vectors, factor);
    if (bias) load_parameters(bias, at % vectors, offset);
#endif
#if KEEP
    const float k = widen_keep(keep[at / sample]);
#else
    const float k = 1.f;
#endif
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
#if SCALE
      f[j] = (f[j] + offset[j]) * factor[j];
#endif
      g[j] += f[j] * k;
    }
    store_stream(y, at, g, total % 2 == 0);
#if TWIN
    store(half + at, narrow(g));
#endif
  }
}
