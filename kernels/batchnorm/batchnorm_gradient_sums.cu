// A batch norm's parameter gradients, and what its input's gradient takes of them, from partial sums that the kernel before has left
// of the gradient behind the activation (pointwise/pointwise_norm_gradient.cu).
//
//   dbias = sum_b sums[b][0]      dweight = invstd * sum_b sums[b][1]      (g and g (x - mean), summed over a part's pixels)
//   coefficient = dbias / M, invstd^2 * sum_b sums[b][1] / M
//
// Shapes    sums: [blocks, 2, C] fp32. saved: [2, C] fp32 (mean, inverse standard deviation). coefficient: [2, C], dweight, dbias: [C]
//           fp32, all as batchnorm_act_backward_reduce leaves them, for the same second pass.
// Replaces  batchnorm_act_backward_reduce, which reads the tensors.
// Bytes     8 a block and channel: 264 blocks of 256 channels make 540 KB, from L2.
// Bound     latency: one wave of loads and a tree, about 3 us with the launch.
// Grid      (C / CHANNELS rounded up). THREADS as [ty][tx], tx over CHANNELS channels (a sector of 32 bytes), ty over blocks.
// Numerics  fp64, in a fixed order: two runs are bit-equal.

#include "overlap.cuh"

#define CHANNELS 8
#define WARPS (THREADS / 32)
#define ROWS (THREADS / CHANNELS)
#define UNROLL 4  // parts whose two loads are in flight together

extern "C" __global__ void __launch_bounds__(THREADS) batchnorm_gradient_sums(
    const float* __restrict__ sums, const float* __restrict__ saved, float* __restrict__ coefficient, float* __restrict__ dweight,
    float* __restrict__ dbias, int blocks, int channels, int rows) {
  overlap_launches();
  __shared__ double part[2][WARPS][CHANNELS];
  const int tx = threadIdx.x % CHANNELS, ty = threadIdx.x / CHANNELS, c = blockIdx.x * CHANNELS + tx;
  double sum = 0.0, product = 0.0;
  if (c < channels) {
    for (int block = ty; block < blocks; block += UNROLL * ROWS) {
      float s[UNROLL], p[UNROLL];
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        if (block + u * ROWS >= blocks) continue;
        const float* at = sums + (long long)(block + u * ROWS) * 2 * channels + c;
        s[u] = at[0];
        p[u] = at[channels];
      }
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        if (block + u * ROWS >= blocks) continue;
        sum += (double)s[u];
        product += (double)p[u];
      }
    }
  }
#pragma unroll
  for (int lanes = CHANNELS; lanes < 32; lanes <<= 1) {
    sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
    product += __shfl_xor_sync(0xffffffffu, product, lanes);
  }
  if (threadIdx.x % 32 < CHANNELS) {
    part[0][threadIdx.x / 32][tx] = sum;
    part[1][threadIdx.x / 32][tx] = product;
  }
  __syncthreads();
  if (ty > 0 || c >= channels) return;
  sum = product = 0.0;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) {
    sum += part[0][w][tx];
    product += part[1][w][tx];
  }
  const double invstd = (double)saved[channels + c], inverse = 1.0 / (double)rows;
  dbias[c] = (float)sum;
  dweight[c] = (float)(product * invstd);
  coefficient[c] = (float)(sum * inverse);
  coefficient[channels + c] = (float)(product * inverse * invstd * invstd);
}
