// Convolution of fp32 tensors on the tensor cores with fp32's own error, or the gradient of its input.
//
//   y[m,o] = bias[o] + 2^-e * sum over (tap, c) of a[pixel(m, tap), c] * b[o, tap, c]
//
// Shapes    a: [N, H, W, C] in two fp16 parts, C a multiple of 8 a group; b: [O, R, S, C of a group] in two fp16 parts; y: [N, OH, OW, O] fp32
//           (NHWC). Of y, the rows i and columns j with oh = first_h + i * out_step, ow = first_w + j * out_step are made, rows_h by rows_w of
//           them: all, or those of a strided convolution's input that meet the same taps. a's pixel of tap (p, q) is
//           (i * in_step + origin_h + p * reach_h, j * in_step + origin_w + q * reach_w), b's tap (begin_r + p * tap_step, begin_s + q * tap_step).
// Replaces  aten::convolution in fp32 with TF32 off, and the input's part of aten::convolution_backward.
// Bytes     a once in 4 bytes a value, y once in 4; b from L2.
// Flops     2 * R * S * C a value of y; on the tensor cores three times as many.
// Bound     mma.sync: at 600 TFLOP/s of fp16, 200 of fp32.
// Grid      (tiles of BM pixels, tiles of BN channels, groups). The depth, all taps by all octets of channels, passes through a ring of STAGES
//           times 32 values.
// Numerics  exact_product.cuh. |y - exact| <= (3 * 2^-22 + rounding of the sums) * sum |a b|. Infinities and NaN of a become infinities and NaN
//           of y; where two of them meet, or one meets a weight below 2^-39 of the largest, NaN may stand for an infinity.
// Limits    below 2^31 pixels and octets of an operand; sm_80.

#define STORAGE 0
#include "exact_product.cuh"

#define PITCH (UNITS + 1)  // odd: the 8 rows of an ldmatrix matrix lie in 32 different banks
#define A_PART (BM * PITCH)
#define B_PART (BN * PITCH)
#define STAGE (2 * (A_PART + B_PART))
#define ROWS_AT_ONCE (THREADS / UNITS)
#define A_COPIES (BM / ROWS_AT_ONCE)
#define B_COPIES (BN / ROWS_AT_ONCE)

struct __align__(8) Pair { float first, second; };

extern "C" __global__ void __launch_bounds__(THREADS) exact_conv(
    const Vec16* __restrict__ a_high, const Vec16* __restrict__ a_low, const Vec16* __restrict__ b_high, const Vec16* __restrict__ b_low,
    const unsigned int* __restrict__ a_most, const unsigned int* __restrict__ b_most, const float* __restrict__ bias, float* __restrict__ y,
    int rows, int rows_h, int rows_w, int height, int width, int out_height, int out_width, int units, int pixel_units, int outputs,
    int first_h, int first_w, int out_step, int in_step, int origin_h, int origin_w, int reach_h, int reach_w, int taps_h, int taps_w,
    int begin_r, int begin_s, int tap_step, int all_r, int all_s) {
  overlap_launches();
  extern __shared__ __align__(16) Vec16 ring[];
  __shared__ int out_pixels[BM];  // -1 behind the last
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, wm = warp % WARPS_M, wn = warp / WARPS_M;
  const int begin = blockIdx.x * BM, first_column = blockIdx.y * BN, group = blockIdx.z, groups = gridDim.z;

  for (int r = threadIdx.x; r < BM; r += THREADS) {
    const unsigned int m = begin + r, line = m / rows_w, j = m % rows_w, n = line / rows_h, i = line % rows_h;
    const int oh = first_h + i * out_step, ow = first_w + j * out_step;
    out_pixels[r] = m < (unsigned int)rows ? (int)((n * out_height + oh) * out_width + ow) : -1;
  }

  // What this thread copies: one unit of the depth of some rows. Where the tap (0, 0) of a row lies, and its image.
  const int unit = threadIdx.x % UNITS, row = threadIdx.x / UNITS;
  int at_h[A_COPIES], at_w[A_COPIES], image[A_COPIES];
#pragma unroll
  for (int k = 0; k < A_COPIES; ++k) {
    const unsigned int m = begin + row + k * ROWS_AT_ONCE, line = m / rows_w, n = line / rows_h;
    at_h[k] = m < (unsigned int)rows ? (int)(line % rows_h) * in_step + origin_h : -0x40000000;
    at_w[k] = (int)(m % rows_w) * in_step + origin_w;
    image[k] = (int)n * height;
  }
  const int stages = (taps_h * taps_w * units + UNITS - 1) / UNITS;
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
        Vec16* at = to + (row + k * ROWS_AT_ONCE) * PITCH + unit;
        cp_async16(at, a_high + from, valid);
        cp_async16(at + A_PART, a_low + from, valid);
      }
      const int tap = (begin_r + p * tap_step) * all_s + begin_s + q * tap_step;
#pragma unroll
      for (int k = 0; k < B_COPIES; ++k) {
        const int column = first_column + row + k * ROWS_AT_ONCE;
        const bool valid = inside && column < outputs;
        const i64 from = valid ? ((i64)(group * outputs + column) * (all_r * all_s) + tap) * units + c : 0;
        Vec16* at = to + 2 * A_PART + (row + k * ROWS_AT_ONCE) * PITCH + unit;
        cp_async16(at, b_high + from, valid);
        cp_async16(at + B_PART, b_low + from, valid);
      }
      c += UNITS;
      settle();
    }
    cp_async_commit();
    ++fetched;
  };
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) fetch();

  Sums total;
  clear(total);
  for (int stage = 0; stage < stages; stage += PROMOTE) {
    Sums sums;
    clear(sums);
#pragma unroll
    for (int k = 0; k < PROMOTE; ++k) {
      if (k > 0 && stage + k >= stages) break;
      cp_async_wait<STAGES - 2>();
      __syncthreads();
      fetch();
      const Vec16* a_at = ring + (stage + k) % STAGES * STAGE + (wm * (BM / WARPS_M) + lane % 16) * PITCH + lane / 16;
      const Vec16* b_at =
          ring + (stage + k) % STAGES * STAGE + 2 * A_PART + (wn * (BN / WARPS_N) + lane / 16 * 8 + lane % 8) * PITCH + lane / 8 % 2;
#pragma unroll
      for (int d = 0; d < BK / 16; ++d)
        step(
            sums, [&](int part, int m, unsigned int(&r)[4]) { ldmatrix_x4(r, a_at + part * A_PART + m * 16 * PITCH + 2 * d); },
            [&](int part, int n, unsigned int(&r)[4]) { ldmatrix_x4(r, b_at + part * B_PART + n * 8 * PITCH + 2 * d); });
    }
    add(total, sums);
  }

  __syncthreads();  // pixels of a result that no tap reaches are zero, without a stage
  const int exponent = -(exponent_for(*a_most) + exponent_for(*b_most));
  const bool paired = outputs % 2 == 0;
#pragma unroll
  for (int m = 0; m < TILES_M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int pixel = out_pixels[wm * (BM / WARPS_M) + m * 16 + half * 8 + lane / 4];
      if (pixel < 0) continue;
      float* to = y + (i64)pixel * (outputs * groups) + group * outputs;
#pragma unroll
      for (int n = 0; n < TILES_N; ++n) {
        const int column = first_column + wn * (BN / WARPS_N) + n * 8 + lane % 4 * 2;
        if (column >= outputs) continue;
        float f[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          f[e] = scaled(total.of[m][n][2 * half + e], exponent);
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
