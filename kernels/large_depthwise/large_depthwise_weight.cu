// Gradient of the taps of a depthwise convolution with large taps, on the tensor cores.
//
//   dweight[c,r,s] = sum over (n, h, w) of dy[n,c,h,w] * x[n, c, h - pad_h + r, w - pad_w + s];  dbias[c] = sum of dy
//
// Shapes    x: [N, C, H, W], dy: [N, C, OH, OW], contiguous (NCHW), fp16, bf16 or fp32; left: [SPLITS, C, KH, KW] fp32 sums of each block, which
//           the caller adds up.
// Replaces  the weight's part of aten::convolution_backward with as many groups as channels and taps of 9 to 63.
// Bytes     x, its halo and dy once for each TAP_ROWS taps. 64 images, 128 channels, 56x56 in bf16: 51 + 51 MB.
// Flops     2 * KH * KW a value of dy, 49 G there with 31x31; as products KH * 16 * 8 V / 16 * 2, 76 G.
// Bound     mma.sync and the shared memory that feeds it, about 0.25 ms there.
// Grid      (SPLITS of the tiles of all images, groups of TAP_ROWS rows of taps, channels). With w = 16 q + u the products
//           P[u, v] = sum over (h, q) of dy[h, 16 q + u] * x[h + r, 16 q + v] of 16 x 8 V values are made for each row of taps, and
//           dweight[r, s] is the sum of P's diagonal v - u = s + lead. A warp has RW rows of taps, whose P stay in registers.
// Numerics  as large_depthwise.cu; fp32 sums are taken over after each tile. Where a block's result is not finite, it is computed again from
//           the products that count. No atomics: two runs are bit-equal.
// Limits    stride 1, no dilation; KH and KW at most 63; a plane below 2^31 values; sm_80.

#include "toeplitz.cuh"

#define X_COLUMNS (16 * (QN - 1) + 8 * V)
#define X_PITCH ((X_COLUMNS / 8 | 1) * 8)
#define DY_PITCH ((2 * QN | 1) * 8)
#define TILE_ROWS (16 * MT)
#define X_ROWS (TILE_ROWS + TAP_ROWS - 1)
#define X_VALUES (X_ROWS * X_PITCH)
#define DY_VALUES (TILE_ROWS * DY_PITCH)
#define STAGED (PARTS * (X_VALUES + DY_VALUES))
#define P_PITCH (8 * V + 1)

extern "C" __global__ void __launch_bounds__(THREADS) large_depthwise_weight(
    const Element* __restrict__ dy, const Element* __restrict__ x, float* __restrict__ left,
    int batch, int channels, int height, int width, int out_height, int out_width, int pad_h, int pad_w, int lead, int row_tiles,
    int column_tiles) {
  overlap_launches();
  extern __shared__ __align__(16) Half memory[];
  __shared__ unsigned int most[2][2];  // by turns: bits of the largest magnitudes of x's part and of dy's
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int c = blockIdx.z, first_tap = blockIdx.y * TAP_ROWS;
  const int items = batch * row_tiles * column_tiles;
  const i64 plane_size = (i64)height * width, out_plane_size = (i64)out_height * out_width;

  float sum[RW][V][4];
#pragma unroll
  for (int i = 0; i < RW; ++i)
#pragma unroll
    for (int v = 0; v < V; ++v)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[i][v][e] = 0.f;

  // An item: rows h0 .. and columns w0 .. of dy in one image.
  struct Item {
    int n, h0, w0;
  };
  auto item_of = [&](int item) {
    Item found;
    found.w0 = item % column_tiles * (16 * QN);
    item /= column_tiles;
    found.h0 = item % row_tiles * TILE_ROWS;
    found.n = item / row_tiles;
    return found;
  };
  auto fetch = [&](int item, int slot) {
    int exponents = 0;
    if (item < items) {
      const Item at = item_of(item);
      const Element* x_plane = x + ((i64)at.n * channels + c) * plane_size;
      const Element* dy_plane = dy + ((i64)at.n * channels + c) * out_plane_size;
      int x_exponent = 0, dy_exponent = 0;
#if STORAGE == 0
      if (threadIdx.x < 2) most[slot][threadIdx.x] = 0u;
      __syncthreads();
      atomicMax(&most[slot][0], largest<X_ROWS>(x_plane, at.h0 - pad_h + first_tap, height, width));
      atomicMax(&most[slot][1], largest<TILE_ROWS>(dy_plane, at.h0, out_height, out_width));
      __syncthreads();
      x_exponent = exponent_for(most[slot][0]);
      dy_exponent = exponent_for(most[slot][1]);
      exponents = x_exponent + dy_exponent;
#endif
      Half* to = memory + slot * STAGED;
      stage<X_ROWS, X_COLUMNS, X_PITCH>(
          to, X_VALUES, x_plane, true, at.h0 - pad_h + first_tap, at.w0 - pad_w - lead, height, width, power_of_two(x_exponent));
      stage<TILE_ROWS, 16 * QN, DY_PITCH>(
          to + PARTS * X_VALUES, DY_VALUES, dy_plane, true, at.h0, at.w0, out_height, out_width, power_of_two(dy_exponent));
    }
    cp_async_commit();
    return exponents;
  };

  int slot = 0, exponents = fetch(blockIdx.x, 0);
#pragma unroll 1
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    cp_async_wait<0>();
    __syncthreads();
    const int next_exponents = fetch(item + gridDim.x, 1 - slot);
    const Item at = item_of(item);
    const Half* x_at = memory + slot * STAGED + (lane / 8 % 2 * 8 + lane % 8) * X_PITCH + lane / 16 * 8;
    const Half* dy_at = memory + slot * STAGED + PARTS * X_VALUES + (lane / 16 * 8 + lane % 8) * DY_PITCH + lane / 8 % 2 * 8;
#pragma unroll
    for (int i = 0; i < RW; ++i) {
      const int r = warp * RW + i;  // of the block's rows of taps
      if (first_tap + r >= KH) continue;
#if PARTS == 2
      float part_sum[V][4];
#pragma unroll
      for (int v = 0; v < V; ++v)
#pragma unroll
        for (int e = 0; e < 4; ++e) part_sum[v][e] = 0.f;
#else
      float(&part_sum)[V][4] = sum[i];
#endif
#pragma unroll 1
      for (int m = 0; m < MT; ++m) {
        const int row = at.h0 + 16 * m + first_tap + r - pad_h;  // of x, the first of 16
        if (at.h0 + 16 * m >= out_height || row + 15 < 0 || row >= height) continue;
#pragma unroll
        for (int q = 0; q < QN; ++q) {
          unsigned int a[PARTS][4];
#pragma unroll
          for (int part = 0; part < PARTS; ++part) ldmatrix_x4_trans(a[part], dy_at + part * DY_VALUES + 16 * m * DY_PITCH + 16 * q);
#pragma unroll
          for (int v = 0; v < V; v += 2) {
            if (2 * q + v < FIRST || 2 * q + v >= LAST) continue;  // columns outside every image
            unsigned int both[PARTS][4];
#pragma unroll
            for (int part = 0; part < PARTS; ++part)
              ldmatrix_x4_trans(both[part], x_at + part * X_VALUES + (16 * m + r) * X_PITCH + 16 * q + 8 * v);
#pragma unroll
            for (int j = 0; j < 2 && v + j < V; ++j) {
              const unsigned int b[2] = {both[0][2 * j], both[0][2 * j + 1]};
#if PARTS == 2
              const unsigned int low[2] = {both[PARTS - 1][2 * j], both[PARTS - 1][2 * j + 1]};
              MMA(part_sum[v + j], a[PARTS - 1], b);
              MMA(part_sum[v + j], a[0], low);
#endif
              MMA(part_sum[v + j], a[0], b);
            }
          }
        }
      }
#if PARTS == 2
#pragma unroll
      for (int v = 0; v < V; ++v)
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[i][v][e] += scaled(part_sum[v][e], -exponents);
#endif
    }
    exponents = next_exponents;
    slot = 1 - slot;
  }
  cp_async_wait<0>();
  __syncthreads();

  float* p = (float*)memory + warp * 16 * P_PITCH;
  float* to = left + ((i64)blockIdx.x * channels + c) * (KH * KW);
#pragma unroll
  for (int i = 0; i < RW; ++i) {
    const int r = first_tap + warp * RW + i;
#pragma unroll
    for (int v = 0; v < V; ++v)
#pragma unroll
      for (int e = 0; e < 4; ++e) p[(g + e / 2 * 8) * P_PITCH + 8 * v + 2 * t + e % 2] = sum[i][v][e];
    __syncwarp();
    for (int s = lane; s < KW; s += 32) {
      float total = 0.f;
#pragma unroll
      for (int u = 0; u < 16; ++u) total += p[u * P_PITCH + u + s + lead];
      if (r >= KH) continue;
      if (total - total != 0.f) {  // zeros outside the images have met what is not finite: the products that count, one by one
        total = 0.f;
        for (int item = blockIdx.x; item < items; item += gridDim.x) {
          const Item at = item_of(item);
          const Element* x_plane = x + ((i64)at.n * channels + c) * plane_size;
          const Element* dy_plane = dy + ((i64)at.n * channels + c) * out_plane_size;
          for (int h = at.h0; h < out_height && h < at.h0 + TILE_ROWS; ++h)
            for (int w = at.w0; w < out_width && w < at.w0 + 16 * QN; ++w) {
              const int from_h = h - pad_h + r, from_w = w - pad_w + s;
              if (from_h < 0 || from_w < 0 || from_h >= height || from_w >= width) continue;
              total = fmaf(widen_element(dy_plane[h * out_width + w]), widen_element(x_plane[from_h * width + from_w]), total);
            }
        }
      }
      to[r * KW + s] = total;
    }
    __syncwarp();
  }
}
