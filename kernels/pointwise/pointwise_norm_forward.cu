// Second pass of a batch norm (+ residual) + activation, and the 1 x 1 convolution of stride 1 that reads its result, in one.
//
//   y[m,c] = act((x - mean) * norm_weight * invstd + norm_bias (+ residual))[m,c]        z[m,o] = sum_c w[o,c] * y[m,c], rounded
//
// Shapes    x, residual, y: [M, CI], z: [M, CO] with M = N*H*W (NHWC), fp16 or bf16; CI = 8 * UNITS; weight: [CO, CI] in the same
//           dtype, CO a multiple of 8 and at most 32 * WARPS_N; saved: [2, CI] fp32, mean and inverse standard deviation; norm_weight,
//           norm_bias: [CI] fp32; mask: as batchnorm_act_forward.cu writes it. moments: [gridDim.x][3][CO] fp32, see include/moments.cuh.
// Replaces  batchnorm_act_apply, and behind it aten::convolution with 1 x 1 taps, which reads y again; with MOMENTS also the pass over
//           z in which the next norm takes its statistics.
// Bytes     x and residual once, y and z once. ResNet-50's 256 -> 64 at 256x56x56 in bf16: 3 * 411 + 103 MB and 26 of mask.
// Flops     2 * CI * CO a row: 26 G there.
// Bound     DRAM bandwidth: 0.32 ms there at 4.24 TB/s.
// Grid      row blocks, one an SM. A block has all weights in shared memory for good and walks over tiles of BM rows, gridDim.x apart. A
//           thread always has the same 8 channels, whose constants stay in registers: it makes y of what it has asked for a
//           tile before, stores it, puts it into one of two buffers, asks for the next tile, and then WARPS_M x WARPS_N of the warps
//           multiply the buffer, 16 rows by 32 columns each. So loads are under way during the products.
// Numerics  z before the activation as in batchnorm_act_forward.cu, whose bits these are; products of y as it is stored, summed in fp32 on
//           the tensor cores in a fixed order, rounded once. Moments of the rounded values. Two runs are bit-equal.
// Limits    one group, M below 2^31; THREADS a multiple of UNITS, BM * UNITS of THREADS; sm_80.

#include "vector.cuh"
#include "overlap.cuh"
#include "activation.cuh"
#include "cp_async.cuh"
#include "mma.cuh"
#if MOMENTS
#include "moments.cuh"
#endif

#define BM (16 * WARPS_M)
#define BN (32 * WARPS_N)
#define PITCH (UNITS | 1)  // odd: the 8 rows of an ldmatrix matrix lie in 32 different banks
#define STEPS (UNITS / 2)
#define AT_ONCE (THREADS / UNITS)  // rows
#define EACH (BM / AT_ONCE)        // rows of a thread
#if STORAGE == 1
#define MMA mma_f16
#else
#define MMA mma_bf16
#endif

// Which of a group's 32 columns its row p in shared memory is: product p / 8 gives lane t its columns 8 t + 2 (p / 8) and the next.
__device__ __forceinline__ int column_of(int p) { return p % 8 / 2 * 8 + p / 8 * 2 + p % 2; }

// Sums over the lanes that share their channels, in a fixed order.
__device__ __forceinline__ float over_rows(float v) {
#pragma unroll
  for (int lanes = 4; lanes < 32; lanes *= 2) v += __shfl_xor_sync(0xffffffffu, v, lanes);
  return v;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) pointwise_norm_forward(
    const Vec16* __restrict__ x, const Vec16* __restrict__ residual, const float* __restrict__ saved,
    const float* __restrict__ norm_weight, const float* __restrict__ norm_bias, const Vec16* __restrict__ weight, Vec16* __restrict__ y,
    unsigned char* __restrict__ mask, Vec16* __restrict__ z,
#if MOMENTS
    float* __restrict__ moments,
#endif
    int rows, int out_units, float slope) {
  overlap_launches();
  extern __shared__ __align__(16) Vec16 shared[];
  Vec16* weights = shared;                 // [BN][PITCH]
  Vec16* buffers = weights + BN * PITCH;   // [2][BM][PITCH]
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int wm = warp % WARPS_M, wn = warp / WARPS_M;
  const bool multiplies = warp < WARPS_M * WARPS_N;
  const int tiles = (rows + BM - 1) / BM;

  for (int i = threadIdx.x; i < BN * UNITS; i += THREADS) {
    const int p = i / UNITS, u = i % UNITS, column = p / 32 * 32 + column_of(p % 32);
    const bool inside = column < out_units * 8;
    cp_async16(weights + p * PITCH + u, inside ? weight + (i64)column * UNITS + u : weight, inside);
  }
  cp_async_commit();

  const int unit = threadIdx.x % UNITS, first = threadIdx.x / UNITS;
  float mean[VEC], scale[VEC], offset[VEC];
#pragma unroll
  for (int j = 0; j < VEC; ++j) {
    const int c = unit * VEC + j;
    mean[j] = saved[c];
    scale[j] = saved[UNITS * VEC + c] * norm_weight[c];
    offset[j] = norm_bias[c];
  }

  Vec16 vx[EACH];
#if RESIDUAL
  Vec16 vr[EACH];
#endif
  auto ask = [&](int tile) {
    const int begin = tile * BM + first;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int row = i * AT_ONCE;
      if (tile >= tiles || row >= rows - begin) continue;
      const i64 at = (i64)(begin + row) * UNITS + unit;
      vx[i] = load(x + at);
#if RESIDUAL
      vr[i] = load(residual + at);
#endif
    }
  };
  ask(blockIdx.x);

#if MOMENTS
  float* shift = (float*)(buffers + 2 * BM * PITCH);  // [BN]: the block's first row
  float sum[VEC], square[VEC], about[VEC];            // of distances from it
#pragma unroll
  for (int j = 0; j < VEC; ++j) sum[j] = square[j] = about[j] = 0.f;
  int count = 0;
#endif
  const Vec16* a_at = buffers + (wm * 16 + lane % 16) * PITCH + lane / 16;
  const Vec16* weights_at = weights + (wn * 32 + lane / 16 * 8 + lane % 8) * PITCH + lane / 8 % 2;
  const int out_unit = wn * 4 + t;
  int which = 0;

  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    Vec16* buffer = buffers + which * BM * PITCH;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int row = first + i * AT_ONCE;
      Vec16 v = {{0u, 0u, 0u, 0u}};
      if (row < rows - tile * BM) {
        const i64 at = ((i64)tile * BM + row) * UNITS + unit;
        float f[VEC];
        widen(vx[i], f);
#if RESIDUAL
        float r[VEC];
        widen(vr[i], r);
        unsigned int bits = 0;
#endif
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
          float s = (f[j] - mean[j]) * scale[j] + offset[j];
#if RESIDUAL
          s += r[j];
          bits |= (lives(s) ? 1u : 0u) << j;
#endif
          f[j] = activate(s, slope);
        }
        v = narrow(f);
        store(y + at, v);
#if RESIDUAL && ACT != 0
        mask[at] = (unsigned char)bits;
#endif
      }
      buffer[row * PITCH + unit] = v;
    }
    ask(tile + gridDim.x);
    if (tile == blockIdx.x) cp_async_wait<0>();
    __syncthreads();  // the other buffer is free behind the next one: who multiplies it comes here first

    float d[4][4];
    if (multiplies) {
#pragma unroll
      for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) d[n][e] = 0.f;
      const Vec16* a_row = a_at + which * BM * PITCH;
#pragma unroll 4
      for (int step = 0; step < STEPS; ++step) {
        unsigned int a[4];
        ldmatrix_x4(a, a_row + 2 * step);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          unsigned int both[4];
          ldmatrix_x4(both, weights_at + n * 16 * PITCH + 2 * step);
          const unsigned int b[2][2] = {{both[0], both[1]}, {both[2], both[3]}};
          MMA(d[2 * n], a, b[0]);
          MMA(d[2 * n + 1], a, b[1]);
        }
      }
    }
    which ^= 1;

    const int begin = tile * BM + wm * 16 + g;
#if MOMENTS
    if (tile == blockIdx.x) {
      if (multiplies && wm == 0 && g == 0) {
        const float f[VEC] = {d[0][0], d[0][1], d[1][0], d[1][1], d[2][0], d[2][1], d[3][0], d[3][1]};
        float stored[VEC];
        widen(narrow(f), stored);
#pragma unroll
        for (int j = 0; j < VEC; ++j) shift[wn * 32 + t * 8 + j] = finite_or_zero(stored[j]);
      }
      __syncthreads();
      if (multiplies) {
#pragma unroll
        for (int j = 0; j < VEC; ++j) about[j] = shift[wn * 32 + t * 8 + j];
      }
    }
#endif
    if (multiplies) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (half * 8 >= rows - begin || out_unit >= out_units) continue;
        const int e = 2 * half;
        const float f[VEC] = {d[0][e], d[0][e + 1], d[1][e], d[1][e + 1], d[2][e], d[2][e + 1], d[3][e], d[3][e + 1]};
        const Vec16 v = narrow(f);
        store(z + (i64)(begin + half * 8) * out_units + out_unit, v);
#if MOMENTS
        float stored[VEC];
        widen(v, stored);
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
          const float distance = stored[j] - about[j];
          sum[j] += distance;
          square[j] += distance * distance;
        }
        ++count;
#endif
      }
    }
  }

#if MOMENTS
  __syncthreads();  // the weights are read: in their place come [WARPS_M][2][BN] sums and [WARPS_M][WARPS_N] counts
  float* sums = (float*)shared;
  int* counts = (int*)(sums + 2 * WARPS_M * BN);
  if (multiplies) {
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) count += __shfl_xor_sync(0xffffffffu, count, lanes);
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      const float s = over_rows(sum[j]), q = over_rows(square[j]);
      if (g == 0) {
        sums[2 * wm * BN + wn * 32 + t * 8 + j] = s;
        sums[(2 * wm + 1) * BN + wn * 32 + t * 8 + j] = q;
      }
    }
    if (lane == 0) counts[wm * WARPS_N + wn] = count;  // lanes of the first channels, which every warp's have
  }
  __syncthreads();
  for (int column = threadIdx.x; column < out_units * 8; column += THREADS) {
    float s = 0.f, q = 0.f;
    int n = 0;
    for (int w = 0; w < WARPS_M; ++w) {
      s += sums[2 * w * BN + column];
      q += sums[(2 * w + 1) * BN + column];
      n += counts[w * WARPS_N + column / 32];
    }
    leave_moments(moments, blockIdx.x, out_units * 8, column, n, shift[column], s, q);
  }
#endif
}
