// Results of a 3 x 3 convolution in bf16 from the products that Winograd's F(4x4, 3x3) makes of its frequencies.
//
//   y[n, 4 ti .. 4 ti + 3, 4 tj .. 4 tj + 3, o] = pixel_scales[tile] * filter_scales[o] * (A^T m[:,tile,o] A)
//
// Shapes    m: [36, tiles, OUT] fp16, as torch.bmm makes it of what winograd_input.cu and winograd_filter.cu leave, with their scales; y: [N, H, W,
//           OUT] bf16. x: [N, H + 2 - 2 PAD, W + 2 - 2 PAD, IN] bf16 and the weight, any strides, are read where a result is not finite.
// Replaces  with those aten::convolution in bf16, and its gradient of the input.
// Bytes     m and y once. [128,28,28,512]: 231 MB and 103.
// Flops     about 8 a value of m.
// Bound     DRAM bandwidth: 0.079 ms there at 4.24 TB/s.
// Grid      a thread a tile and two outputs, flat.
// Numerics  fp32, rounded once. A result that is not finite, as a pixel or weight that is not makes many of a tile, is summed up anew from its own
//           taps in fp32: slow, and as a convolution has it. Two runs are bit-equal.
// Limits    even OUT; tiles * OUT below 2^31; sm_80.

#include "half.cuh"
#include "overlap.cuh"
#include "winograd.cuh"

// One value of y by its own taps.
__device__ float by_taps(const unsigned short* __restrict__ x, const Weight* __restrict__ weight, int n, int h, int w, int o, int inputs, int height, int width,
                         i64 step_out, i64 step_in, i64 step_row, i64 step_column) {
  float total = 0.f;
  const int rows = height + 2 - 2 * PAD, columns = width + 2 - 2 * PAD;  // of x
  for (int r = 0; r < 3; ++r)
    for (int s = 0; s < 3; ++s) {
      const int row = h - PAD + r, column = w - PAD + s;
      if (row < 0 || column < 0 || row >= rows || column >= columns) continue;
      const unsigned short* pixel = x + (((i64)n * rows + row) * columns + column) * inputs;
      const Weight* tap = weight + o * step_out + tap_at(r, s, step_row, step_column);
      for (int i = 0; i < inputs; ++i) {
        total = fmaf(widen_bf16(pixel[i]), widen_weight(tap[i * step_in]), total);
        if (total != total) return total;
      }
    }
  return total;
}

extern "C" __global__ void __launch_bounds__(THREADS, LEAST_BLOCKS) winograd_output(
    const unsigned int* __restrict__ m, unsigned int* __restrict__ y, const float* __restrict__ pixel_scales, const float* __restrict__ filter_scales,
    const unsigned short* __restrict__ x, const Weight* __restrict__ weight, int outputs, int inputs, int height, int width, int tiles_h, int tiles_w,
    i64 tiles, i64 step_out, i64 step_in, i64 step_row, i64 step_column) {
  overlap_launches();
  const unsigned int pairs = outputs / 2, at = blockIdx.x * THREADS + threadIdx.x, pair = at % pairs, tile = at / pairs;
  if (tile >= tiles) return;
  const int tj = tile % tiles_w, ti = tile / tiles_w % tiles_h, n = tile / tiles_w / tiles_h;
  float half[4][6][2];  // transformed along columns
#pragma unroll
  for (int c = 0; c < 6; ++c) {
    unsigned int both[6];
#pragma unroll
    for (int r = 0; r < 6; ++r) both[r] = m[((i64)(6 * r + c) * tiles + tile) * pairs + pair];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      float d[6], found[4];
#pragma unroll
      for (int r = 0; r < 6; ++r) d[r] = widen_f16((unsigned short)(k ? both[r] >> 16 : both[r] & 0xffffu));
      result_transform(d, found);
#pragma unroll
      for (int r = 0; r < 4; ++r) half[r][c][k] = found[r];
    }
  }
  const float scale[2] = {pixel_scales[tile] * filter_scales[2 * pair], pixel_scales[tile] * filter_scales[2 * pair + 1]};
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    float line[2][4];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      float d[6];
#pragma unroll
      for (int c = 0; c < 6; ++c) d[c] = half[r][c][k];
      result_transform(d, line[k]);
#pragma unroll
      for (int c = 0; c < 4; ++c) line[k][c] *= scale[k];
    }
    const int h = 4 * ti + r;
    if (h >= height) continue;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int w = 4 * tj + c;
      if (w >= width) continue;
      float values[2];
#pragma unroll
      for (int k = 0; k < 2; ++k)
        values[k] = line[k][c] - line[k][c] == 0.f ? line[k][c]
                                                   : by_taps(x, weight, n, h, w, 2 * pair + k, inputs, height, width, step_out, step_in, step_row, step_column);
      y[(((i64)n * height + h) * width + w) * pairs + pair] = narrow_bf16x2(values[0], values[1]);
    }
  }
}
