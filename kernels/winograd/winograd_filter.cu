// Filters of 3 x 3 taps as Winograd's F(4x4, 3x3) multiplies them: 36 frequencies, fp16, scaled by a power of two an output.
//
//   u[f,o,i] = scale[o] * (G w[o,i] G^T)[f], and with TRANSPOSED of turned taps, from outputs to inputs: the gradient of an input
//
// Shapes    weight: [OUT, IN, 3, 3] fp32 or bf16 (WEIGHT_STORAGE 0, 2), any strides; step_out, step_in: of the product's outputs and inputs.
//           u: [36, outputs, inputs] fp16; scales: [outputs] fp32, 1 / scale.
// Replaces  the cast of the weight; with winograd_input.cu, torch.bmm and winograd_output.cu aten::convolution in bf16.
// Bytes     the weight once (again from L1 or L2) and u. 512 to 512 channels: 9.4 MB and 18.9.
// Flops     about 70 a tap.
// Bound     DRAM bandwidth.
// Grid      a block four outputs, so that a sector of a weight whose outputs or inputs lie side by side is read whole; four inputs a thread.
// Numerics  fp32, each value rounded once to fp16. The scale: include/winograd.cuh. Two runs are bit-equal.
// Limits    outputs and inputs multiples of 4; sm_80.

#include "half.cuh"
#include "overlap.cuh"
#include "winograd.cuh"

#define THREADS 256
#define OUTPUTS 4                  // of a block
#define LINES (THREADS / OUTPUTS)  // threads of an output
#define WARPS (THREADS / 32)

struct __align__(8) Four { unsigned int w[2]; };

__device__ __forceinline__ void taps_of(const Weight* __restrict__ from, i64 step_row, i64 step_column, float (&g)[3][3]) {
#pragma unroll
  for (int r = 0; r < 3; ++r)
#pragma unroll
    for (int s = 0; s < 3; ++s) g[r][s] = widen_weight(from[tap_at(r, s, step_row, step_column)]);
}

extern "C" __global__ void __launch_bounds__(THREADS) winograd_filter(
    const Weight* __restrict__ weight, Four* __restrict__ u, float* __restrict__ scales, int outputs, int inputs, i64 step_out, i64 step_in,
    i64 step_row, i64 step_column) {
  overlap_launches();
  __shared__ float sums[WARPS][OUTPUTS];
  const int own = threadIdx.x % OUTPUTS, line = threadIdx.x / OUTPUTS, o = blockIdx.x * OUTPUTS + own;
  const Weight* from = weight + o * step_out;
  float sum = 0.f;
  for (int i = line; i < inputs; i += LINES) {
    float g[3][3], most = 0.f;
    taps_of(from + i * step_in, step_row, step_column, g);
#pragma unroll
    for (int t = 0; t < 9; ++t) most = fmaxf(most, fabsf(g[t / 3][t % 3]));
    sum += most;
  }
#pragma unroll
  for (int lanes = 16; lanes >= OUTPUTS; lanes /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
  if (threadIdx.x % 32 < OUTPUTS) sums[threadIdx.x / 32][own] = sum;
  __syncthreads();
  sum = 0.f;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) sum += sums[w][own];
  const float scale = scale_for(FILTER_GROWTH * sum, FILTERS_BELOW);
  if (line == 0) scales[o] = 1.f / scale;
  for (int i = 4 * line; i < inputs; i += 4 * LINES) {
    Four packed[36];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float f[2][36];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        float g[3][3], t[3][6];  // t by column
        taps_of(from + (i + 2 * half + k) * step_in, step_row, step_column, g);
#pragma unroll
        for (int s = 0; s < 3; ++s) filter_transform(g[0][s], g[1][s], g[2][s], t[s]);
#pragma unroll
        for (int r = 0; r < 6; ++r) {
          float row[6];
          filter_transform(t[0][r], t[1][r], t[2][r], row);
#pragma unroll
          for (int c = 0; c < 6; ++c) f[k][6 * r + c] = row[c] * scale;
        }
      }
#pragma unroll
      for (int k = 0; k < 36; ++k) packed[k].w[half] = narrow_f16x2(f[0][k], f[1][k]);
    }
#pragma unroll
    for (int k = 0; k < 36; ++k) u[((i64)k * outputs + o) * (inputs / 4) + i / 4] = packed[k];
  }
}
