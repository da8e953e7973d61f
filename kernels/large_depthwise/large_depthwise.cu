// Depthwise convolution with large taps, or with FLIP the gradient of its input, on the tensor cores.
//
//   y[n,c,oh,ow] = bias[c] + sum over (r, s) of w[c,r,s] * x[n, c, oh - pad_h + r, ow - pad_w + s]
//
// Shapes    x: [N, C, H, W], y: [N, C, OH, OW], contiguous (NCHW), fp16, bf16 or fp32; w: [C, 1, KH, KW] and bias [C] in their own dtype, w
//           rounded to x's. With FLIP the taps are reversed: dx is the convolution of dy with them, padded by K - 1 - pad.
// Replaces  aten::convolution with as many groups as channels and taps of 9 to 63, and the input's part of aten::convolution_backward.
// Bytes     x and its halo once, y once: 64 images, 128 channels, 56x56 in bf16: 51 + 51 MB.
// Flops     2 * KH * KW a value of y, 49 G there with 31x31; as products KH * 16 * KS * 2, 76 G.
// Bound     mma.sync and the shared memory that feeds it: of a row of taps 16 x 56 outputs take 18 m16n8k16 and 8 ldmatrix, about 0.2 ms
//           there at 1.7 GHz on 132 SMs. fp32 takes three products in place of one.
// Grid      (tiles of an image, groups of PLANES images, channels). A warp makes 16 rows by 8 NT columns of a plane: a row of taps r is the
//           product of 16 rows of x, from row r of the tile on, with a Toeplitz matrix: columns [16, 16 KS] x [16 KS, 8] hold
//           w[r, k - n - lead], the same for all NT eights of columns. Rows of taps that meet no row of x are left out, and so are the eights of
//           columns outside [FIRST, LAST).
// Numerics  products of 16-bit values, fp32 sums in a fixed order, rounded once. fp32 in two fp16 parts (toeplitz.cuh) with three products,
//           summed up in registers after each row of taps. A result that is not finite is computed again from its own taps alone,
//           as the Toeplitz matrix's zeros meet its neighbours. No atomics: two runs are bit-equal.
// Limits    stride 1, no dilation; KH and KW at most 63; a plane below 2^31 values; sm_80.

#include "toeplitz.cuh"

#define TAP_PITCH (16 * KS + 16)           // a row of taps with its zeros
#define COLUMNS (8 * (NT - 1) + 16 * KS)   // of x a tile
#define PITCH ((COLUMNS / 8 | 1) * 8)      // an odd number of 16 bytes: the 8 rows of an ldmatrix matrix lie in different banks
#define ROWS (16 * MT + KH - 1)
#define PLANE_VALUES (ROWS * PITCH)

// One value from its own taps, in fp32.
__device__ __noinline__ float exactly(
    const Element* __restrict__ plane, const Weight* __restrict__ taps, int oh, int ow, int height, int width, int pad_h, int pad_w) {
  float total = 0.f;
#pragma unroll 1
  for (int r = 0; r < KH; ++r)
#pragma unroll 1
    for (int s = 0; s < KW; ++s) {
      const int h = oh - pad_h + r, w = ow - pad_w + s;
      if (h < 0 || w < 0 || h >= height || w >= width) continue;
      float tap = widen_tap(taps[FLIP ? KH * KW - 1 - (r * KW + s) : r * KW + s]);
#if STORAGE == 1
      tap = widen_f16((unsigned short)narrow_f16x2(tap, 0.f));
#elif STORAGE == 2
      tap = widen_bf16((unsigned short)narrow_bf16x2(tap, 0.f));
#endif
      total = fmaf(widen_element(plane[h * width + w]), tap, total);
    }
  return total;
}

extern "C" __global__ void __launch_bounds__(THREADS) large_depthwise(
    const Element* __restrict__ x, const Weight* __restrict__ weight, const Weight* __restrict__ bias, Element* __restrict__ y,
    int batch, int channels, int height, int width, int out_height, int out_width, int pad_h, int pad_w, int lead, int column_tiles) {
  overlap_launches();
  extern __shared__ __align__(16) Half memory[];
  __shared__ unsigned int most[2];  // bits of the largest magnitudes: of x's part, of the taps
  Half* planes = memory;                                   // [PLANES][PARTS][ROWS][PITCH]
  Half* taps = memory + PLANES * PARTS * PLANE_VALUES;     // [PARTS][KH][2][TAP_PITCH]: as they are, and one place on
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int c = blockIdx.z, first_image = blockIdx.y * PLANES;
  const int oh0 = blockIdx.x / column_tiles * (16 * MT), ow0 = blockIdx.x % column_tiles * (8 * NT);
  const Weight* mine = weight + (i64)c * (KH * KW);
  const i64 plane_size = (i64)height * width, out_plane_size = (i64)out_height * out_width;

  int x_exponent = 0, tap_exponent = 0;
#if STORAGE == 0
  if (threadIdx.x < 2) most[threadIdx.x] = 0u;
  __syncthreads();
  {
    unsigned int of_x = 0u, of_taps = 0u;
    for (int p = 0; p < PLANES; ++p)
      if (first_image + p < batch) {
        const unsigned int found = largest<ROWS>(x + ((i64)(first_image + p) * channels + c) * plane_size, oh0 - pad_h, height, width);
        of_x = found > of_x ? found : of_x;
      }
    for (int i = threadIdx.x; i < KH * KW; i += THREADS) {
      const unsigned int found = magnitude(widen_tap(mine[i]));
      of_taps = found > of_taps ? found : of_taps;
    }
    atomicMax(&most[0], of_x);
    atomicMax(&most[1], of_taps);
  }
  __syncthreads();
  x_exponent = exponent_for(most[0]);
  tap_exponent = exponent_for(most[1]);
#endif

#pragma unroll 1
  for (int p = 0; p < PLANES; ++p) {
    const int n = first_image + p < batch ? first_image + p : 0;
    stage<ROWS, COLUMNS, PITCH>(
        planes + p * PARTS * PLANE_VALUES, PLANE_VALUES, x + ((i64)n * channels + c) * plane_size, first_image + p < batch, oh0 - pad_h,
        ow0 - pad_w - lead, height, width, power_of_two(x_exponent));
  }
  cp_async_commit();
  for (int i = threadIdx.x; i < KH * 2 * TAP_PITCH; i += THREADS) {
    const int r = i / (2 * TAP_PITCH), s = i % TAP_PITCH + i / TAP_PITCH % 2 - 8 - lead;
    const bool valid = s >= 0 && s < KW;
    const float f = valid ? widen_tap(mine[FLIP ? KH * KW - 1 - (r * KW + s) : r * KW + s]) : 0.f;
#if STORAGE == 0
    const unsigned int parts = two_parts<false>(f * power_of_two(tap_exponent));
    taps[i] = (Half)(parts & 0xffffu);
    taps[KH * 2 * TAP_PITCH + i] = (Half)(parts >> 16);
#else
    taps[i] = (Half)(narrow_pair(f, 0.f) & 0xffffu);
#endif
  }
  cp_async_wait<0>();
  __syncthreads();

  const int plane = warp / MT, first_row = warp % MT * 16;  // of the tile
  const int n = first_image + plane;
  if (n >= batch || oh0 + first_row >= out_height) return;

  float sum[NT][4];
#pragma unroll
  for (int j = 0; j < NT; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) sum[j][e] = 0.f;

  // Rows of taps that meet rows of x: rows first .. first + 15 of x, from the image's first to its last.
  const int first = oh0 + first_row - pad_h;
  const int begin = first + 15 < 0 ? -15 - first : 0, end = height - first < KH ? height - first : KH;
  const Half* rows = planes + plane * PARTS * PLANE_VALUES + (first_row + lane % 16) * PITCH + lane / 16 * 8;
  const int of_tap = 8 + 2 * t - g;  // of value k = 2 t of column g; an odd place is read from the copy that is one place on
  const Half* tap_at = taps + (of_tap % 2 ? TAP_PITCH + of_tap - 1 : of_tap);

#pragma unroll 1
  for (int r = begin; r < end; ++r) {
    unsigned int b[PARTS][KS][2];
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
#pragma unroll
      for (int s = 0; s < KS; ++s)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          b[part][s][half] = *(const unsigned int*)(tap_at + (part * KH + r) * 2 * TAP_PITCH + 16 * s + 8 * half);
#if PARTS == 2
    float row_sum[NT][4];
#pragma unroll
    for (int j = 0; j < NT; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) row_sum[j][e] = 0.f;
#else
    float(&row_sum)[NT][4] = sum;
#endif
#pragma unroll
    for (int chunk = FIRST; chunk < LAST; ++chunk) {  // columns 8 chunk .. 8 chunk + 15 of the tile: step s of eight j = chunk - 2 s
      unsigned int a[PARTS][4];
#pragma unroll
      for (int part = 0; part < PARTS; ++part) ldmatrix_x4(a[part], rows + part * PLANE_VALUES + r * PITCH + 8 * chunk);
#pragma unroll
      for (int s = 0; s < KS; ++s)
        if (chunk - 2 * s >= 0 && chunk - 2 * s < NT) {
#if PARTS == 2
          MMA(row_sum[chunk - 2 * s], a[1], b[0][s]);
          MMA(row_sum[chunk - 2 * s], a[0], b[PARTS - 1][s]);
#endif
          MMA(row_sum[chunk - 2 * s], a[0], b[0][s]);
        }
    }
#if PARTS == 2
#pragma unroll
    for (int j = 0; j < NT; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[j][e] += row_sum[j][e];
#endif
  }

  const float start = BIAS ? widen_tap(bias[c]) : 0.f;
  const Element* plane_of_x = x + ((i64)n * channels + c) * plane_size;
  Element* to = y + ((i64)n * channels + c) * out_plane_size;
#pragma unroll
  for (int j = 0; j < NT; ++j)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int oh = oh0 + first_row + 8 * half + g, ow = ow0 + 8 * j + 2 * t;
      if (oh >= out_height) continue;
      float f[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        f[e] = sum[j][2 * half + e];
#if STORAGE == 0
        f[e] = scaled(f[e], -(x_exponent + tap_exponent));
#endif
        if (f[e] - f[e] != 0.f && ow + e < out_width) f[e] = exactly(plane_of_x, mine, oh, ow + e, height, width, pad_h, pad_w);
        f[e] += start;
      }
      Element* at = to + oh * out_width + ow;
#if PAIRED
      if (ow < out_width) {
#if STORAGE == 0
        const Element8 both = {{__float_as_uint(f[0]), __float_as_uint(f[1])}};
        *(Element8*)at = both;
#else
        *(unsigned int*)at = narrow_pair(f[0], f[1]);
#endif
      }
#else
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (ow + e < out_width) {
#if STORAGE == 0
          at[e] = f[e];
#else
          at[e] = (Half)(narrow_pair(f[e], 0.f) & 0xffffu);
#endif
        }
#endif
    }
}
