// LeakyReLU whose slope is a parameter, one a channel. Forward.
//
//   y = x > 0 ? x : weight[c] * x
//
// Shapes    x, y: [M, C] with M = N*H*W, rows contiguous (NHWC), fp16, bf16 or fp32; C a multiple of VEC (8, or 4 for fp32). weight: [C] fp32.
// Replaces  aten::_prelu_kernel, which reads the weight as a tensor broadcast value by value; under autocast with casts to fp32 around it.
// Bytes     1 read, 1 write.
// Bound     DRAM bandwidth.
// Grid      include/flat.cuh.
// Numerics  fp32 in registers, rounded once.
// Limits    fewer than 2^31 vectors; sm_80.

#include "vector.cuh"
#include "overlap.cuh"
#include "flat.cuh"
#include "parameters.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) prelu_forward(
    const Vec16* __restrict__ x, const float* __restrict__ weight, Vec16* __restrict__ y, unsigned int total,
    unsigned int vectors) {
  overlap_launches();
  const unsigned int first = first_vector();
  Vec16 v[UNROLL];
#pragma unroll
  for (int u = 0; u < UNROLL; ++u)
    if (first + u * THREADS < total) v[u] = load(x + first + u * THREADS);
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
    const unsigned int at = first + u * THREADS;
    if (at >= total) continue;
    float f[VEC], slope[VEC];
    widen(v[u], f);
    load_parameters(weight, at % vectors, slope);
#pragma unroll
    for (int j = 0; j < VEC; ++j) f[j] = f[j] > 0.f ? f[j] : slope[j] * f[j];
    store(y + at, narrow(f));
  }
}
