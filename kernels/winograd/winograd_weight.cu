// The gradient of a 3 x 3 weight from the products that Winograd's F(3x3, 4x4) makes of its frequencies.
//
//   dw[o,i] = (G^T u[:,o,i] G) / S
//
// Shapes    u: [36, OUT, IN] fp32, summed over all tiles of what winograd_gradient.cu and winograd_input.cu leave; dw: [OUT, IN, 3, 3] fp32 or bf16
//           (WEIGHT_STORAGE 0, 2), any strides. most: one fp32, of which winograd_gradient.cu has S. x: [N, H, W, IN] and dy: [N, H - 2 + 2 PAD,
//           W - 2 + 2 PAD, OUT] bf16 are read where a result is not finite.
// Replaces  with those the weight's gradient of aten::convolution_backward in bf16, and its cast to the weight's dtype.
// Bytes     u and dw once. 512 to 512 channels: 38 MB and 9.4.
// Flops     about 3 a value of u.
// Bound     DRAM bandwidth.
// Grid      a thread an output and an input, flat.
// Numerics  fp32, rounded once where dw is bf16. A result that is not finite, as a pixel that is not makes all of them, is summed up anew from its
//           own products in fp32: slow, and as a convolution has it. Two runs are bit-equal.
// Limits    OUT * IN below 2^31; sm_80.

#define TRANSPOSED 0

#include "half.cuh"
#include "overlap.cuh"
#include "winograd.cuh"

// One tap by its own products.
__device__ float by_pixels(const unsigned short* __restrict__ x, const unsigned short* __restrict__ dy, int r, int s, int i, int o, int inputs, int outputs,
                           int batch, int height, int width) {
  float total = 0.f;
  const int rows = height - 2 + 2 * PAD, columns = width - 2 + 2 * PAD;  // of dy
  for (int n = 0; n < batch; ++n)
    for (int h = 0; h < rows; ++h)
      for (int w = 0; w < columns; ++w) {
        const int row = h - PAD + r, column = w - PAD + s;
        if (row < 0 || column < 0 || row >= height || column >= width) continue;
        const float pixel = widen_bf16(x[(((i64)n * height + row) * width + column) * inputs + i]);
        total = fmaf(pixel, widen_bf16(dy[(((i64)n * rows + h) * columns + w) * outputs + o]), total);
        if (total != total) return total;
      }
  return total;
}

extern "C" __global__ void __launch_bounds__(THREADS) winograd_weight(
    const float* __restrict__ u, Weight* __restrict__ dw, const float* __restrict__ most, const unsigned short* __restrict__ x,
    const unsigned short* __restrict__ dy, int outputs, int inputs, int batch, int height, int width, i64 step_out, i64 step_in, i64 step_row,
    i64 step_column) {
  overlap_launches();
  const unsigned int at = blockIdx.x * THREADS + threadIdx.x, i = at % inputs, o = at / inputs;
  if (o >= outputs) return;
  const float scale = 1.f / scale_for(*most, GRADIENTS_BELOW);
  const i64 each = (i64)outputs * inputs;
  float t[6][3];  // transformed along columns
#pragma unroll
  for (int c = 0; c < 6; ++c) {
    float m[6];
#pragma unroll
    for (int r = 0; r < 6; ++r) m[r] = u[(6 * r + c) * each + at];
    tap_transform(m, t[c]);
  }
  Weight* to = dw + o * step_out + i * step_in;
#pragma unroll
  for (int r = 0; r < 3; ++r) {
    const float m[6] = {t[0][r], t[1][r], t[2][r], t[3][r], t[4][r], t[5][r]};
    float taps[3];
    tap_transform(m, taps);
#pragma unroll
    for (int s = 0; s < 3; ++s) {
      const float value = taps[s] * scale;
      const bool finite = value - value == 0.f;
      to[tap_at(r, s, step_row, step_column)] =
          narrow_weight(finite ? value : by_pixels(x, dy, r, s, i, o, inputs, outputs, batch, height, width));
    }
  }
}
