// Backward of a 1 x 1 convolution of stride 1, with regard to its input y = act(batch_norm(x) (+ residual)), as far as the sums that
// the norm's gradient needs.
//
//   g[m,c] = act'(z[m,c]) * (sum_o dz[m,o] w[o,c] + dy[m,c])      sums[0][c] = sum_m g      sums[1][c] = sum_m g (x - mean)
//
// FORK      y was used elsewhere too, and dy is the gradient that came from there.
// Shapes    dz: [M, CO], dy, x, g: [M, CI] with M = N*H*W (NHWC), fp16 or bf16, CI and CO multiples of 8; weight: [CO, CI] in the same
//           dtype; mask: a bit an element, as batchnorm_act_forward.cu wrote it (RESIDUAL with an activation); saved: [2, CI] fp32,
//           mean and inverse standard deviation; norm_weight, norm_bias: [CI] fp32; sums: [gridDim.x][2][CI] fp32.
// Replaces  aten::convolution_backward's data gradient and batchnorm_act_backward_reduce behind it, which reads what that one
//           wrote. batchnorm/batchnorm_gradient_sums.cu adds the sums up, batchnorm_act_backward_apply makes dx of g.
// Bytes     dz, dy, x once, g once. ResNet-50's 256 <- 64 at 256x56x56 in bf16: 103 + 3 * 411 MB and 26 of mask, where the two
//           launches move 823 more.
// Flops     2 * CI * CO a row: 26 G there.
// Bound     DRAM bandwidth: 0.32 ms there at 4.24 TB/s, where mma.sync at 600 TFLOP/s takes 0.044. Beside y's three tensors the
//           products are cheap up to CO = 512.
// Grid      (row blocks, column blocks). A block has the weights of BN columns of y in shared memory for good and walks over tiles of
//           BM rows, gridDim.x apart, whose dz passes through a ring of STAGES chunks of 16 * STEPS channels (cp.async). A
//           column of the weights lies there where a lane's sums of four products are 8 neighbouring channels (as in
//           pointwise_forward.cu): x, dy and g pass in 16-byte vectors between memory and registers, and a lane's sums are always of the
//           same channels. A tile's x and dy are asked for before its products, which hide the way.
// Numerics  fp32 sums on the tensor cores in a fixed order; g is rounded once, its sums are of what is not rounded. z is recomputed from
//           x by the forward's own expression, or read as its bit. Two runs are bit-equal.
// Limits    one group, M below 2^31; with a residual only activations whose slope is 0 or 1; sm_80.
//
// Set by the build: WARPS_M x WARPS_N warps; a warp makes TILES * 16 rows by 32 columns. CHUNKS chunks are all of CO.

#include "vector.cuh"
#include "overlap.cuh"
#include "activation.cuh"
#include "cp_async.cuh"
#include "mma.cuh"

#define THREADS (32 * WARPS_M * WARPS_N)
#define WARP_ROWS (TILES * 16)
#define BM (WARPS_M * WARP_ROWS)
#define BN (WARPS_N * 32)
#define UNITS (2 * STEPS)               // 16-byte units of a row of dz in a chunk
#define PITCH (UNITS | 1)               // odd: the 8 rows of an ldmatrix matrix lie in 32 different banks
#define WEIGHT_ROWS (CHUNKS * STEPS * 16)
#define WEIGHT_PITCH (BN / 8 | 1)
#define STAGE (BM * PITCH)
#define LOADS ((BM * UNITS + THREADS - 1) / THREADS)
#define MASKED (RESIDUAL && ACT != 0)
#define SLOPED (!RESIDUAL && ACT != 0)  // the slope is recomputed from x
#define CONSTANTS (SLOPED ? 3 : 1)      // of a channel: mean; scale and offset
#if STORAGE == 1
#define MMA mma_f16
#else
#define MMA mma_bf16
#endif

// Which of a group's 32 columns is in place p: product p / 8 gives lane t its columns 8 t + 2 (p / 8) and the next.
__device__ __forceinline__ int column_of(int p) { return p % 8 / 2 * 8 + p / 8 * 2 + p % 2; }

// 8 channels' constants from shared memory.
__device__ __forceinline__ void constants(const float* at, float (&f)[VEC]) {
#pragma unroll
  for (int j = 0; j < VEC; j += 4) {
    const float4 v = *(const float4*)(at + j);
    f[j] = v.x, f[j + 1] = v.y, f[j + 2] = v.z, f[j + 3] = v.w;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) pointwise_norm_gradient(
    const Vec16* __restrict__ dz, const unsigned int* __restrict__ weight, const Vec16* __restrict__ dy, const Vec16* __restrict__ x,
    const unsigned char* __restrict__ mask, const float* __restrict__ saved, const float* __restrict__ norm_weight,
    const float* __restrict__ norm_bias, Vec16* __restrict__ gradient, float* __restrict__ sums, int rows, int out_units, int in_units,
    float slope) {
  overlap_launches();
  extern __shared__ __align__(16) Vec16 shared[];
  Vec16* weights = shared;                                 // [WEIGHT_ROWS][WEIGHT_PITCH]
  Vec16* ring = weights + WEIGHT_ROWS * WEIGHT_PITCH;      // [STAGES][BM][PITCH]
  float* channel = (float*)(ring + STAGES * STAGE);        // [CONSTANTS][BN]
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int wm = warp % WARPS_M, wn = warp / WARPS_M;
  const int tiles = (rows + BM - 1) / BM, channels = in_units * 8;

  for (int i = threadIdx.x; i < WEIGHT_ROWS * (BN / 2); i += THREADS) {  // two neighbouring columns at once
    const int o = i / (BN / 2), p = i % (BN / 2) * 2;
    const int column = blockIdx.y * BN + p / 32 * 32 + column_of(p % 32);
    const bool inside = column < channels && o < out_units * 8;
    const unsigned int* from = inside ? weight + ((i64)o * channels + column) / 2 : weight;
    cp_async4((unsigned int*)(weights + o * WEIGHT_PITCH) + p / 2, from, inside);
  }
  cp_async_commit();
  for (int i = threadIdx.x; i < BN; i += THREADS) {
    const int c = blockIdx.y * BN + i;
    const bool inside = c < channels;
    channel[i] = inside ? saved[c] : 0.f;
#if SLOPED
    channel[BN + i] = inside ? saved[channels + c] * norm_weight[c] : 0.f;
    channel[2 * BN + i] = inside ? norm_bias[c] : 0.f;
#endif
  }

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
        const bool inside = r < rows - begin && at + u < out_units;
        cp_async16(to + r * PITCH + u, inside ? dz + (i64)(begin + r) * out_units + at + u : dz, inside);
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

  // Lane's row of each ldmatrix. dz: (rows 0-7, k 0-7) (rows 8-15, k 0-7) (rows 0-7, k 8-15) (rows 8-15, k 8-15); weights, transposed:
  // (k 0-7, columns 0-7) (k 8-15, columns 0-7) (k 0-7, columns 8-15) (k 8-15, columns 8-15), two products' fragments.
  const int dz_at = (wm * WARP_ROWS + lane % 16) * PITCH + lane / 16;
  const Vec16* weights_at = weights + lane % 16 * WEIGHT_PITCH + wn * 4 + lane / 16;
  const int unit = blockIdx.y * (BN / 8) + wn * 4 + t;  // of y
  const float* mine = channel + wn * 32 + t * 8;
  const bool owner = unit < in_units;
  int stage = 0;
  float sum[VEC], product[VEC];
#pragma unroll
  for (int j = 0; j < VEC; ++j) sum[j] = product[j] = 0.f;

  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int begin = tile * BM + wm * WARP_ROWS + g;
    const i64 first = (i64)begin * in_units + unit;
    Vec16 vx[TILES][2];
#if FORK
    Vec16 vy[TILES][2];
#endif
#if MASKED
    unsigned int bits[TILES][2];
#endif
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = m * 16 + half * 8;
        if (!owner || row >= rows - begin) continue;
        const i64 at = first + (i64)row * in_units;
        vx[m][half] = load(x + at);
#if FORK
        vy[m][half] = load_last(dy + at);
#endif
#if MASKED
        bits[m][half] = mask[at];
#endif
      }

    float d[TILES][4][4];
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
      for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) d[m][n][e] = 0.f;
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
      cp_async_wait<STAGES - 2>();
      __syncthreads();
      fetch();
      const Vec16* dz_row = ring + stage * STAGE + dz_at;
      const Vec16* weights_row = weights_at + chunk * (STEPS * 16 * WEIGHT_PITCH);
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        unsigned int a[TILES][4];
#pragma unroll
        for (int m = 0; m < TILES; ++m) ldmatrix_x4(a[m], dz_row + m * 16 * PITCH + 2 * step);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          unsigned int both[4];
          ldmatrix_x4_trans(both, weights_row + step * 16 * WEIGHT_PITCH + 2 * n);
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

    float mean[VEC];
    constants(mine, mean);
#if SLOPED
    float scale[VEC], offset[VEC];
    constants(mine + BN, scale);
    constants(mine + 2 * BN, offset);
#endif
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = m * 16 + half * 8;
        if (!owner || row >= rows - begin) continue;
        float f[VEC], away[VEC];
        widen(vx[m][half], away);
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
          f[j] = d[m][j / 2][2 * half + j % 2];
          away[j] -= mean[j];
        }
#if FORK
        float other[VEC];
        widen(vy[m][half], other);
#pragma unroll
        for (int j = 0; j < VEC; ++j) f[j] += other[j];
#endif
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
#if MASKED
          f[j] = (bits[m][half] >> j) & 1u ? f[j] : 0.f;
#elif SLOPED
          f[j] = through(f[j], away[j] * scale[j] + offset[j], slope);
#endif
          sum[j] += f[j];
          product[j] += f[j] * away[j];
        }
        store(gradient + first + (i64)row * in_units, narrow(f));
      }
  }

  // Lanes of a warp, then the warps above each other: all in a fixed order.
#pragma unroll
  for (int lanes = 4; lanes < 32; lanes *= 2)
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      sum[j] += __shfl_xor_sync(0xffffffffu, sum[j], lanes);
      product[j] += __shfl_xor_sync(0xffffffffu, product[j], lanes);
    }
  cp_async_wait<0>();
  __syncthreads();  // the weights are read: in their place come [WARPS_M][2][BN] sums
  float* parts = (float*)shared;
  if (g == 0) {
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      const int column = wn * 32 + t * 8 + j;
      parts[2 * wm * BN + column] = sum[j];
      parts[(2 * wm + 1) * BN + column] = product[j];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 2 * BN; i += THREADS) {
    const int c = blockIdx.y * BN + i % BN;
    if (c >= channels) continue;
    float all = 0.f;
    for (int w = 0; w < WARPS_M; ++w) all += parts[2 * w * BN + i];
    sums[((i64)blockIdx.x * 2 + i / BN) * channels + c] = all;
  }
}
