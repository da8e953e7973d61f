// Between the launches of a batch norm over channels that are no multiple of a 16-byte vector's: `joined` neighbouring rows are taken for
// one, [M / joined, joined * C], for the two launches of batchnorm_act_forward.cu and of batchnorm_act_backward.cu, and what their first
// has found of each of its columns is made the channels' here.
//
//   statistics:  mean[c] = mean_k mean[k, c]      var[c] = mean_k (var[k, c] + (mean[k, c] - mean[c])^2)      (Chan et al., equal parts)
//                running_mean += momentum * (mean - running_mean);  running_var likewise with var * M / (M - 1)
//   sums:        dweight[c] = sum_k dweight[k, c]      dbias[c] = sum_k dbias[k, c]      coefficient[:, c] = mean_k coefficient[:, k, c]
//
// Shapes    saved: [6, joined, C] fp32: mean, 1/sqrt(var + eps), weight and bias of each column, made here; and what the first launch left
//           of each, mean and 1/sqrt(var), read. weight, bias, running_*: [C] fp32 (running_*_out may be the same memory).
//           columns: [4, joined, C] fp32: coefficient (2), dweight, dbias as batchnorm_act_backward_reduce leaves them; the coefficients are
//           made the channels' in place. dweight, dbias: [C] fp32.
// Replaces  a batch norm that PyTorch makes of scalar loads.
// Bytes     24 a column forward, 32 backward: some hundred columns, from L2.
// Bound     latency: about 2 us with the launch.
// Grid      a thread a channel.
// Numerics  fp64, in a fixed order: two runs are bit-equal. A column's variance comes of 1/sqrt(var) in fp32, 1.2e-7 of it off.
// Limits    two rows a column at least; sm_80.

#include "overlap.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) batchnorm_join_statistics(
    float* saved, const float* __restrict__ weight, const float* __restrict__ bias, const float* running_mean,
    const float* running_var, float* running_mean_out, float* running_var_out, int channels, int joined, double rows,
    float momentum, float eps) {
  overlap_launches();
  const int c = blockIdx.x * THREADS + threadIdx.x, width = joined * channels;
  if (c >= channels) return;
  const float* means = saved + 4 * width + c;
  const float* deviations = saved + 5 * width + c;  // inverse
  double sum = 0.0;
  for (int k = 0; k < joined; ++k) sum += (double)means[k * channels];
  const double mean = sum / joined;
  double square = 0.0;
  for (int k = 0; k < joined; ++k) {
    const double inverse = (double)deviations[k * channels], d = (double)means[k * channels] - mean;
    square += 1.0 / (inverse * inverse) + d * d;
  }
  const double var = square / joined;
  const float invstd = (float)(1.0 / sqrt(var + (double)eps));
  for (int k = 0; k < joined; ++k) {
    float* column = saved + k * channels + c;
    column[0] = (float)mean;
    column[width] = invstd;
    column[2 * width] = weight[c];
    column[3 * width] = bias[c];
  }
  const float old_mean = running_mean[c], old_var = running_var[c];
  running_mean_out[c] = old_mean + momentum * ((float)mean - old_mean);
  running_var_out[c] = old_var + momentum * ((float)(var * (rows / (rows - 1.0))) - old_var);
}

extern "C" __global__ void __launch_bounds__(THREADS) batchnorm_join_sums(
    float* __restrict__ columns, float* __restrict__ dweight, float* __restrict__ dbias, int channels, int joined) {
  overlap_launches();
  const int c = blockIdx.x * THREADS + threadIdx.x, width = joined * channels;
  if (c >= channels) return;
  double total[4] = {};
  for (int k = 0; k < joined; ++k)
#pragma unroll
    for (int i = 0; i < 4; ++i) total[i] += (double)columns[i * width + k * channels + c];
  for (int k = 0; k < joined; ++k)
#pragma unroll
    for (int i = 0; i < 2; ++i) columns[i * width + k * channels + c] = (float)(total[i] / joined);
  dweight[c] = (float)total[2];
  dbias[c] = (float)total[3];
}
