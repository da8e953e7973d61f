// Planes of an NHWC tensor, or an NHWC tensor of planes: matrices of pixels and channels turned, one an image.
//
//   y[n, c, r] = x[n, r, c]
//
// Shapes    x: [N, rows, columns], y: [N, columns, rows], fp16, bf16 or fp32: rows are pixels and columns channels, or the other way.
// Replaces  aten::contiguous from one memory format to the other.
// Bytes     x once, y once: 64 images, 128 channels, 56x56 in bf16: 51 + 51 MB.
// Bound     DRAM bandwidth, 0.024 ms there.
// Grid      (tiles of 64 rows, tiles of 64 columns, images). Two values a thread are read and written together where sizes are even.
// Numerics  exact.
// Limits    65535 images; an image below 2^31 values; sm_80.

#include "overlap.cuh"

typedef long long i64;
#if STORAGE == 0
typedef unsigned int Element;
struct __align__(8) Two { Element first, second; };
#else
typedef unsigned short Element;
struct __align__(4) Two { Element first, second; };
#endif

#define TILE 64
#define LINES 8  // of a tile that the block takes at once
#define THREADS (TILE / 2 * LINES)

extern "C" __global__ void __launch_bounds__(THREADS) large_depthwise_turn(
    const Element* __restrict__ x, Element* __restrict__ y, int rows, int columns) {
  overlap_launches();
  __shared__ Element tile[TILE][TILE + 2];
  const int pair = threadIdx.x % (TILE / 2) * 2, line = threadIdx.x / (TILE / 2);
  const int first_row = blockIdx.x * TILE, first_column = blockIdx.y * TILE;
  const i64 image = (i64)blockIdx.z * rows * columns;
#pragma unroll
  for (int i = 0; i < TILE; i += LINES) {
    const int r = first_row + line + i, c = first_column + pair;
    if (r >= rows || c >= columns) continue;
    const Element* from = x + image + (i64)r * columns + c;
#if EVEN_COLUMNS
    const Two two = *(const Two*)from;
    tile[line + i][pair] = two.first;
    tile[line + i][pair + 1] = two.second;
#else
    tile[line + i][pair] = from[0];
    if (c + 1 < columns) tile[line + i][pair + 1] = from[1];
#endif
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < TILE; i += LINES) {
    const int c = first_column + line + i, r = first_row + pair;
    if (r >= rows || c >= columns) continue;
    Element* to = y + image + (i64)c * rows + r;
#if EVEN_ROWS
    const Two two = {tile[pair][line + i], tile[pair + 1][line + i]};
    *(Two*)to = two;
#else
    to[0] = tile[pair][line + i];
    if (r + 1 < rows) to[1] = tile[pair + 1][line + i];
#endif
  }
}
