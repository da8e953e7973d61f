// Planes of channels_last images, or images of planes: the matrix of each image turned.
//
//   y[n,b,a] = x[n,a,b]
//
// Shapes    x: [N, A, B], y: [N, B, A], contiguous, values of SIZE bytes (2 or 4). Planes of NHWC images: A is H * W, B is C; back: A is C.
// Replaces  aten::copy_ between the two layouts, which reads or writes one of them value by value.
// Bytes     x once, y once: 64 images, 128 channels, 56x56 in bf16: 51 + 51 MB.
// Bound     DRAM bandwidth: 0.024 ms there at 4.24 TB/s.
// Grid      (tiles of 64 rows by 32 words of 4 bytes of x, images). A thread loads 16 bytes twice, and writes 8 values of a row of y, or of two.
// Numerics  bits are moved.
// Limits    rows of x are copied IN bytes at once and rows of y OUT, which divide them; sm_80.

#include "overlap.cuh"

typedef long long i64;

#define WORDS 32            // of a row of x a tile
#define PITCH (WORDS + 1)   // eight words of a column, four rows apart, lie in different banks
#define THREADS 256
#define ROW_VALUES (4 * WORDS / SIZE)

#if SIZE == 4
typedef unsigned int Value;
#else
typedef unsigned short Value;
#endif
#if IN > 2
struct __align__(IN) In { unsigned int w[IN / 4]; };
#endif
#if OUT > 2
struct __align__(OUT) Out { unsigned int w[OUT / 4]; };
#endif

// Eight values of a row of y, of which those from `left` on lie outside.
__device__ __forceinline__ void write(Value* __restrict__ to, const unsigned int (&w)[2 * SIZE], i64 left) {
#if OUT > 2
#pragma unroll
  for (int k = 0; k < 8 * SIZE / OUT; ++k)
    if (k * (OUT / SIZE) < left) {
      Out v;
#pragma unroll
      for (int j = 0; j < OUT / 4; ++j) v.w[j] = w[k * (OUT / 4) + j];
      *(Out*)(to + k * (OUT / SIZE)) = v;
    }
#else
#pragma unroll
  for (int k = 0; k < 8; ++k)
    if (k < left) to[k] = (Value)(w[k / 2] >> 16 * (k % 2) & 0xffffu);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS) large_depthwise_planes(
    const Value* __restrict__ x, Value* __restrict__ y, i64 rows, i64 columns, int column_tiles) {
  overlap_launches();
  __shared__ unsigned int tile[64 * PITCH];
  const i64 row0 = (i64)(blockIdx.x / column_tiles) * 64, column0 = (i64)(blockIdx.x % column_tiles) * ROW_VALUES;
  const Value* from = x + blockIdx.y * rows * columns;
  Value* to = y + blockIdx.y * rows * columns;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int r = (threadIdx.x + i * THREADS) / 8, unit = threadIdx.x % 8;
    const i64 row = row0 + r, column = column0 + unit * (16 / SIZE);
    unsigned int w[4] = {0u, 0u, 0u, 0u};
    if (row < rows) {
#if IN > 2
#pragma unroll
      for (int k = 0; k < 16 / IN; ++k)
        if (column + k * (IN / SIZE) < columns) {
          const In v = *(const In*)(from + row * columns + column + k * (IN / SIZE));
#pragma unroll
          for (int j = 0; j < IN / 4; ++j) w[k * (IN / 4) + j] = v.w[j];
        }
#else
#pragma unroll
      for (int k = 0; k < 8; ++k)
        if (column + k < columns) w[k / 2] |= (unsigned int)from[row * columns + column + k] << 16 * (k % 2);
#endif
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) tile[r * PITCH + 4 * unit + j] = w[j];
  }
  __syncthreads();

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int word = warp % 4 * 8 + lane / 4, eight = warp / 4 * 4 + lane % 4;  // of a row; of rows
  const i64 row = row0 + 8 * eight;
  unsigned int v[8];
#pragma unroll
  for (int k = 0; k < 8; ++k) v[k] = tile[(8 * eight + k) * PITCH + word];
#if SIZE == 4
  if (column0 + word < columns) write(to + (column0 + word) * rows + row, v, rows - row);
#else
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    unsigned int w[4];
#pragma unroll
    for (int j = 0; j < 4; ++j)
      w[j] = half ? v[2 * j] >> 16 | (v[2 * j + 1] & 0xffff0000u) : (v[2 * j] & 0xffffu) | v[2 * j + 1] << 16;
    const i64 column = column0 + 2 * word + half;
    if (column < columns) write(to + column * rows + row, w, rows - row);
  }
#endif
}
