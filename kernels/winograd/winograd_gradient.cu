// A result's gradient as Winograd's F(3x3, 4x4) multiplies it for the weight's: of each tile of 4 x 4 pixels 36 frequencies, fp16.
//
//   d[f,tile,o] = S * pixel_scales[tile] * (A dy A^T)[f],   dy: 4 x 4 pixels, zero outside the image
//
// Shapes    dy: [N, H, W, OUT] bf16; d: [36, tiles, OUT] fp16, tiles by image, row and column. pixel_scales: [tiles] fp32, as winograd_input.cu leaves
//           them of x. most: one fp32, what no |pixel_scales[tile] * dy| of a tile is above; S brings it to below 2^GRADIENTS_BELOW.
// Replaces  with winograd_input.cu, a product a frequency and winograd_weight.cu the weight's gradient of aten::convolution_backward in bf16.
// Bytes     dy once, 2.25 times as much of d. [128,28,28,512]: 103 MB and 231.
// Flops     about 8 a value of d.
// Bound     DRAM bandwidth: 0.079 ms there at 4.24 TB/s.
// Grid      a thread a tile and two channels, flat.
// Numerics  fp32, each value rounded once to fp16. Values 2^29 below the largest keep their 11 bits. Two runs are bit-equal.
// Limits    even OUT; tiles * OUT below 2^31; sm_80.

#define WEIGHT_STORAGE 0
#define TRANSPOSED 0

#include "half.cuh"
#include "overlap.cuh"
#include "winograd.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) winograd_gradient(
    const unsigned int* __restrict__ dy, unsigned int* __restrict__ d, const float* __restrict__ pixel_scales, const float* __restrict__ most, int outputs,
    int height, int width, int tiles_h, int tiles_w, i64 tiles) {
  overlap_launches();
  const unsigned int pairs = outputs / 2, at = blockIdx.x * THREADS + threadIdx.x, pair = at % pairs, tile = at / pairs;
  if (tile >= tiles) return;
  const int tj = tile % tiles_w, ti = tile / tiles_w % tiles_h, n = tile / tiles_w / tiles_h;
  const float scale = scale_for(*most, GRADIENTS_BELOW) * pixel_scales[tile];
  float t[4][6][2];  // transformed along columns
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    unsigned int both[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int h = 4 * ti + r, w = 4 * tj + c;
      both[r] = h < height && w < width ? dy[(((i64)n * height + h) * width + w) * pairs + pair] : 0u;
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      float g[4], found[6];
#pragma unroll
      for (int r = 0; r < 4; ++r) g[r] = __uint_as_float(k ? both[r] & 0xffff0000u : both[r] << 16) * scale;
      gradient_transform(g, found);
#pragma unroll
      for (int r = 0; r < 6; ++r) t[c][r][k] = found[r];
    }
  }
#pragma unroll
  for (int r = 0; r < 6; ++r) {
    float row[2][6];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const float g[4] = {t[0][r][k], t[1][r][k], t[2][r][k], t[3][r][k]};
      gradient_transform(g, row[k]);
    }
#pragma unroll
    for (int c = 0; c < 6; ++c) d[((i64)(6 * r + c) * tiles + tile) * pairs + pair] = narrow_f16x2(row[0][c], row[1][c]);
  }
}
