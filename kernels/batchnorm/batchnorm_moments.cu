// A batch norm's statistics from the partial moments that the kernel before it has left of its result (include/moments.cuh).
//
//   n = sum_b n_b     mean = sum_b n_b mean_b / n     var = (sum_b M2_b + n_b (mean_b - mean)^2) / n        (biased; Chan et al.)
//   running_mean += momentum * (mean - running_mean);  running_var likewise with var * n / (n - 1)
//
// Shapes    moments: [blocks, 3, C] fp32 (count, mean, M2). saved: [2, C] fp32 (mean, 1/sqrt(var + eps)). running_*: [C] fp32
//           (running_*_out may be the same memory). All as batchnorm_act_stats leaves them, for the same second pass.
// Replaces  batchnorm_act_stats, which reads the whole tensor: 49 us of DRAM for [256,128,56,56] in bf16.
// Bytes     12 a block and channel: 264 blocks of 64 channels make 200 KB, from L2.
// Bound     latency: one wave of loads and a tree, about 3 us with the launch.
// Grid      (C / CHANNELS rounded up). THREADS as [ty][tx], tx over CHANNELS channels (a sector of 32 bytes), ty over blocks.
// Numerics  fp64 about the first part's mean, merged in a fixed order: two runs are bit-equal.
// Limits    C a multiple of 4; at least two values a channel.
// Sources   Chan, Golub, LeVeque: Updating Formulae and a Pairwise Algorithm for Computing Sample Variances (1979).

#include "overlap.cuh"

#define CHANNELS 8
#define WARPS (THREADS / 32)
#define ROWS (THREADS / CHANNELS)
#define UNROLL 4  // parts whose three loads are in flight together

extern "C" __global__ void __launch_bounds__(THREADS) batchnorm_merge_moments(
    const float* __restrict__ moments, float* __restrict__ saved, const float* running_mean, const float* running_var,
    float* running_mean_out, float* running_var_out, int blocks, int channels, float momentum, float eps) {
  overlap_launches();
  __shared__ double part[3][WARPS][CHANNELS];
  const int tx = threadIdx.x % CHANNELS, ty = threadIdx.x / CHANNELS, c = blockIdx.x * CHANNELS + tx;
  double count = 0.0, sum = 0.0, square = 0.0;  // of distances from `about`
  float about = 0.f;
  if (c < channels) {
    about = moments[channels + c];
    about = about - about == 0.f ? about : 0.f;
    for (int block = ty; block < blocks; block += UNROLL * ROWS) {
      float n[UNROLL], mean[UNROLL], m2[UNROLL];
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        if (block + u * ROWS >= blocks) continue;
        const float* at = moments + (long long)(block + u * ROWS) * 3 * channels + c;
        n[u] = at[0];
        mean[u] = at[channels];
        m2[u] = at[2 * channels];
      }
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        if (block + u * ROWS >= blocks) continue;
        const double d = (double)mean[u] - (double)about, weighted = n[u] != 0.f ? (double)n[u] * d : 0.0;
        count += (double)n[u];
        sum += weighted;
        square += (double)m2[u] + weighted * d;
      }
    }
  }
#pragma unroll
  for (int lanes = CHANNELS; lanes < 32; lanes <<= 1) {
    count += __shfl_xor_sync(0xffffffffu, count, lanes);
    sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
    square += __shfl_xor_sync(0xffffffffu, square, lanes);
  }
  if (threadIdx.x % 32 < CHANNELS) {
    part[0][threadIdx.x / 32][tx] = count;
    part[1][threadIdx.x / 32][tx] = sum;
    part[2][threadIdx.x / 32][tx] = square;
  }
  __syncthreads();
  if (ty > 0 || c >= channels) return;
  count = sum = square = 0.0;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) {
    count += part[0][w][tx];
    sum += part[1][w][tx];
    square += part[2][w][tx];
  }
  const double d = sum / count;
  double var = (square - sum * d) / count;
  var = var > 0.0 ? var : (var != var ? var : 0.0);
  const float mean = (float)(d + (double)about);
  saved[c] = mean;
  saved[channels + c] = (float)(1.0 / sqrt(var + (double)eps));
  const float old_mean = running_mean[c], old_var = running_var[c];
  running_mean_out[c] = old_mean + momentum * (mean - old_mean);
  running_var_out[c] = old_var + momentum * ((float)(var * (count / (count - 1.0))) - old_var);
}
