// Gradient of a convolution's weight in fp32 on Hopper's tensor cores with fp32's own error.
//
// What exact_conv_backward_weight.cu makes, from the same operands and with the same arguments, by the products of warpgroups
// (exact_hopper.cuh).
//
// Shapes    as exact_conv_backward_weight.cu.
// Replaces  the weight's part of aten::convolution_backward in fp32 with TF32 off.
// Bytes     dy once for each WGMMA_N columns of (tap, c), x once for each 64 GROUPS channels of dy, from L2.
// Flops     2 * R * S * C a value of dy; on the tensor cores three times as many.
// Bound     tensor cores: at 800 TFLOP/s of fp16, 270 of fp32.
// Grid      (tiles of 64 GROUPS channels of dy, tiles of WGMMA_N of (tap, c), splits of the pixels by groups). The pixels pass through a ring
//           of STAGES times 64; a line is 64 channels of a pixel, so that both operands lie along.
// Numerics  exact_hopper.cuh; no atomics: two runs are bit-equal.
// Limits    below 2^31 pixels and octets of an operand; sm_90a.

#include "exact_hopper.cuh"

#define A_ACROSS (ROWS / 8)     // units of a pixel that a tile has
#define B_ACROSS (WGMMA_N / 8)
#define A_AT_ONCE (THREADS / A_ACROSS)
#define B_AT_ONCE (THREADS / B_ACROSS)

// The place of a unit of a pixel: blocks of 64 channels, a line a pixel.
__device__ __forceinline__ int place_of(int pixel, int unit) { return unit / 8 * (DEPTH * 8) + swapped(pixel, unit % 8); }

extern "C" __global__ void __launch_bounds__(THREADS, 1) exact_conv_hopper_weight(
    const Vec16* __restrict__ dy_high, const Vec16* __restrict__ dy_low, const Vec16* __restrict__ x_high, const Vec16* __restrict__ x_low,
    const unsigned int* __restrict__ dy_most, const unsigned int* __restrict__ x_most, float* __restrict__ left, int rows, int height,
    int width, int out_height, int out_width, int dy_units, int x_units, int groups, int outputs, int inputs, int stride, int pad_h, int pad_w,
    int reach_h, int reach_w, int taps_h, int taps_w, int split_rows) {
  overlap_launches();
  extern __shared__ __align__(1024) Vec16 ring[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warpgroup = threadIdx.x / 128;
  const int first_row = blockIdx.x * ROWS, first_unit = blockIdx.y * B_ACROSS, group = blockIdx.z % groups, split = blockIdx.z / groups;
  const int begin = split * split_rows, end = begin + split_rows < rows ? begin + split_rows : rows;

  // The unit of each operand that this thread copies, of some pixels of a stage.
  const int a_unit = threadIdx.x % A_ACROSS, a_row = threadIdx.x / A_ACROSS;
  const int b_unit = threadIdx.x % B_ACROSS, b_row = threadIdx.x / B_ACROSS;
  const bool a_inside = first_row / 8 + a_unit < dy_units;
  const int column = first_unit + b_unit, tap = column / x_units, c = column % x_units;
  const bool b_inside = tap < taps_h * taps_w;
  const int dh = tap / taps_w * reach_h - pad_h, dw = tap % taps_w * reach_w - pad_w;
  const int stages = (end - begin + DEPTH - 1) / DEPTH;

  // Of the pixels of a stage: image times height, row and column where tap (0, 0) without padding lies; by turns, each found a stage ahead by
  // one thread. What the last stage has beyond the end lies outside.
  int(*places)[3][DEPTH] = (int(*)[3][DEPTH])(ring + STAGES * STAGE);
  const auto find = [&](int stage) {
    if (threadIdx.x < DEPTH) {
      const unsigned int m = begin + stage * DEPTH + threadIdx.x, line = m / out_width, n = line / out_height;
      int(*to)[DEPTH] = places[stage % 2];
      to[0][threadIdx.x] = (int)n * height;
      to[1][threadIdx.x] = m < (unsigned int)end ? (int)(line % out_height) * stride : -0x40000000;
      to[2][threadIdx.x] = (int)(m % out_width) * stride;
    }
  };
  int fetched = 0;
  const auto fetch = [&]() {
    find(fetched + 1);  // whose place nobody has read since the last barrier
    if (fetched < stages) {
      const int(*from_places)[DEPTH] = places[fetched % 2];
      Vec16* to = ring + fetched % STAGES * STAGE;
      const int at = begin + fetched * DEPTH;
#pragma unroll
      for (int k = 0; k < DEPTH / A_AT_ONCE; ++k) {
        const int r = a_row + k * A_AT_ONCE;
        const bool valid = a_inside && at + r < end;
        const i64 from = valid ? ((i64)(at + r) * groups + group) * dy_units + first_row / 8 + a_unit : 0;
        cp_async16(to + place_of(r, a_unit), dy_high + from, valid);
        cp_async16(to + A_UNITS + place_of(r, a_unit), dy_low + from, valid);
      }
#pragma unroll
      for (int k = 0; k < DEPTH / B_AT_ONCE; ++k) {
        const int r = b_row + k * B_AT_ONCE;
        const int h = from_places[1][r] + dh, w = from_places[2][r] + dw;
        const bool valid = b_inside && h >= 0 && h < height && w >= 0 && w < width;
        const i64 from = valid ? ((i64)(from_places[0][r] + h) * width + w) * (groups * x_units) + group * x_units + c : 0;
        cp_async16(to + 2 * A_UNITS + place_of(r, b_unit), x_high + from, valid);
        cp_async16(to + 2 * A_UNITS + B_UNITS + place_of(r, b_unit), x_low + from, valid);
      }
    }
    cp_async_commit();
    ++fetched;
  };
  find(0);
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) {
    __syncthreads();
    fetch();
  }

  float total[HALF_SUMS];
#pragma unroll
  for (int i = 0; i < HALF_SUMS; ++i) total[i] = 0.f;
#pragma unroll 1
  for (int stage = 0; stage < stages; ++stage) {
    cp_async_wait<STAGES - 2>();
    order_with_hardware();
    __syncthreads();  // the stage is there, and all have left the one before it, which is filled again
    const Vec16* at = ring + stage % STAGES * STAGE;
    take_stage<1>(total, at + warpgroup * DEPTH * 8, at + 2 * A_UNITS, fetch);
  }

  const int exponent = -(exponent_for(*dy_most) + exponent_for(*x_most));
  const int taps = taps_h * taps_w;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int o = first_row + warp * 16 + half * 8 + lane / 4;
    if (o >= outputs) continue;
    float* to = left + ((i64)split * groups * outputs + group * outputs + o) * taps * inputs;
#pragma unroll
    for (int n = 0; n < WGMMA_N / 8; ++n) {
      const int value = first_unit * 8 + n * 8 + lane % 4 * 2;
      const int at_tap = value / (8 * x_units), channel = value % (8 * x_units);
      if (at_tap >= taps) continue;
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (channel + e < inputs) to[at_tap * inputs + channel + e] = scaled(total[4 * n + 2 * half + e], exponent);
    }
  }
}
