// Squeeze-and-excite over an NHWC tensor, the passes over x and dy. Backward.
//
//   reduce:  partial[n, split, c] = sum of dy * x over the split's pixels
//   apply:   dx = dy * gate(z2[n, c]) + dpool[n, c]
//            dW1 = dz1^T s     db1 = sum_n dz1     dW2 = dz2^T act(z1)     db2 = sum_n dz2
//
// Shapes    dy, x, dx: [N, HW, C], STORAGE; s, z2, dz2, dpool: [N, C]; z1, dz1: [N, S]; dW1: [S, C]; dW2: [C, S]; fp32.
// Replaces  the product's two backwards (with a full-size product and its sum), the pool's, and their addition: dx is
//           written once instead of three times. The weights' gradients instead of four products and sums.
// Bytes     reduce: 2 reads; apply: 1 read, 1 write. 4 flops an element, and 4 N C S for the weights.
// Bound     DRAM bandwidth. 256x96x56x56 bf16: 617 MB, 145 us at 4.24 TB/s.
// Grid      reduce: (splits of HW, channel tiles, N). apply: one-dimensional; first the blocks that make the weights'
//           gradients, 32 x 32 of each a block, latency bound and hidden beside those that stream; samples from the last.
// Numerics  fp32 sums in a fixed order. Deterministic.

#include "vector.cuh"
#include "activation.cuh"
#include "gate.cuh"
#include "channel_reduce.cuh"
#include "sample_reduce.cuh"

#ifndef UNROLL
#define UNROLL 4  // loads in flight a thread and tensor
#endif

#define SQUARE 32  // weights a block makes: SQUARE x SQUARE of each matrix, over SQUARE samples at a time

extern "C" __global__ void __launch_bounds__(THREADS) squeeze_excite_backward_reduce(
    const Vec16* __restrict__ dy, const Vec16* __restrict__ x, float* __restrict__ partial,
    int rows, int vectors, int tile) {
  __shared__ float shared[VEC * THREADS];
  const Tile t = tile_of(tile, vectors);
  const int n = blockIdx.z;
  x += (i64)n * rows * vectors;
  dy += (i64)n * rows * vectors;
  float sum[1][VEC];
#pragma unroll
  for (int j = 0; j < VEC; ++j) sum[0][j] = 0.f;
  if (t.vector >= 0) {
    const Rows r = rows_of(blockIdx.x, gridDim.x, rows);
    for (int row = r.first + t.ty; row < r.end; row += UNROLL * t.rows_per_pass) {
      Vec16 vx[UNROLL], vdy[UNROLL];
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        if (row + u * t.rows_per_pass >= r.end) continue;
        vx[u] = load_last(x + (row + u * t.rows_per_pass) * vectors + t.vector);
        vdy[u] = load(dy + (row + u * t.rows_per_pass) * vectors + t.vector);
      }
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        if (row + u * t.rows_per_pass >= r.end) continue;
        float f[VEC], g[VEC];
        widen(vx[u], f);
        widen(vdy[u], g);
#pragma unroll
        for (int j = 0; j < VEC; ++j) sum[0][j] += f[j] * g[j];
      }
    }
  }
  reduce_sample<1>(t, tile, vectors, sum, partial + ((i64)n * gridDim.x + blockIdx.x) * vectors * VEC, shared);
}

// One SQUARE x SQUARE piece of dW1 and of dW2, channels from c0 and hidden units from j0.
__device__ __forceinline__ void weight_gradients(
    const float* s, const float* z1, const float* dz1, const float* dz2, float* dw1, float* db1, float* dw2, float* db2,
    int samples, int channels, int hidden, int c0, int j0, float slope, float (*piece)[SQUARE][SQUARE + 1]) {
  const int tx = threadIdx.x % SQUARE, ty = threadIdx.x / SQUARE;
  const int strips = THREADS / SQUARE, each = SQUARE / (THREADS / SQUARE);
  float a1[each], a2[each], bias1 = 0.f, bias2 = 0.f;
#pragma unroll
  for (int i = 0; i < each; ++i) a1[i] = a2[i] = 0.f;
  for (int n0 = 0; n0 < samples; n0 += SQUARE) {
#pragma unroll
    for (int i = 0; i < each; ++i) {
      const int q = ty + i * strips, n = n0 + q;
      const bool c = n < samples && c0 + tx < channels, j = n < samples && j0 + tx < hidden;
      const i64 at = (i64)n * channels + c0 + tx, under = (i64)n * hidden + j0 + tx;
      piece[0][q][tx] = c ? s[at] : 0.f;
      piece[1][q][tx] = c ? dz2[at] : 0.f;
      piece[2][q][tx] = j ? dz1[under] : 0.f;
      piece[3][q][tx] = j ? activate(z1[under], slope) : 0.f;
    }
    __syncthreads();
#pragma unroll 4
    for (int q = 0; q < SQUARE; ++q) {
      // dW1 [j, c]: neighbouring threads take neighbouring channels; dW2 [c, j]: neighbouring hidden units.
      const float pooled = piece[0][q][tx], h = piece[3][q][tx];
#pragma unroll
      for (int i = 0; i < each; ++i) {
        a1[i] += piece[2][q][ty + i * strips] * pooled;
        a2[i] += piece[1][q][ty + i * strips] * h;
      }
      bias1 += piece[2][q][tx];
      bias2 += piece[1][q][tx];
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < each; ++i) {
    const int o = ty + i * strips;
    if (j0 + o < hidden && c0 + tx < channels) dw1[(i64)(j0 + o) * channels + c0 + tx] = a1[i];
    if (c0 + o < channels && j0 + tx < hidden) dw2[(i64)(c0 + o) * hidden + j0 + tx] = a2[i];
  }
  if (ty == 0 && c0 == 0 && j0 + tx < hidden) db1[j0 + tx] = bias1;
  if (ty == 0 && j0 == 0 && c0 + tx < channels) db2[c0 + tx] = bias2;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) squeeze_excite_backward_apply(
    const Vec16* __restrict__ dy, const float* __restrict__ pooled, const float* __restrict__ z1,
    const float* __restrict__ z2, const float* __restrict__ dz1, const float* __restrict__ dz2,
    const float* __restrict__ dpool, Vec16* __restrict__ dx, float* __restrict__ dw1, float* __restrict__ db1,
    float* __restrict__ dw2, float* __restrict__ db2,
    int samples, int rows, int vectors, int hidden, int tile, int tiles, int splits, float slope) {
  __shared__ float piece[4][SQUARE][SQUARE + 1];
  const int channels = vectors * VEC;
  const int across = (channels + SQUARE - 1) / SQUARE, squares = across * ((hidden + SQUARE - 1) / SQUARE);
  if (blockIdx.x < squares) {
    const int c0 = blockIdx.x % across * SQUARE, j0 = blockIdx.x / across * SQUARE;
    weight_gradients(
        pooled, z1, dz1, dz2, dw1, db1, dw2, db2, samples, channels, hidden, c0, j0, slope, piece);
    return;
  }
  const int block = blockIdx.x - squares;
  const int split = block % splits, column = block / splits % tiles;
  const int n = samples - 1 - block / splits / tiles;
  const int vector = column * tile + threadIdx.x % tile, ty = threadIdx.x / tile, rows_per_pass = THREADS / tile;
  if (ty >= rows_per_pass || vector >= vectors) return;
  dy += (i64)n * rows * vectors;
  dx += (i64)n * rows * vectors;
  float scale[VEC], offset[VEC];
#pragma unroll
  for (int j = 0; j < VEC; ++j) {
    const i64 at = ((i64)n * vectors + vector) * VEC + j;
    scale[j] = gate(z2[at]);
    offset[j] = dpool[at];
  }
  const Rows r = rows_of(split, splits, rows);
  for (int row = r.first + ty; row < r.end; row += UNROLL * rows_per_pass) {
    Vec16 v[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
      if (row + u * rows_per_pass < r.end) v[u] = load_last(dy + (row + u * rows_per_pass) * vectors + vector);
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      if (row + u * rows_per_pass >= r.end) continue;
      float f[VEC];
      widen(v[u], f);
#pragma unroll
      for (int j = 0; j < VEC; ++j) f[j] = f[j] * scale[j] + offset[j];
      store(dx + (row + u * rows_per_pass) * vectors + vector, narrow(f));
    }
  }
}
