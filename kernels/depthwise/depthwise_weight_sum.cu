// Depthwise convolution: the gradients of weight and bias from what the blocks of the kernels before left.
//
//   dweight[c, tap] = sum over `blocks` of partial[block, tap, c]; dbias likewise from the last tap, if there is one.
//
// Shapes    partial: [blocks][K*K + 1][C] fp32; dw: [C, 1, K, K], db: [C] in the parameters' dtype.
// Bytes     the partial sums, 0.5 to 5 MB that lie in L2.
// Bound     latency: a thread adds blocks / (THREADS / 32) values.
// Grid      a block: 32 columns of (tap, c) by THREADS / 32 groups of partial sums.
// Numerics  fp64 in a fixed order, rounded once. No atomics: two runs are bit-equal.
// Limits    without dbias the last tap is not read: it need not be written.

#define CH 2
#define STORAGE 0
#include "channels.cuh"
#include "overlap.cuh"

#define TAPS (K * K + 1)

extern "C" __global__ void __launch_bounds__(THREADS) depthwise_backward_weight_sum(
    const float* __restrict__ partial, Weight* __restrict__ dweight, Weight* __restrict__ dbias, int blocks, int channels) {
  overlap_launches();
  __shared__ double shared[THREADS];
  const int column = blockIdx.x * 32 + threadIdx.x % 32, group = threadIdx.x / 32, columns = TAPS * channels;
  const bool wanted = column < (dbias ? columns : K * K * channels);
  double total = 0.0;
  if (wanted) {
#pragma unroll 8
    for (int b = group; b < blocks; b += THREADS / 32) total += partial[(i64)b * columns + column];
  }
  shared[threadIdx.x] = total;
  __syncthreads();
  if (group > 0 || !wanted) return;
  for (int i = 1; i < THREADS / 32; ++i) total += shared[i * 32 + threadIdx.x];
  const int tap = column / channels, c = column % channels;
  if (tap < K * K) dweight[(i64)c * K * K + tap] = narrow_weight((float)total);
  else dbias[c] = narrow_weight((float)total);
}
