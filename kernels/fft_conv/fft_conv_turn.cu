// A matrix of complex numbers turned: rows become columns.
//
//   y[c, r] = x[r, c]
//
// Shapes    x: [rows, columns], y: [columns, rows] complex64. Of a convolution by Fourier transforms: between planes of frequencies, one for each
//           image and channel, as cuFFT makes and takes them, and one matrix for each frequency, as the products want them.
// Replaces  the copies of a permuted complex tensor.
// Bytes     x once, y once: 16 a number.
// Bound     DRAM bandwidth.
// Grid      (tiles of 32 rows, tiles of 32 columns).
// Numerics  exact.
// Limits    fewer than 2^21 tiles of columns; sm_80.

#include "overlap.cuh"

typedef long long i64;
struct __align__(8) Complex { float real, imaginary; };

#define TILE 32
#define LINES 8  // rows of a tile that the block takes at once
#define THREADS (TILE * LINES)

extern "C" __global__ void __launch_bounds__(THREADS) fft_conv_turn(const Complex* __restrict__ x, Complex* __restrict__ y, i64 rows, i64 columns) {
  overlap_launches();
  __shared__ Complex tile[TILE][TILE + 1];
  const int across = threadIdx.x % TILE, line = threadIdx.x / TILE;
  const i64 first_row = (i64)blockIdx.x * TILE, first_column = (i64)blockIdx.y * TILE;
#pragma unroll
  for (int i = 0; i < TILE; i += LINES)
    if (first_row + line + i < rows && first_column + across < columns)
      tile[line + i][across] = x[(first_row + line + i) * columns + first_column + across];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < TILE; i += LINES)
    if (first_column + line + i < columns && first_row + across < rows)
      y[(first_column + line + i) * rows + first_row + across] = tile[across][line + i];
}
