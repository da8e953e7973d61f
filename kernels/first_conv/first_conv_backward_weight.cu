// First convolution (3 input channels), gradient of weight and bias: an implicit product [output channels, output pixels] x
// [output pixels, taps] on the tensor cores, summed over all output pixels of the batch.
//
//   dw[o,c,r,s] = sum over (n, oh, ow) of dy[n,oh,ow,o] * x[n, oh*stride - pad_h + r, ow*stride - pad_w + s, c]
//   db[o]       = sum over (n, oh, ow) of dy[n,oh,ow,o]: one more column, of ones
//
// Shapes    x: [N, H, W, 3] of any strides, fp16, bf16 or fp32; dy: [N, OH, OW, OUT], fp16 or bf16; dw: [OUT, 3, SIDE, SIDE],
//           contiguous or channels_last, db: [OUT], fp16, bf16 or fp32. partial: [blocks][WARPS_K][KT][V * CHUNKS][4][32] fp32.
// Replaces  the parameters' part of aten::convolution_backward with 3 input channels.
// Bytes     dy once, x once (halo rows again, from L2). [256,64,112,112] 7x7 s2 in bf16: 411 + 77 MB, 0.115 ms at 4.24 TB/s.
// Bound     Shared memory and tensor cores stand level, close to DRAM: 152 columns of taps (147 used) make 62 GF there, 0.10 ms
//           at the 600 TF/s of mma.sync on an H200. For 16 pixels and 8 taps a warp loads 4 x 128 bytes of pixels, once for
//           all 16 * V * CHUNKS channels, and for 16 pixels and 16 channels 512 bytes of dy, once for its KT * 8 taps: 144
//           loads of 128 bytes for 80 products of 16 x 8 x 16 at KT = 5, 0.13 ms there; 112 at KT = 10.
// Grid      As many blocks as run at once walk over tiles of ROWS x COLS output pixels; the next tile's pixels are on their way
//           meanwhile and its dy is asked for in L2. A warp keeps KT x V x CHUNKS products in registers over all its tiles;
//           WARPS_K warps share the taps, THREADS / 32 / WARPS_K the pixels. dy goes from memory into the products' registers:
//           which pixel is which row of a product is free, so a lane loads V channel pairs of four pixels and pairs the pixels.
// Numerics  fp32 sums a warp and a block, fp64 over blocks, in fixed orders. No atomics: two runs are bit-equal.
// Limits    OUT a multiple of 8; 2^31 elements of x and dy an image.

#include "first_conv.cuh"
#include "overlap.cuh"
#include "mma.cuh"
#include "prefetch.cuh"

#define WARPS_M (THREADS / 32 / WARPS_K)
#define OT (V * CHUNKS)                // products of 16 channels; a lane's channels of a chunk are 2 * V neighbours
#define ROW_TILES (COLS / 16)
#define SUMS (OT * 4)                  // a lane's, of 8 taps
#define COLUMNS (WARPS_K * KT * SUMS * 32)
#define SHARED_SUMS (WARPS_M * WARPS_K * SUMS * 32 * 2)  // in values of 2 bytes
#define SHARED (2 * BUFFER > SHARED_SUMS ? 2 * BUFFER : SHARED_SUMS)

#if V == 4
typedef uint4 Words;
#elif V == 2
typedef uint2 Words;
#else
typedef unsigned int Words;
#endif

__device__ __forceinline__ int offset_of(int k) {  // of tap k, in the order (row, column, channel), from the window's begin
  return k < TAPS ? k / (SIDE * 3) * PITCH + k / 3 % SIDE * PIX + k % 3 : 0;
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) first_conv_backward_weight(
    const X* __restrict__ x, const unsigned short* __restrict__ dy, float* __restrict__ partial, i64 tiles, i64 x_image,
    i64 x_row, i64 x_column, i64 x_channel, int height, int width, int out_height, int out_width, int pad_height, int strips,
    int bands) {
  overlap_launches();
  __shared__ __align__(16) unsigned short shared[SHARED];
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int warp_k = threadIdx.x / 32 % WARPS_K, warp_m = threadIdx.x / 32 / WARPS_K;
  const Image image = {x_image, x_row, x_column, x_channel, height, width};

  float sum[KT][OT][4];
  int offset[KT];
#pragma unroll
  for (int j = 0; j < KT; ++j) {
    offset[j] = 2 * (offset_of((warp_k * KT + j) * 8 + g) + 2 * t * STEP);
#pragma unroll
    for (int o = 0; o < OT; ++o)
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[j][o][i] = 0.f;
  }

  // A lane's part of dy for 16 pixels of a row: pixels 2t, 2t + 1, 2t + 8, 2t + 9 and 2 * V channels of each chunk.
  union Part {
    Words words;
    unsigned int w[V];
  };
  Part ahead[4][CHUNKS];
  auto fetch = [&](const Tile& at, int m) {
    const int oh = at.row + m / ROW_TILES, ow = at.column + m % ROW_TILES * 16 + 2 * t;
    const unsigned short* from = dy + (((i64)at.n * out_height + oh) * out_width + ow) * OUT + g * 2 * V;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int p = i % 2 + i / 2 * 8;
#pragma unroll
      for (int q = 0; q < CHUNKS; ++q) {
        const bool inside = m < ROWS * ROW_TILES && oh < out_height && ow + p < out_width && q * 16 * V + g * 2 * V < OUT;
        if (inside) {
          ahead[i][q].words = __ldg((const Words*)(from + p * OUT + q * 16 * V));
        } else {
#pragma unroll
          for (int v = 0; v < V; ++v) ahead[i][q].w[v] = 0u;
        }
      }
    }
  };

  i64 index = blockIdx.x;
  unsigned short* held = shared;
  unsigned short* next = shared + BUFFER;
  Tile tile = tile_of(index, strips, bands);
  if (index < tiles) {
    stage(held, x, image, tile, pad_height);
    fetch(tile, warp_m);
  }
  for (; index < tiles; index += gridDim.x) {
    staged();
    __syncthreads();  // the tile is there, and nobody reads the one before any more
    const Tile now = tile;
    const bool more = index + gridDim.x < tiles;
    if (more) {
      tile = tile_of(index + gridDim.x, strips, bands);
      stage(next, x, image, tile, pad_height);
      const int rows = out_height - tile.row < ROWS ? out_height - tile.row : ROWS;
      const int columns = out_width - tile.column < COLS ? out_width - tile.column : COLS;
      for (int r = 0; r < rows; ++r) {
        const unsigned short* row = dy + (((i64)tile.n * out_height + tile.row + r) * out_width + tile.column) * OUT;
        for (int i = threadIdx.x * 64; i < columns * OUT; i += THREADS * 64) prefetch_l2(row + i);
      }
    }
#pragma unroll 1
    for (int m = warp_m; m < ROWS * ROW_TILES; m += WARPS_M) {
      Part part[4][CHUNKS];
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int q = 0; q < CHUNKS; ++q) part[i][q] = ahead[i][q];
      if (m + WARPS_M < ROWS * ROW_TILES) fetch(now, m + WARPS_M);
      else if (more) fetch(tile, warp_m);
      const int r = m / ROW_TILES, c = m % ROW_TILES * 16;
      if (now.row + r >= out_height || now.column + c >= out_width) continue;
      const char* window = (const char*)(held + r * STRIDE * PITCH + LEFT - PAD * PIX + c * STEP);
#if PARTIAL  // beyond the row dy is zero, but what lies under it need not be finite
      const int left = out_width - now.column - c - 2 * t;
      const unsigned int inside[2] = {left > 1 ? 0xffffffffu : left > 0 ? 0x0000ffffu : 0u,
                                      left > 9 ? 0xffffffffu : left > 8 ? 0x0000ffffu : 0u};
#endif
      unsigned int b[KT][2];
#pragma unroll
      for (int j = 0; j < KT; ++j) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const unsigned short* at = (const unsigned short*)(window + offset[j]) + h * 8 * STEP;
          b[j][h] = at[0] | (unsigned int)at[STEP] << 16;
#if BIAS
          if ((warp_k * KT + j) * 8 + g == TAPS) b[j][h] = operands(1.f, 1.f);
#endif
#if PARTIAL
          b[j][h] &= inside[h];
#endif
        }
      }
#pragma unroll
      for (int q = 0; q < CHUNKS; ++q)
#pragma unroll
        for (int v = 0; v < V; ++v) {
          unsigned int a[4];  // rows g are the first, rows g + 8 the second channels of the pairs
          a[0] = __byte_perm(part[0][q].w[v], part[1][q].w[v], 0x5410);
          a[1] = __byte_perm(part[0][q].w[v], part[1][q].w[v], 0x7632);
          a[2] = __byte_perm(part[2][q].w[v], part[3][q].w[v], 0x5410);
          a[3] = __byte_perm(part[2][q].w[v], part[3][q].w[v], 0x7632);
#pragma unroll
          for (int j = 0; j < KT; ++j)
#if STORAGE == 1
            mma_f16(sum[j][q * V + v], a, b[j]);
#else
            mma_bf16(sum[j][q * V + v], a, b[j]);
#endif
        }
    }
    unsigned short* swap = held;
    held = next;
    next = swap;
  }

  // Over the warps that share the pixels, 8 taps a warp at a time.
  float* sums = (float*)shared;
  float* to = partial + (i64)blockIdx.x * COLUMNS;
#pragma unroll
  for (int j = 0; j < KT; ++j) {
    __syncthreads();
#pragma unroll
    for (int o = 0; o < OT; ++o)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        sums[((warp_m * WARPS_K + warp_k) * SUMS + o * 4 + i) * 32 + lane] = sum[j][o][i];
    __syncthreads();
    for (int i = threadIdx.x; i < WARPS_K * SUMS * 32; i += THREADS) {
      float total = 0.f;
#pragma unroll
      for (int w = 0; w < WARPS_M; ++w) total += sums[w * WARPS_K * SUMS * 32 + i];
      to[i / (SUMS * 32) * (KT * SUMS * 32) + j * (SUMS * 32) + i % (SUMS * 32)] = total;
    }
  }
}

__device__ __forceinline__ Weight narrowed(float v) {
#if WEIGHT_STORAGE == 0
  return v;
#elif WEIGHT_STORAGE == 1
  return (Weight)narrow_f16x2(v, 0.f);
#else
  return (Weight)narrow_bf16x2(v, 0.f);
#endif
}

// dweight and dbias: sums over `blocks` of partial. A block: 32 columns by THREADS / 32 groups of partials, which are added in a
// fixed order, in fp64.
extern "C" __global__ void __launch_bounds__(THREADS) first_conv_backward_weight_sum(
    const float* __restrict__ partial, Weight* __restrict__ dweight, Weight* __restrict__ dbias, int blocks,
    int weight_channels_last) {
  overlap_launches();
  __shared__ double shared[THREADS];
  const int lane = threadIdx.x % 32, group = threadIdx.x / 32;
  double total = 0.0;
#pragma unroll 8
  for (int b = group; b < blocks; b += THREADS / 32) total += partial[(i64)b * COLUMNS + blockIdx.x * 32 + lane];
  shared[threadIdx.x] = total;
  __syncthreads();
  if (group > 0) return;
  for (int i = 1; i < THREADS / 32; ++i) total += shared[i * 32 + lane];
  // Column [warp_k][j][o][i][lane] of partial: tap 8 * (warp_k * KT + j) + 2t + i % 2, channel as the lanes of dy have them.
  const int i = blockIdx.x % 4, o = blockIdx.x / 4 % OT;
  const int k = blockIdx.x / SUMS * 8 + lane % 4 * 2 + i % 2;
  const int channel = o / V * 16 * V + lane / 4 * 2 * V + o % V * 2 + i / 2;
  if (channel >= OUT) return;
  if (k < TAPS) {
    const int at = weight_channels_last ? k : k % 3 * SIDE * SIDE + k / 3;
    dweight[(i64)channel * TAPS + at] = narrowed((float)total);
  } else if (BIAS && k == TAPS) {
    dbias[channel] = narrowed((float)total);
  }
}
