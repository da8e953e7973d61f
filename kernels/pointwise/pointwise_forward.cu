// 1 x 1 convolution of stride 1, and with MOMENTS the moments of what it gives out, for the batch norm that follows.
//
//   y[m,o] = sum_i w[o,i] * x[m,i], rounded
//
// Shapes    x: [M, CI], y: [M, CO] with M = N*H*W (NHWC), fp16 or bf16, CI and CO multiples of 8; w: [CO, CI] in the same dtype.
//           moments: [gridDim.x][3][CO] fp32, see include/moments.cuh.
// Replaces  aten::convolution with 1 x 1 taps; with MOMENTS also the pass over y in which batch norm takes its statistics.
// Bytes     x once, y once. ResNet-50's 64 -> 256 at 256x56x56 in bf16: 103 + 411 MB; cuDNN and the statistics read 411 MB more.
// Flops     2 * CI * CO a row: 26 G there.
// Bound     DRAM bandwidth: 0.121 ms there at 4.24 TB/s, where mma.sync at 600 TFLOP/s takes 0.044. mma.sync bounds it from
//           CI * CO / (CI + CO) = 140 on.
//           Shared memory, bytes a row and 16 channels of x: 32 on the way in, 32 * WARPS_N of x and 2 * BN / TILES of w to the
//           warps. At 64 -> 256 with 8 warps side by side and TILES 2 they are 2.2 KB in all, 18 clocks at 128 bytes each, where
//           DRAM takes 35 for an SM's share.
// Grid      (row blocks, column blocks). A block has the weights of BN columns in shared memory for good and walks over tiles of
//           BM rows, gridDim.x apart, whose x passes through a ring of STAGES chunks of 16 * STEPS channels (cp.async). The
//           weights' rows lie there in the order in which a lane's sums of four products are 8 neighbouring channels of y: it
//           stores 16 bytes straight from registers, four lanes 64 bytes of a row, and its moments are always of the same columns.
// Numerics  fp32 sums on the tensor cores in a fixed order, rounded once. Moments of the rounded values: fp32 about the warp's first
//           row, so that a mean far from zero does not cancel; warps joined in fp64. Two runs are bit-equal.
// Limits    no bias, one group, M below 2^31; sm_80.
//
// Set by the build: WARPS_M x WARPS_N warps; a warp makes TILES * 16 rows by GROUPS * 32 columns. CHUNKS chunks are all of CI.

#include "vector.cuh"
#include "overlap.cuh"
#include "cp_async.cuh"
#include "mma.cuh"
#if MOMENTS
#include "moments.cuh"
#endif

#define THREADS (32 * WARPS_M * WARPS_N)
#define WARP_ROWS (TILES * 16)
#define WARP_COLUMNS (GROUPS * 32)
#define BM (WARPS_M * WARP_ROWS)
#define BN (WARPS_N * WARP_COLUMNS)
#define UNITS (2 * STEPS)                  // 16-byte units of a row in a chunk
#define PITCH (UNITS | 1)                  // odd: the 8 rows of an ldmatrix matrix lie in 32 different banks
#define WEIGHT_PITCH (CHUNKS * UNITS | 1)
#define STAGE (BM * PITCH)
#define LOADS ((BM * UNITS + THREADS - 1) / THREADS)
#if STORAGE == 1
#define MMA mma_f16
#else
#define MMA mma_bf16
#endif

// Which of a group's 32 columns its row p in shared memory is: product p / 8 gives lane t its columns 8 t + 2 (p / 8) and the next.
__device__ __forceinline__ int column_of(int p) { return p % 8 / 2 * 8 + p / 8 * 2 + p % 2; }

// A row's 8 neighbouring values in four products, rounded: registers e and e + 1 of each.
__device__ __forceinline__ Vec16 eight(const float (*d)[4], int e) {
  const float f[VEC] = {d[0][e], d[0][e + 1], d[1][e], d[1][e + 1], d[2][e], d[2][e + 1], d[3][e], d[3][e + 1]};
  return narrow(f);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) pointwise_forward(
    const Vec16* __restrict__ x, const Vec16* __restrict__ weight, Vec16* __restrict__ y,
#if MOMENTS
    float* __restrict__ moments,
#endif
    int rows, int in_units, int out_units) {
  overlap_launches();
  extern __shared__ __align__(16) Vec16 shared[];
  Vec16* weights = shared;
  Vec16* ring = weights + BN * WEIGHT_PITCH;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int wm = warp % WARPS_M, wn = warp / WARPS_M;
  const int tiles = (rows + BM - 1) / BM;

  for (int i = threadIdx.x; i < BN * CHUNKS * UNITS; i += THREADS) {
    const int p = i / (CHUNKS * UNITS), u = i % (CHUNKS * UNITS);
    const int column = blockIdx.y * BN + p / 32 * 32 + column_of(p % 32);
    const bool inside = column < out_units * 8 && u < in_units;
    cp_async16(weights + p * WEIGHT_PITCH + u, inside ? weight + (i64)column * in_units + u : weight, inside);
  }
  cp_async_commit();

  int fetched = blockIdx.x, fetched_chunk = 0, filled = 0;
  auto fetch = [&]() {
    if (fetched < tiles) {
      const int begin = fetched * BM, at = fetched_chunk * UNITS;
      Vec16* to = ring + filled * STAGE;
#pragma unroll
      for (int i = 0; i < LOADS; ++i) {
        const int index = threadIdx.x + i * THREADS;
        const int r = THREADS % UNITS == 0 ? threadIdx.x / UNITS + i * (THREADS / UNITS) : index / UNITS;
        const int u = THREADS % UNITS == 0 ? threadIdx.x % UNITS : index % UNITS;
        if (BM * UNITS % THREADS != 0 && index >= BM * UNITS) continue;
        const bool inside = r < rows - begin && at + u < in_units;
        cp_async16(to + r * PITCH + u, inside ? x + (i64)(begin + r) * in_units + at + u : x, inside);
      }
    }
    cp_async_commit();
    filled = filled + 1 == STAGES ? 0 : filled + 1;
    if (++fetched_chunk == CHUNKS) {
      fetched_chunk = 0;
      fetched += gridDim.x;
    }
  };
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) fetch();

  // Lane's row of each ldmatrix. x: (rows 0-7, k 0-7) (rows 8-15, k 0-7) (rows 0-7, k 8-15) (rows 8-15, k 8-15); weights: (columns 0-7,
  // k 0-7) (columns 0-7, k 8-15) (columns 8-15, k 0-7) (columns 8-15, k 8-15), two products' fragments.
  const int x_at = (wm * WARP_ROWS + lane % 16) * PITCH + lane / 16;
  const Vec16* weights_at = weights + (wn * WARP_COLUMNS + lane / 16 * 8 + lane % 8) * WEIGHT_PITCH + lane / 8 % 2;
  const int unit = blockIdx.y * (BN / 8) + wn * (WARP_COLUMNS / 8) + t;  // of y, of the first group
  int stage = 0;

#if MOMENTS
  float* shifts = (float*)(ring + STAGES * STAGE);  // [WARPS_M][BN]: the first row of each row of warps
  float* shift = shifts + wm * BN + wn * WARP_COLUMNS + t * 8;
  float sum[GROUPS][8], square[GROUPS][8];  // of distances from it
#pragma unroll
  for (int n = 0; n < GROUPS; ++n)
#pragma unroll
    for (int j = 0; j < 8; ++j) sum[n][j] = square[n][j] = 0.f;
  int count = 0;  // of this lane's rows
#endif

  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    float d[TILES][GROUPS * 4][4];
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
      for (int n = 0; n < GROUPS * 4; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) d[m][n][e] = 0.f;
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
      cp_async_wait<STAGES - 2>();
      __syncthreads();
      fetch();
      const Vec16* x_row = ring + stage * STAGE + x_at;
      const Vec16* weights_row = weights_at + chunk * UNITS;
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        unsigned int a[TILES][4];
#pragma unroll
        for (int m = 0; m < TILES; ++m) ldmatrix_x4(a[m], x_row + m * 16 * PITCH + 2 * step);
#pragma unroll
        for (int n = 0; n < GROUPS * 2; ++n) {
          unsigned int both[4];
          ldmatrix_x4(both, weights_row + n * 16 * WEIGHT_PITCH + 2 * step);
          const unsigned int b[2][2] = {{both[0], both[1]}, {both[2], both[3]}};
#pragma unroll
          for (int m = 0; m < TILES; ++m) {
            MMA(d[m][2 * n], a[m], b[0]);
            MMA(d[m][2 * n + 1], a[m], b[1]);
          }
        }
      }
      stage = stage + 1 == STAGES ? 0 : stage + 1;
    }

    const int begin = tile * BM + wm * WARP_ROWS + g;
    Vec16* to = y + (i64)begin * out_units + unit;
#if MOMENTS
    if (tile == blockIdx.x) {
#pragma unroll
      for (int n = 0; n < GROUPS; ++n) {
        if (g == 0) {
          float f[VEC];
          widen(eight(d[0] + 4 * n, 0), f);
#pragma unroll
          for (int j = 0; j < 8; ++j) shift[n * 32 + j] = finite_or_zero(f[j]);
        }
      }
      __syncwarp();
    }
#endif
    // Once for whole tiles, without a branch a row, and once for the last.
    auto leave = [&](bool whole) {
#pragma unroll
      for (int n = 0; n < GROUPS; ++n) {
        const bool inside = unit + 4 * n < out_units;
#if MOMENTS
        float about[8];
#pragma unroll
        for (int j = 0; j < 8; j += 4) {
          const float4 v = *(const float4*)(shift + n * 32 + j);
          about[j] = v.x, about[j + 1] = v.y, about[j + 2] = v.z, about[j + 3] = v.w;
        }
#endif
#pragma unroll
        for (int m = 0; m < TILES; ++m)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int row = m * 16 + half * 8;
            if (!whole && row >= rows - begin) continue;
            const Vec16 v = eight(d[m] + 4 * n, 2 * half);
            if (inside) store(to + (i64)row * out_units + 4 * n, v);
#if MOMENTS
            float f[VEC];
            widen(v, f);
#pragma unroll
            for (int j = 0; j < 8; ++j) {
              const float distance = f[j] - about[j];
              sum[n][j] += distance;
              square[n][j] += distance * distance;
            }
            count += n == 0;
#endif
          }
      }
    };
    if (rows - tile * BM >= BM)
      leave(true);
    else
      leave(false);
  }

#if MOMENTS
  // Lanes of a warp, then the warps above each other: all in a fixed order.
#pragma unroll
  for (int lanes = 4; lanes < 32; lanes *= 2) {
    count += __shfl_xor_sync(0xffffffffu, count, lanes);
#pragma unroll
    for (int n = 0; n < GROUPS; ++n)
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        sum[n][j] += __shfl_xor_sync(0xffffffffu, sum[n][j], lanes);
        square[n][j] += __shfl_xor_sync(0xffffffffu, square[n][j], lanes);
      }
  }
  cp_async_wait<0>();
  __syncthreads();  // the weights are read: in their place, and the ring's, come [WARPS_M][2][BN] sums
  float* sums = (float*)shared;
  int* counts = (int*)(sums + 2 * WARPS_M * BN);  // [WARPS_M]
  if (g == 0) {
#pragma unroll
    for (int n = 0; n < GROUPS; ++n)
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int column = wn * WARP_COLUMNS + n * 32 + t * 8 + j;
        sums[2 * wm * BN + column] = sum[n][j];
        sums[(2 * wm + 1) * BN + column] = square[n][j];
      }
    if (lane == 0 && wn == 0) counts[wm] = count;
  }
  __syncthreads();
  for (int column = threadIdx.x; column < BN; column += THREADS) {
    const int channel = blockIdx.y * BN + column;
    if (channel >= out_units * 8) continue;
    double all = 0.0, mean = 0.0, m2 = 0.0;
    for (int w = 0; w < WARPS_M; ++w) {
      if (counts[w] == 0) continue;  // the last tile had no row for it, and there was no other
      const double part = counts[w], s = sums[2 * w * BN + column], q = sums[(2 * w + 1) * BN + column];
      const double away = s / part, spread = q - s * away;  // from its shift
      const double delta = (double)shifts[w * BN + column] + away - mean;
      m2 += (spread < 0.0 ? 0.0 : spread) + delta * delta * (all * part / (all + part));
      all += part;
      mean += delta * (part / all);
    }
    float* at = moments + (i64)blockIdx.x * 3 * out_units * 8 + channel;
    at[0] = (float)all;
    at[out_units * 8] = (float)mean;
    at[2 * out_units * 8] = (float)m2;
  }
#endif
}
