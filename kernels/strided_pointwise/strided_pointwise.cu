// 1 x 1 convolution of stride 2, or with GRADIENT the gradient of its input.
//
//   y[m,o]        = sum_i w[o,i] * x[p(m),i], rounded
//   dx[p(m),i]    = sum_o w[o,i] * dy[m,o], rounded, and zero in the pixels that no m has
//
// Shapes    x, dx: [N, H, W, CI]; y, dy: [M, CO] with M = N * HO * WO, HO = ceil(H / 2), WO = ceil(W / 2) (NHWC), fp16 or bf16, CI and
//           CO multiples of 8; w: [CO, CI] in the same dtype. p(m) is the pixel (2 i, 2 j) of m's image for m = (n, i, j).
// Replaces  aten::convolution with 1 x 1 taps and stride 2, forward and its data gradient; there also the fill with zeros.
// Bytes     A quarter of x once, y once; or dy once, dx once. 128 images, 64 -> 128 channels, 32x32 in bf16: 4 + 8 MB; 8 + 17 MB.
// Flops     2 * CI * CO for each m: 0.5 G there.
// Bound     DRAM bandwidth: 3.0 and 5.9 us there at 4.24 TB/s, with 1 to 2 for a launch and its tail; the products take 0.9 of mma.sync.
// Grid      (tiles of BM values of m, tiles of BN columns). A block's whole depth passes through a ring of STAGES chunks of 64 channels
//           (cp.async). The results go through shared memory, so that 128 bytes of a pixel and more leave together, and with GRADIENT
//           each pixel's three empty neighbours beside it.
// Numerics  fp32 sums on the tensor cores in a fixed order, rounded once. Two runs are bit-equal.
// Limits    no bias, one group, no padding, fewer than 2^31 pixels; sm_80.
//
// Set by the build: 2 x 2 warps; a warp makes BM / 2 rows by BN / 2 columns.

#include "vector.cuh"
#include "cp_async.cuh"
#include "mma.cuh"
#include "overlap.cuh"

#define THREADS 128
#define UNITS 8          // 16-byte units of a chunk, 64 channels
#define PITCH 9          // odd: the 8 rows of an ldmatrix matrix lie in 32 different banks
#define BN_UNITS (BN / 8)
#define BN_PITCH (BN_UNITS + 1)
#define ROWS_STAGE (BM * PITCH)
#if GRADIENT
#define WEIGHT_STAGE (64 * BN_PITCH)  // [channel of dy][column]
#else
#define WEIGHT_STAGE (BN * PITCH)     // [column][channel of x]
#endif
#define STAGE (ROWS_STAGE + WEIGHT_STAGE)
#define TILES_M (BM / 32)  // products of a warp, down and across
#define TILES_N (BN / 16)
#if STORAGE == 1
#define MMA mma_f16
#else
#define MMA mma_bf16
#endif

extern "C" __global__ void __launch_bounds__(THREADS) strided_pointwise(
    const Vec16* __restrict__ from, const Vec16* __restrict__ weight, Vec16* __restrict__ to,
    int rows, int in_units, int out_units, int height, int width) {
  overlap_launches();
  extern __shared__ __align__(16) Vec16 ring[];
  __shared__ int pixels[BM];  // of x or dx; -1 behind the last
  __shared__ int beside[BM];  // bit 0: there is a pixel to its right; bit 1: below it
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int wm = warp % 2, wn = warp / 2;
  const int begin = blockIdx.x * BM, first_unit = blockIdx.y * BN_UNITS;

  for (int r = threadIdx.x; r < BM; r += THREADS) {
    const unsigned int m = begin + r, across = (width + 1) / 2, down = (height + 1) / 2;
    const unsigned int line = m / across, j = m % across, n = line / down, i = line % down;
    pixels[r] = m < (unsigned int)rows ? (int)((n * height + 2 * i) * width + 2 * j) : -1;
    beside[r] = (2 * j + 1 < (unsigned int)width) | (2 * i + 1 < (unsigned int)height) << 1;
  }
  __syncthreads();

#if GRADIENT
  const int depth = out_units;
#else
  const int depth = in_units;
#endif
  const int chunks = (depth + UNITS - 1) / UNITS;
  int fetched = 0;
  auto fetch = [&]() {
    if (fetched < chunks) {
      const int at = fetched * UNITS;
      Vec16* row_to = ring + fetched % STAGES * STAGE;
      Vec16* weight_to = row_to + ROWS_STAGE;
#pragma unroll
      for (int i = 0; i < BM * UNITS / THREADS; ++i) {
        const int r = threadIdx.x / UNITS + i * (THREADS / UNITS), u = threadIdx.x % UNITS;
        const bool inside = pixels[r] >= 0 && at + u < depth;
#if GRADIENT
        const i64 row = begin + r;
#else
        const i64 row = pixels[r];
#endif
        cp_async16(row_to + r * PITCH + u, inside ? from + row * depth + at + u : from, inside);
      }
#if GRADIENT
      for (int i = threadIdx.x; i < 64 * BN_UNITS; i += THREADS) {
        const int k = i / BN_UNITS, u = i % BN_UNITS;
        const bool inside = at * 8 + k < out_units * 8 && first_unit + u < in_units;
        const Vec16* source = weight + (i64)(at * 8 + k) * in_units + first_unit + u;
        cp_async16(weight_to + k * BN_PITCH + u, inside ? source : weight, inside);
      }
#else
      for (int i = threadIdx.x; i < BN * UNITS; i += THREADS) {
        const int column = i / UNITS, u = i % UNITS;
        const bool inside = first_unit * 8 + column < out_units * 8 && at + u < in_units;
        const Vec16* source = weight + (i64)(first_unit * 8 + column) * in_units + at + u;
        cp_async16(weight_to + column * PITCH + u, inside ? source : weight, inside);
      }
#endif
    }
    cp_async_commit();
    ++fetched;
  };
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) fetch();

  float d[TILES_M][TILES_N][4];
#pragma unroll
  for (int m = 0; m < TILES_M; ++m)
#pragma unroll
    for (int n = 0; n < TILES_N; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) d[m][n][e] = 0.f;

  for (int chunk = 0; chunk < chunks; ++chunk) {
    cp_async_wait<STAGES - 2>();
    __syncthreads();
    fetch();
    const Vec16* row_at = ring + chunk % STAGES * STAGE;
    const Vec16* weight_at = row_at + ROWS_STAGE;
#pragma unroll
    for (int step = 0; step < 4; ++step) {  // of 16 channels
      unsigned int a[TILES_M][4];
#pragma unroll
      for (int m = 0; m < TILES_M; ++m)
        ldmatrix_x4(a[m], row_at + (wm * (BM / 2) + m * 16 + lane % 16) * PITCH + 2 * step + lane / 16);
#pragma unroll
      for (int n = 0; n < TILES_N; n += 2) {
        unsigned int both[4];
#if GRADIENT
        const int k = step * 16 + lane / 8 % 2 * 8 + lane % 8;
        ldmatrix_x4_trans(both, weight_at + k * BN_PITCH + wn * (BN_UNITS / 2) + n + lane / 16);
#else
        const int column = wn * (BN / 2) + n * 8 + lane / 16 * 8 + lane % 8;
        ldmatrix_x4(both, weight_at + column * PITCH + 2 * step + lane / 8 % 2);
#endif
        const unsigned int b[2][2] = {{both[0], both[1]}, {both[2], both[3]}};
#pragma unroll
        for (int m = 0; m < TILES_M; ++m) {
          MMA(d[m][n], a[m], b[0]);
          MMA(d[m][n + 1], a[m], b[1]);
        }
      }
    }
  }

  cp_async_wait<0>();
  __syncthreads();  // the ring is read: in its place come the results, [BM][BN_PITCH] units
  unsigned int* words = (unsigned int*)ring;
#pragma unroll
  for (int m = 0; m < TILES_M; ++m)
#pragma unroll
    for (int n = 0; n < TILES_N; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = wm * (BM / 2) + m * 16 + half * 8 + lane / 4, word = (wn * (BN / 2) + n * 8) / 2 + lane % 4;
        const float f[VEC] = {d[m][n][2 * half], d[m][n][2 * half + 1]};
        words[row * BN_PITCH * 4 + word] = narrow(f).w[0];
      }
  __syncthreads();
#if GRADIENT
  const int units = in_units;
#else
  const int units = out_units;
#endif
  for (int i = threadIdx.x; i < BM * BN_UNITS; i += THREADS) {
    const int r = i / BN_UNITS, u = i % BN_UNITS;
    if (pixels[r] < 0 || first_unit + u >= units) continue;
#if GRADIENT
    Vec16* at = to + (i64)pixels[r] * units + first_unit + u;
    const Vec16 zero = {{0u, 0u, 0u, 0u}};
    const bool right = beside[r] & 1, below = beside[r] & 2;
    store(at, ring[r * BN_PITCH + u]);
    if (right) store(at + units, zero);
    if (below) store(at + (i64)width * units, zero);
    if (right && below) store(at + (i64)(width + 1) * units, zero);
#else
    store(to + (i64)(begin + r) * units + first_unit + u, ring[r * BN_PITCH + u]);
#endif
  }
}
