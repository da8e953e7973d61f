// Mean over all pixels of each image and channel, forward and backward.
//
//   y[n,c] = 1/P sum_p x[n,p,c]          dx[n,p,c] = dy[n,c] / P          P = H*W
//
// Shapes    x, dx: [N, P, C], y, dy: [N, C], fp16, bf16 or fp32, C a multiple of VEC (8, or 4 for fp32).
// Replaces  aten::mean over (2, 3) and aten::adaptive_avg_pool2d to 1 x 1; backward: expand, div and the copy into NHWC that
//           the next kernel asks for, because div of an expanded tensor is written as NCHW.
// Bytes     forward: x once; backward: dx once. ResNet-50's in bf16, [256,2048,7,7]: 51 MB each.
// Bound     DRAM bandwidth: 0.012 ms there at 4.24 TB/s (in training x often still lies in L2).
// Grid      forward: (channel tiles, N), block (channel vectors, pixels): a thread walks down every blockDim.y-th pixel, PIXELS
//           loads of 16 bytes in flight; the block adds up in shared memory. backward: (channel tiles, pixel tiles, N), a thread
//           reads its gradient once and writes PIXELS pixels.
// Numerics  fp32 sums in a fixed order, divided, rounded once; deterministic.
// Limits    N <= 65535; P*C/VEC < 2^31 an image.

#include "vector.cuh"

#ifndef PIXELS
#define PIXELS 8  // independent 16-byte loads in flight a thread, or stores
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1) global_avg_pool_forward(
    const Vec16* __restrict__ x, Vec16* __restrict__ y, int vectors, int pixels) {
  __shared__ float shared[VEC * THREADS];
  const int vector = blockIdx.x * blockDim.x + threadIdx.x;
  const int threads = blockDim.x * blockDim.y, mine = threadIdx.y * blockDim.x + threadIdx.x;
  float sum[VEC];
#pragma unroll
  for (int c = 0; c < VEC; ++c) sum[c] = 0.f;
  if (vector < vectors) {
    const Vec16* image = x + (i64)blockIdx.y * pixels * vectors + vector;
    for (int p = threadIdx.y; p < pixels; p += PIXELS * blockDim.y) {
      Vec16 v[PIXELS];
#pragma unroll
      for (int u = 0; u < PIXELS; ++u) {
        const int q = p + u * blockDim.y;
        if (q < pixels) v[u] = load(image + q * vectors);
      }
#pragma unroll
      for (int u = 0; u < PIXELS; ++u) {
        if (p + u * blockDim.y >= pixels) continue;
        float f[VEC];
        widen(v[u], f);
#pragma unroll
        for (int c = 0; c < VEC; ++c) sum[c] += f[c];
      }
    }
  }
#pragma unroll
  for (int c = 0; c < VEC; ++c) shared[c * threads + mine] = sum[c];
  __syncthreads();
  // A thread adds up one channel of one vector over the block's pixels.
  const int width = blockDim.x * VEC;
  for (int o = mine; o < width; o += threads) {
    const int c = o / blockDim.x, column = o % blockDim.x;
    float total = 0.f;
    for (int r = 0; r < blockDim.y; ++r) total += shared[c * threads + r * blockDim.x + column];
    shared[c * threads + column] = total;
  }
  __syncthreads();
  if (threadIdx.y == 0 && vector < vectors) {
#pragma unroll
    for (int c = 0; c < VEC; ++c) sum[c] = shared[c * threads + threadIdx.x] / (float)pixels;
    store(y + (i64)blockIdx.y * vectors + vector, narrow(sum));
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) global_avg_pool_backward(
    const Vec16* __restrict__ dy, Vec16* __restrict__ dx, int vectors, int pixels) {
  const int vector = blockIdx.x * blockDim.x + threadIdx.x;
  if (vector >= vectors) return;
  float g[VEC];
  widen(load(dy + (i64)blockIdx.z * vectors + vector), g);
#pragma unroll
  for (int c = 0; c < VEC; ++c) g[c] /= (float)pixels;
  const Vec16 value = narrow(g);
  Vec16* image = dx + (i64)blockIdx.z * pixels * vectors + vector;
  const int first = blockIdx.y * PIXELS * blockDim.y + threadIdx.y;
#pragma unroll
  for (int u = 0; u < PIXELS; ++u) {
    const int p = first + u * blockDim.y;
    if (p < pixels) store(image + p * vectors, value);
  }
}
