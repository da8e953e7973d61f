// Gradient of a convolution's weight in fp32 on the tensor cores with fp32's own error.
//
//   left[split, o, tap, c] = 2^-e * sum over the split's pixels m of dy[m, o] * x[pixel(m, tap), c]
//
// Shapes    dy: [N, OH, OW, O] and x: [N, H, W, C] in two fp16 parts (NHWC), both multiples of 8 a group; left: [SPLITS, O, R, S, C of a group]
//           fp32, which the caller adds up. x's pixel of (oh, ow) and tap (p, q) is (oh * stride - pad_h + p * reach, ow * stride - pad_w + q * reach).
// Replaces  the weight's part of aten::convolution_backward in fp32 with TF32 off.
// Bytes     dy once for each BN columns of (tap, c), x once for each BM channels of dy, from L2.
// Flops     2 * R * S * C a value of dy; on the tensor cores three times as many.
// Bound     mma.sync: at 600 TFLOP/s of fp16, 200 of fp32.
// Grid      (tiles of BM channels of dy, tiles of BN of (tap, c), splits of the pixels by groups). The pixels pass through a ring of STAGES
//           times 32.
// Numerics  exact_product.cuh; no atomics: two runs are bit-equal.
// Limits    below 2^31 pixels and octets of an operand; sm_80.

#define STORAGE 0
#include "exact_product.cuh"

#define A_UNITS (BM / 8)
#define B_UNITS (BN / 8)
#define A_PITCH (A_UNITS + 1)
#define B_PITCH (B_UNITS + 1)
#define A_PART (BK * A_PITCH)
#define B_PART (BK * B_PITCH)
#define STAGE (2 * (A_PART + B_PART))
#define A_AT_ONCE (THREADS / A_UNITS)
#define B_AT_ONCE (THREADS / B_UNITS)

extern "C" __global__ void __launch_bounds__(THREADS) exact_conv_backward_weight(
    const Vec16* __restrict__ dy_high, const Vec16* __restrict__ dy_low, const Vec16* __restrict__ x_high, const Vec16* __restrict__ x_low,
    const unsigned int* __restrict__ dy_most, const unsigned int* __restrict__ x_most, float* __restrict__ left, int rows, int height,
    int width, int out_height, int out_width, int dy_units, int x_units, int groups, int outputs, int inputs, int stride, int pad_h, int pad_w,
    int reach_h, int reach_w, int taps_h, int taps_w, int split_rows) {
  overlap_launches();
  extern __shared__ __align__(16) Vec16 ring[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, wm = warp % WARPS_M, wn = warp / WARPS_M;
  const int first_row = blockIdx.x * BM, first_unit = blockIdx.y * B_UNITS, group = blockIdx.z % groups, split = blockIdx.z / groups;
  const int begin = split * split_rows, end = begin + split_rows < rows ? begin + split_rows : rows;

  // The unit of each operand that this thread copies, of some rows of a stage.
  const int a_unit = threadIdx.x % A_UNITS, a_row = threadIdx.x / A_UNITS;
  const int b_unit = threadIdx.x % B_UNITS, b_row = threadIdx.x / B_UNITS;
  const bool a_inside = first_row / 8 + a_unit < dy_units;
  const int column = first_unit + b_unit, tap = column / x_units, c = column % x_units;
  const bool b_inside = tap < taps_h * taps_w;
  const int dh = tap / taps_w * reach_h - pad_h, dw = tap % taps_w * reach_w - pad_w;
  const int stages = (end - begin + BK - 1) / BK;
  int fetched = 0;
  const auto fetch = [&]() {
    if (fetched < stages) {
      Vec16* to = ring + fetched % STAGES * STAGE;
      const int at = begin + fetched * BK;
#pragma unroll
      for (int k = 0; k < BK / A_AT_ONCE; ++k) {
        const int r = a_row + k * A_AT_ONCE;
        const bool valid = a_inside && at + r < end;
        const i64 from = valid ? ((i64)(at + r) * groups + group) * dy_units + first_row / 8 + a_unit : 0;
        cp_async16(to + r * A_PITCH + a_unit, dy_high + from, valid);
        cp_async16(to + A_PART + r * A_PITCH + a_unit, dy_low + from, valid);
      }
#pragma unroll
      for (int k = 0; k < BK / B_AT_ONCE; ++k) {
        const int r = b_row + k * B_AT_ONCE;
        const unsigned int m = at + r, line = m / out_width, n = line / out_height;
        const int h = (int)(line % out_height) * stride + dh, w = (int)(m % out_width) * stride + dw;
        const bool valid = b_inside && at + r < end && h >= 0 && h < height && w >= 0 && w < width;
        const i64 from = valid ? (((i64)n * height + h) * width + w) * (groups * x_units) + group * x_units + c : 0;
        cp_async16(to + 2 * A_PART + r * B_PITCH + b_unit, x_high + from, valid);
        cp_async16(to + 2 * A_PART + B_PART + r * B_PITCH + b_unit, x_low + from, valid);
      }
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
      const Vec16* at = ring + (stage + k) % STAGES * STAGE;
      const Vec16* a_at = at + (lane / 16 * 8 + lane % 8) * A_PITCH + wm * (A_UNITS / WARPS_M) + lane / 8 % 2;
      const Vec16* b_at = at + 2 * A_PART + (lane / 8 % 2 * 8 + lane % 8) * B_PITCH + wn * (B_UNITS / WARPS_N) + lane / 16;
#pragma unroll
      for (int d = 0; d < BK / 16; ++d)
        step(
            sums, [&](int part, int m, unsigned int(&r)[4]) { ldmatrix_x4_trans(r, a_at + part * A_PART + 16 * d * A_PITCH + 2 * m); },
            [&](int part, int n, unsigned int(&r)[4]) { ldmatrix_x4_trans(r, b_at + part * B_PART + 16 * d * B_PITCH + n); });
    }
    add(total, sums);
  }

  const int exponent = -(exponent_for(*dy_most) + exponent_for(*x_most));
  const int taps = taps_h * taps_w;
#pragma unroll
  for (int m = 0; m < TILES_M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int o = first_row + wm * (BM / WARPS_M) + m * 16 + half * 8 + lane / 4;
      if (o >= outputs) continue;
      float* to = left + ((i64)split * groups * outputs + group * outputs + o) * taps * inputs;
#pragma unroll
      for (int n = 0; n < TILES_N; ++n) {
        const int value = first_unit * 8 + wn * (BN / WARPS_N) + n * 8 + lane % 4 * 2;
        const int at_tap = value / (8 * x_units), channel = value % (8 * x_units);
        if (at_tap >= taps) continue;
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (channel + e < inputs) to[at_tap * inputs + channel + e] = scaled(total.of[m][n][2 * half + e], exponent);
      }
    }
}
