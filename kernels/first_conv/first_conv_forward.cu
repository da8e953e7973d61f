// First convolution (3 input channels), forward: an implicit product [output pixels, taps] x [taps, output channels] on the
// tensor cores.
//
//   y[n,oh,ow,o] = bias[o] + sum over r, s < SIDE and c < 3 of x[n, oh*stride - pad_h + r, ow*stride - pad_w + s, c] * w[o,c,r,s]
//
// Shapes    x: [N, H, W, 3] of any strides, fp16, bf16 or fp32 (rounded when loaded, as autocast's cast would); w: [OUT, 3, SIDE,
//           SIDE], contiguous or channels_last, bias: [OUT] or none, fp16, bf16 or fp32; y: [N, OH, OW, OUT], fp16 or bf16.
// Replaces  aten::convolution with 3 input channels, and under autocast the casts of its input and parameters.
// Bytes     x once (halo rows again, from L2), y once. [256,3,224,224] 7x7 s2 to 64 channels in bf16: 77 + 411 MB, 0.115 ms at
//           4.24 TB/s.
// Bound     DRAM; the tensor cores are close: 80 pairs of taps (77 used, of 73.5 needed) make 66 GF there, 0.11 ms at the
//           600 TF/s that mma.sync reaches on an H200. Shared memory: a fragment of pixels is four 128-byte loads and serves
//           NT products of 2048 multiply-adds; at NT = 4 that is 0.07 ms there. Weights stay in registers.
// Grid      As many blocks as run at once walk over tiles of ROWS x COLS output pixels; the next tile's pixels are on their way
//           while this one's are multiplied. A warp takes 16 pixels by 8 * NT channels at a time, WARPS_N warps side by side.
//           Columns of a product are dealt to channels so that a lane holds 2 * min(NT, 4) neighbouring ones: stores of 16
//           (8) bytes a lane, of 64 (32) a pixel, with nothing exchanged.
// Moments   with MOMENTS also what a batch norm behind it needs (include/moments.cuh): [grid * WARPS_M, 3, OUT] fp32, a part a warp,
//           of the values that its lanes store, in 5 * NT registers.
// Numerics  fp32 sums and bias, rounded once. Each output's sum is in one order: two runs are bit-equal.
// Limits    OUT a multiple of 8; 2^31 elements of x and y an image.

#include "first_conv.cuh"
#include "overlap.cuh"
#include "mma.cuh"
#if MOMENTS
#include "moments.cuh"
#endif

#define PAIRS ((SIDE * PIX + LEAD + 1) / 2)  // of neighbouring values in a row of taps
#define ALL_PAIRS (SIDE * PAIRS)
#define STEPS ((ALL_PAIRS + 7) / 8)  // products of 16 values each
#define GROUP (NT < 4 ? NT : 4)      // products whose channels are neighbours
#define CHANNELS (WARPS_N * NT * 8)
#define WARPS_M (THREADS / 32 / WARPS_N)
#define TAP_PITCH (STEPS * 16 + 8)
#define SHARED (2 * BUFFER > CHANNELS * TAP_PITCH ? 2 * BUFFER : CHANNELS * TAP_PITCH)

// Which values of a pair are taps; the others are neighbours of the window, or nothing.
__device__ __forceinline__ unsigned int tap_bits(int pair) {
  if (pair >= ALL_PAIRS) return 0u;
  unsigned int bits = 0xffffffffu;
  if (LEAD && pair % PAIRS == 0) bits &= 0xffff0000u;
  if ((SIDE * PIX + LEAD) % 2 && pair % PAIRS == PAIRS - 1) bits &= 0x0000ffffu;
  return bits;
}

// The pair `first` + t of the window at `window`. `first` is known when compiled, t < 4 is not.
__device__ __forceinline__ unsigned int window_pair(const char* window, int first, int t) {
  const int row = first / PAIRS, column = first % PAIRS;
  if (first >= ALL_PAIRS) return 0u;
  const char* at = window + (row * PITCH * 2 + column * 4) + t * 4;
  if (column + 3 >= PAIRS && row + 1 < SIDE) at += t >= PAIRS - column ? PITCH * 2 - PAIRS * 4 : 0;
  unsigned int bits = 0xffffffffu;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (tap_bits(first + i) != 0xffffffffu) bits = t == i ? tap_bits(first + i) : bits;
  return *(const unsigned int*)at & bits;
}

// Channel of column `n` of a warp's product j; a lane's columns are 2t and 2t + 1.
__device__ __forceinline__ int channel_of(int warp_n, int j, int n) {
  return (warp_n * NT + j / GROUP * GROUP) * 8 + n / 2 * 2 * GROUP + j % GROUP * 2 + n % 2;
}

#if MOMENTS
// Of a lane's 2 * NT channels, in the order of its sums: sums of what is stored, less `shift`, and of its square.
struct Sums {
  float sum[NT][2], square[NT][2];
  unsigned int shift[NT];  // the warp's first pixel, as it is stored
};

__device__ __forceinline__ float stored(unsigned int pair, int half) {
  return widen<STORAGE>((unsigned short)(half ? pair >> 16 : pair & 0xffffu));
}

__device__ __forceinline__ void add(Sums& of, int j, unsigned int pair) {
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const float d = stored(pair, e) - stored(of.shift[j], e);
    of.sum[j][e] += d;
    of.square[j][e] += d * d;
  }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) first_conv_forward(
    const X* __restrict__ x, const Weight* __restrict__ weight, const Weight* __restrict__ bias,
    unsigned short* __restrict__ y, i64 tiles, i64 x_image, i64 x_row, i64 x_column, i64 x_channel, int height, int width,
    int out_height, int out_width, int pad_height, int strips, int bands, int weight_channels_last
#if MOMENTS
    , float* __restrict__ moments
#endif
) {
  overlap_launches();
  __shared__ __align__(16) unsigned short shared[SHARED];
  __shared__ __align__(16) float of_bias[CHANNELS];
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int warp_n = threadIdx.x / 32 % WARPS_N, warp_m = threadIdx.x / 32 / WARPS_N;
  const Image image = {x_image, x_row, x_column, x_channel, height, width};

  // Taps: from memory, in its order, to rows of a channel in the order of the windows, to registers.
  for (int i = threadIdx.x; i < CHANNELS * TAP_PITCH / 2; i += THREADS) ((unsigned int*)shared)[i] = 0u;
  for (int i = threadIdx.x; i < CHANNELS; i += THREADS)
    of_bias[i] = bias && i < OUT ? widen<WEIGHT_STORAGE>(bias[i]) : 0.f;
  __syncthreads();
#pragma unroll 8
  for (int i = threadIdx.x; i < OUT * TAPS; i += THREADS) {
    const int o = i / TAPS, k = i % TAPS;
    const int c = weight_channels_last ? k % 3 : k / (SIDE * SIDE), tap = weight_channels_last ? k / 3 : k % (SIDE * SIDE);
    shared[o * TAP_PITCH + tap / SIDE * PAIRS * 2 + LEAD + tap % SIDE * PIX + c] = operand(widen<WEIGHT_STORAGE>(weight[i]));
  }
  __syncthreads();
  unsigned int taps[STEPS][NT][2];
#pragma unroll
  for (int s = 0; s < STEPS; ++s)
#pragma unroll
    for (int j = 0; j < NT; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        taps[s][j][h] = *(const unsigned int*)(shared + channel_of(warp_n, j, g) * TAP_PITCH + s * 16 + h * 8 + t * 2);
  __syncthreads();

#if MOMENTS
  Sums of;
  int count = 0;  // pixels of this warp
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    of.sum[j][0] = of.sum[j][1] = of.square[j][0] = of.square[j][1] = 0.f;
    of.shift[j] = 0u;
  }
#endif

  i64 index = blockIdx.x;
  unsigned short* held = shared;
  unsigned short* next = shared + BUFFER;
  Tile tile = tile_of(index, strips, bands);
  if (index < tiles) stage(held, x, image, tile, pad_height);
  for (; index < tiles; index += gridDim.x) {
    staged();
    __syncthreads();  // the tile is there, and nobody reads the one before any more
    const Tile now = tile;
    if (index + gridDim.x < tiles) {
      tile = tile_of(index + gridDim.x, strips, bands);
      stage(next, x, image, tile, pad_height);
    }
    unsigned short* image_y = y + (i64)now.n * out_height * out_width * OUT;
#pragma unroll 1
    for (int m = warp_m; m < ROWS * (COLS / 16); m += WARPS_M) {
      const int r = m / (COLS / 16), c = m % (COLS / 16) * 16;
      const int oh = now.row + r, ow = now.column + c;
      if (oh >= out_height || ow >= out_width) continue;
      const char* window = (const char*)(held + r * STRIDE * PITCH + LEFT - PAD * PIX - LEAD + (c + g) * STEP);
      float sum[NT][4];
#pragma unroll
      for (int j = 0; j < NT; j += GROUP) {
        const float* own = of_bias + channel_of(warp_n, j, 2 * t);
#pragma unroll
        for (int i = 0; i < GROUP; ++i) {
          sum[j + i][0] = sum[j + i][2] = own[2 * i];
          sum[j + i][1] = sum[j + i][3] = own[2 * i + 1];
        }
      }
#pragma unroll
      for (int s = 0; s < STEPS; ++s) {
        unsigned int a[4];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          a[2 * h] = window_pair(window, s * 8 + h * 4, t);
          a[2 * h + 1] = window_pair(window + 8 * STEP * 2, s * 8 + h * 4, t);
        }
#pragma unroll
        for (int j = 0; j < NT; ++j)
#if STORAGE == 1
          mma_f16(sum[j], a, taps[s][j]);
#else
          mma_bf16(sum[j], a, taps[s][j]);
#endif
      }
#if MOMENTS
#pragma unroll
      for (int j = 0; j < NT; ++j) {
        const unsigned int pairs[2] = {operands(sum[j][0], sum[j][1]), operands(sum[j][2], sum[j][3])};
        if (count == 0) {
          const float low = stored(pairs[0], 0), high = stored(pairs[0], 1);
          of.shift[j] = __shfl_sync(0xffffffffu, low - low == 0.f && high - high == 0.f ? pairs[0] : 0u, t);
        }
#pragma unroll
        for (int h = 0; h < 2; ++h)
          if (ow + g + 8 * h < out_width) add(of, j, pairs[h]);
      }
      count += out_width - ow < 16 ? out_width - ow : 16;
#endif
      unsigned short* to = image_y + ((i64)oh * out_width + ow) * OUT;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (ow + g + 8 * h >= out_width) continue;
#pragma unroll
        for (int j = 0; j < NT; j += GROUP) {
          const int channel = channel_of(warp_n, j, 2 * t);
          if (channel >= OUT) continue;
          unsigned int w[GROUP];
#pragma unroll
          for (int i = 0; i < GROUP; ++i) w[i] = operands(sum[j + i][2 * h], sum[j + i][2 * h + 1]);
          unsigned short* at = to + (g + 8 * h) * OUT + channel;
#if NT >= 4
          *(uint4*)at = make_uint4(w[0], w[1], w[2], w[3]);
#else
          *(uint2*)at = make_uint2(w[0], w[1]);
#endif
        }
      }
    }
    unsigned short* swap = held;
    held = next;
    next = swap;
  }
#if MOMENTS
#pragma unroll
  for (int j = 0; j < NT; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes <<= 1) {
        of.sum[j][e] += __shfl_xor_sync(0xffffffffu, of.sum[j][e], lanes);
        of.square[j][e] += __shfl_xor_sync(0xffffffffu, of.square[j][e], lanes);
      }
      const int channel = channel_of(warp_n, j, 2 * t + e);
      if (g == 0 && channel < OUT)
        leave_moments(
            moments, blockIdx.x * WARPS_M + warp_m, OUT, channel, count, stored(of.shift[j], e), of.sum[j][e], of.square[j][e]);
    }
#endif
}
