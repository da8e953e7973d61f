// Convolution of fp32 tensors on Hopper's tensor cores with fp32's own error, or the gradient of its input.
//
// What exact_conv.cu makes, from the same operands and with the same arguments, by the products of warpgroups (exact_hopper.cuh).
//
// Shapes    as exact_conv.cu.
// Replaces  aten::convolution in fp32 with TF32 off, and the input's part of aten::convolution_backward.
// Bytes     a once in 4 bytes a value, y once in 4; b from L2.
// Flops     2 * R * S * C a value of y; on the tensor cores three times as many.
// Bound     tensor cores: at 800 TFLOP/s of fp16, 270 of fp32; shared memory feeds 128 bytes a clock, of which products of 128 columns take 96.
// Grid      (tiles of 64 GROUPS pixels, tiles of WGMMA_N channels, groups). The depth, all taps by all octets of channels, passes through a
//           ring of STAGES times 64 values, in lines of 128 bytes.
// Numerics  exact_hopper.cuh; two runs are bit-equal. Infinities and NaN as exact_conv.cu.
// Limits    below 2^31 pixels and octets of an operand; sm_90a.

#include "exact_hopper.cuh"

#define ROWS_AT_ONCE (THREADS / 8)
#define A_COPIES (ROWS / ROWS_AT_ONCE)
#define B_COPIES (WGMMA_N / ROWS_AT_ONCE)

struct __align__(8) Pair { float first, second; };

extern "C" __global__ void __launch_bounds__(THREADS, 1) exact_conv_hopper(
    const Vec16* __restrict__ a_high, const Vec16* __restrict__ a_low, const Vec16* __restrict__ b_high, const Vec16* __restrict__ b_low,
    const unsigned int* __restrict__ a_most, const unsigned int* __restrict__ b_most, const float* __restrict__ bias, float* __restrict__ y,
    int rows, int rows_h, int rows_w, int height, int width, int out_height, int out_width, int units, int pixel_units, int outputs,
    int first_h, int first_w, int out_step, int in_step, int origin_h, int origin_w, int reach_h, int reach_w, int taps_h, int taps_w,
    int begin_r, int begin_s, int tap_step, int all_r, int all_s) {
  overlap_launches();
  extern __shared__ __align__(1024) Vec16 ring[];
  int* out_pixels = (int*)(ring + STAGES * STAGE);  // -1 behind the last
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warpgroup = threadIdx.x / 128;
  const int begin = blockIdx.x * ROWS, first_column = blockIdx.y * WGMMA_N, group = blockIdx.z, groups = gridDim.z;

  for (int r = threadIdx.x; r < ROWS; r += THREADS) {
    const unsigned int m = begin + r, line = m / rows_w, j = m % rows_w, n = line / rows_h, i = line % rows_h;
    const int oh = first_h + i * out_step, ow = first_w + j * out_step;
    out_pixels[r] = m < (unsigned int)rows ? (int)((n * out_height + oh) * out_width + ow) : -1;
  }

  // What this thread copies: one unit of the depth of some rows. Where the tap (0, 0) of a row lies, and its image.
  const int unit = threadIdx.x % 8, row = threadIdx.x / 8;
  int at_h[A_COPIES], at_w[A_COPIES], image[A_COPIES];
#pragma unroll
  for (int k = 0; k < A_COPIES; ++k) {
    const unsigned int m = begin + row + k * ROWS_AT_ONCE, line = m / rows_w, n = line / rows_h;
    at_h[k] = m < (unsigned int)rows ? (int)(line % rows_h) * in_step + origin_h : -0x40000000;
    at_w[k] = (int)(m % rows_w) * in_step + origin_w;
    image[k] = (int)n * height;
  }
  const int stages = (taps_h * taps_w * units + 7) / 8;
  int p = 0, q = 0, c = unit;  // of the stage that is copied next: tap and octet of channels
  const auto settle = [&]() {
    while (c >= units && p < taps_h) {
      c -= units;
      if (++q == taps_w) q = 0, ++p;
    }
  };
  settle();
  int fetched = 0;
  const auto fetch = [&]() {
    if (fetched < stages) {
      Vec16* to = ring + fetched % STAGES * STAGE;
      const bool inside = p < taps_h;
      const int dh = p * reach_h, dw = q * reach_w;
#pragma unroll
      for (int k = 0; k < A_COPIES; ++k) {
        const int h = at_h[k] + dh, w = at_w[k] + dw;
        const bool valid = inside && h >= 0 && h < height && w >= 0 && w < width;
        const i64 from = valid ? ((i64)(image[k] + h) * width + w) * pixel_units + group * units + c : 0;
        Vec16* at = to + swapped(row + k * ROWS_AT_ONCE, unit);
        cp_async16(at, a_high + from, valid);
        cp_async16(at + A_UNITS, a_low + from, valid);
      }
      const int tap = (begin_r + p * tap_step) * all_s + begin_s + q * tap_step;
#pragma unroll
      for (int k = 0; k < B_COPIES; ++k) {
        const int column = first_column + row + k * ROWS_AT_ONCE;
        const bool valid = inside && column < outputs;
        const i64 from = valid ? ((i64)(group * outputs + column) * (all_r * all_s) + tap) * units + c : 0;
        Vec16* at = to + 2 * A_UNITS + swapped(row + k * ROWS_AT_ONCE, unit);
        cp_async16(at, b_high + from, valid);
        cp_async16(at + B_UNITS, b_low + from, valid);
      }
      c += 8;
      settle();
    }
    cp_async_commit();
    ++fetched;
  };
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) fetch();

  float total[HALF_SUMS];
#pragma unroll
  for (int i = 0; i < HALF_SUMS; ++i) total[i] = 0.f;
#pragma unroll 1
  for (int stage = 0; stage < stages; ++stage) {
    cp_async_wait<STAGES - 2>();
    order_with_hardware();
    __syncthreads();  // the stage is there, and all have left the one before it, which is filled again
    const Vec16* at = ring + stage % STAGES * STAGE;
    take_stage<0>(total, at + warpgroup * 64 * 8, at + 2 * A_UNITS, fetch);
  }

  __syncthreads();  // pixels of a result that no tap reaches are zero, without a stage
  const int exponent = -(exponent_for(*a_most) + exponent_for(*b_most));
  const bool paired = outputs % 2 == 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int pixel = out_pixels[warp * 16 + half * 8 + lane / 4];
    if (pixel < 0) continue;
    float* to = y + (i64)pixel * (outputs * groups) + group * outputs;
#pragma unroll
    for (int n = 0; n < WGMMA_N / 8; ++n) {
      const int column = first_column + n * 8 + lane % 4 * 2;
      if (column >= outputs) continue;
      float f[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        f[e] = scaled(total[4 * n + 2 * half + e], exponent);
        if (BIAS && column + e < outputs) f[e] += bias[group * outputs + column + e];
      }
      if (paired) {
        const Pair both = {f[0], f[1]};
        *(Pair*)(to + column) = both;
      } else {
        to[column] = f[0];
        if (column + 1 < outputs) to[column + 1] = f[1];
      }
    }
  }
}
