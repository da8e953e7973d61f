// Images or volumes of a few channels, cast to half precision and laid out with eight channels a pixel, of which the last are zeros: tensor
// cores, and cuDNN's kernels for them, take channels by eights.
//
//   y[m, c] = c < C ? x[m, c] : 0
//
// Shapes    x: [N, P, C] (NHWC) or, with PLANES, [N, C, P] (NCHW), INPUT; P pixels or voxels, C of 1 to 7. y: [N, P, 8], STORAGE (fp16 or bf16).
// Replaces  autocast's cast of the input, and what cuDNN does with fewer channels: in three dimensions a product in single precision
//           pipes, 14.3 ms on an H200 for the stem of a 3-D ResNet-50 at batch 32.
// Bytes     x once, 16 a pixel.
// Bound     DRAM bandwidth. [32,3,16,112,112] in fp32: 77 + 103 MB.
// Grid      a thread a pixel, UNROLL of them.
// Numerics  a cast, rounded to nearest.
// Limits    fewer than 2^31 pixels.

#include "vector.cuh"
#include "half.cuh"
#include "overlap.cuh"

#if INPUT == 0
typedef float Value;
__device__ __forceinline__ float widened(Value v) { return v; }
#elif INPUT == 1
typedef unsigned short Value;
__device__ __forceinline__ float widened(Value v) { return widen_f16(v); }
#else
typedef unsigned short Value;
__device__ __forceinline__ float widened(Value v) { return widen_bf16(v); }
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1) pad_channels(
    const Value* __restrict__ x, Vec16* __restrict__ y, unsigned int total, unsigned int pixels) {
  overlap_launches();
  const unsigned int first = blockIdx.x * (THREADS * UNROLL) + threadIdx.x;
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
    const unsigned int m = first + u * THREADS;
    if (m >= total) return;
#if PLANES
    const unsigned int n = m / pixels;
    const Value* at = x + ((i64)n * C * pixels + (m - n * pixels));
    const i64 step = pixels;
#else
    const Value* at = x + (i64)m * C;
    const i64 step = 1;
#endif
    float f[VEC];
#pragma unroll
    for (int c = 0; c < VEC; ++c) f[c] = c < C ? widened(at[c < C ? c * step : 0]) : 0.f;
    store(y + m, narrow(f));
  }
}
