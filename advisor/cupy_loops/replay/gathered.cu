// A product of two matrices that nobody has laid out: c[m, n] = sum over k of a[m, k] b[k, n].
//
// Element (m, k) of a lies at a[rows_a[m] + depth_a[k]], (k, n) of b at b[depth_b[k] + columns_b[n]], (m, n) of c at
// c[rows_c[m] + columns_c[n]]: the tables tell of arrays of any dimensions and strides, windows over images among them. So a convolution reads
// its image and makes no columns of it.
//
// fp32. Without TF32 each term is one fp32 fma; with it both operands are rounded to TF32 (10 bits, ties away from zero) and summed in fp32 on
// tensor cores. Grid: tiles of n, tiles of m, parts of the depth; each part of `each` terms writes an m x n matrix of its own, which
// gathered_parts adds in order. Bytes: each operand once for each tile of the other; what limits it is the fma or tensor rate.
//
// BM, BN: a tile of c; TM, TN: of a thread, in pieces of four at most; A_DEEP, B_DEEP: neighbours in memory are neighbours along k.
// WARPS_DOWN: of eight, with TF32. Offsets are 32-bit: the launcher refuses arrays that reach further.

#include "mma.cuh"

#define THREADS 256
#define BK 16
#define CHUNK 512  // terms whose offsets are in shared memory at a time
#define ROOM (TF32 ? 8 : 4)  // floats behind each row of a tile, so that banks differ and rows stay aligned

#define MIN_OF(a, b) ((a) < (b) ? (a) : (b))
#define STEP_M MIN_OF(TM, 4)
#define STEP_N MIN_OF(TN, 4)
#define MORE_A (BM * BK / THREADS)  // elements of a tile that a thread brings
#define MORE_B (BN * BK / THREADS)
#define WARPS_ACROSS (8 / WARPS_DOWN)
#define MMA_DOWN (BM / WARPS_DOWN / 16)
#define MMA_ACROSS (BN / WARPS_ACROSS / 8)

struct Tiles {
  float a[2][BK][BM + ROOM];
  float b[2][BK][BN + ROOM];
};

__device__ __forceinline__ float rounded(float f) {
#if TF32
  return __uint_as_float(to_tf32(f));
#else
  return f;
#endif
}

// Two or four neighbours at once: the compiler cannot tell that they are aligned.
__device__ __forceinline__ void take(float (&to)[2], const float* from) {
  const float2 v = *(const float2*)from;
  to[0] = v.x, to[1] = v.y;
}
__device__ __forceinline__ void take(float (&to)[4], const float* from) {
  const float4 v = *(const float4*)from;
  to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) gathered(
    const float* __restrict__ a, const float* __restrict__ b, float* __restrict__ c, const int* __restrict__ rows_a,
    const int* __restrict__ depth_a, const int* __restrict__ depth_b, const int* __restrict__ columns_b,
    const int* __restrict__ rows_c, const int* __restrict__ columns_c, int m, int n, int k, int each, int wide) {
  __shared__ __align__(16) Tiles tiles;
  __shared__ int at_a[CHUNK], at_b[CHUNK];
  const int tid = threadIdx.x, first_m = blockIdx.y * BM, first_n = blockIdx.x * BN;
  const int first = blockIdx.z * each, last = MIN_OF(k, first + each);
  c += (long long)blockIdx.z * m * n;

  // Which elements of a tile this thread brings: of a, MORE_A from (a_k, a_m) on, A_DEEP down the rows, else down the depth.
#if A_DEEP
  const int a_k = tid % BK, a_m = tid / BK;
  int of_a[MORE_A];
#pragma unroll
  for (int i = 0; i < MORE_A; ++i) of_a[i] = rows_a[MIN_OF(first_m + a_m + i * (THREADS / BK), m - 1)];
#else
  const int a_m = tid % BM, a_k = tid / BM;
  const int of_a = rows_a[MIN_OF(first_m + a_m, m - 1)];
#endif
#if B_DEEP
  const int b_k = tid % BK, b_n = tid / BK;
  int of_b[MORE_B];
#pragma unroll
  for (int i = 0; i < MORE_B; ++i) of_b[i] = columns_b[MIN_OF(first_n + b_n + i * (THREADS / BK), n - 1)];
#else
  const int b_n = tid % BN, b_k = tid / BN;
  const int of_b = columns_b[MIN_OF(first_n + b_n, n - 1)];
#endif

  float next_a[MORE_A], next_b[MORE_B];
  // What lies behind the last term is zero in both, so that no infinity of the script's becomes a NaN.
  auto bring = [&](int from, int chunk) {
#if A_DEEP
    const bool there_a = from + a_k < last;
    const int deep_a = at_a[from + a_k - chunk];
#pragma unroll
    for (int i = 0; i < MORE_A; ++i) next_a[i] = there_a ? a[of_a[i] + deep_a] : 0.f;
#else
#pragma unroll
    for (int i = 0; i < MORE_A; ++i) {
      const int depth = from + a_k + i * (THREADS / BM);
      next_a[i] = depth < last ? a[of_a + at_a[depth - chunk]] : 0.f;
    }
#endif
#if B_DEEP
    const bool there_b = from + b_k < last;
    const int deep_b = at_b[from + b_k - chunk];
#pragma unroll
    for (int i = 0; i < MORE_B; ++i) next_b[i] = there_b ? b[of_b[i] + deep_b] : 0.f;
#else
#pragma unroll
    for (int i = 0; i < MORE_B; ++i) {
      const int depth = from + b_k + i * (THREADS / BN);
      next_b[i] = depth < last ? b[of_b + at_b[depth - chunk]] : 0.f;
    }
#endif
  };
  auto put = [&](int which) {
#pragma unroll
    for (int i = 0; i < MORE_A; ++i) {
#if A_DEEP
      tiles.a[which][a_k][a_m + i * (THREADS / BK)] = rounded(next_a[i]);
#else
      tiles.a[which][a_k + i * (THREADS / BM)][a_m] = rounded(next_a[i]);
#endif
    }
#pragma unroll
    for (int i = 0; i < MORE_B; ++i) {
#if B_DEEP
      tiles.b[which][b_k][b_n + i * (THREADS / BK)] = rounded(next_b[i]);
#else
      tiles.b[which][b_k + i * (THREADS / BN)][b_n] = rounded(next_b[i]);
#endif
    }
  };

#if TF32
  const int lane = tid % 32, warp = tid / 32, g = lane / 4, t = lane % 4;
  const int warp_m = warp / WARPS_ACROSS * (BM / WARPS_DOWN), warp_n = warp % WARPS_ACROSS * (BN / WARPS_ACROSS);
  float total[MMA_DOWN][MMA_ACROSS][4] = {};
#else
  const int thread_n = tid % (BN / TN) * STEP_N, thread_m = tid / (BN / TN) * STEP_M;
  float total[TM][TN] = {};
#endif

  for (int chunk = first; chunk < last; chunk += CHUNK) {
    const int end = MIN_OF(last, chunk + CHUNK);
    __syncthreads();
    for (int i = tid; i < CHUNK; i += THREADS) {
      at_a[i] = chunk + i < last ? depth_a[chunk + i] : 0;
      at_b[i] = chunk + i < last ? depth_b[chunk + i] : 0;
    }
    __syncthreads();
    bring(chunk, chunk);
    put(0);
    __syncthreads();
    int which = 0;
    for (int from = chunk; from < end; from += BK, which ^= 1) {
      const bool more = from + BK < end;
      if (more) bring(from + BK, chunk);
#if TF32
#pragma unroll
      for (int depth = 0; depth < BK; depth += MMA_K_TF32) {
        unsigned int left[MMA_DOWN][4], right[MMA_ACROSS][2];
#pragma unroll
        for (int i = 0; i < MMA_DOWN; ++i)
#pragma unroll
          for (int r = 0; r < 4; ++r)
            left[i][r] = __float_as_uint(tiles.a[which][depth + t + r / 2 * 4][warp_m + i * 16 + g + r % 2 * 8]);
#pragma unroll
        for (int j = 0; j < MMA_ACROSS; ++j)
#pragma unroll
          for (int r = 0; r < 2; ++r)
            right[j][r] = __float_as_uint(tiles.b[which][depth + t + r * 4][warp_n + j * 8 + g]);
#pragma unroll
        for (int i = 0; i < MMA_DOWN; ++i)
#pragma unroll
          for (int j = 0; j < MMA_ACROSS; ++j) mma_tf32(total[i][j], left[i], right[j]);
      }
#else
#pragma unroll
      for (int depth = 0; depth < BK; ++depth) {
        float left[TM / STEP_M][STEP_M], right[TN / STEP_N][STEP_N];
#pragma unroll
        for (int i = 0; i < TM / STEP_M; ++i) take(left[i], &tiles.a[which][depth][thread_m + i * (BM / (TM / STEP_M))]);
#pragma unroll
        for (int j = 0; j < TN / STEP_N; ++j) take(right[j], &tiles.b[which][depth][thread_n + j * (BN / (TN / STEP_N))]);
#pragma unroll
        for (int i = 0; i < TM; ++i)
#pragma unroll
          for (int j = 0; j < TN; ++j)
            total[i][j] = fmaf(left[i / STEP_M][i % STEP_M], right[j / STEP_N][j % STEP_N], total[i][j]);
      }
#endif
      if (more) put(which ^ 1);
      __syncthreads();
    }
  }

#if TF32
#pragma unroll
  for (int i = 0; i < MMA_DOWN; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_m + warp_m + i * 16 + g + half * 8;
      if (row >= m) continue;
      float* to = c + rows_c[row];
#pragma unroll
      for (int j = 0; j < MMA_ACROSS; ++j) {
        const int column = first_n + warp_n + j * 8 + t * 2;
        if (wide && column + 1 < n) {
          *(float2*)(to + columns_c[column]) = make_float2(total[i][j][half * 2], total[i][j][half * 2 + 1]);
        } else {
          if (column < n) to[columns_c[column]] = total[i][j][half * 2];
          if (column + 1 < n) to[columns_c[column + 1]] = total[i][j][half * 2 + 1];
        }
      }
    }
#else
#pragma unroll
  for (int i = 0; i < TM; ++i) {
    const int row = first_m + thread_m + i % STEP_M + i / STEP_M * (BM / (TM / STEP_M));
    if (row >= m) continue;
    float* to = c + rows_c[row];
#pragma unroll
    for (int j = 0; j < TN; j += 4) {
      const int column = first_n + thread_n + j / STEP_N * (BN / (TN / STEP_N));
      if (wide && column + 3 < n) {
        *(float4*)(to + columns_c[column]) = make_float4(total[i][j], total[i][j + 1], total[i][j + 2], total[i][j + 3]);
      } else {
#pragma unroll
        for (int q = 0; q < 4; ++q)
          if (column + q < n) to[columns_c[column + q]] = total[i][j + q];
      }
    }
  }
#endif
}

// c[m, n] = the sum of the parts' matrices, in their order.
extern "C" __global__ void __launch_bounds__(THREADS) gathered_parts(
    const float* __restrict__ parts, float* __restrict__ c, const int* __restrict__ rows_c, const int* __restrict__ columns_c,
    int m, int n, int count) {
  const long long size = (long long)m * n;
  for (long long i = blockIdx.x * (long long)THREADS + threadIdx.x; i < size; i += gridDim.x * (long long)THREADS) {
    float total = 0.f;
    for (int part = 0; part < count; ++part) total += parts[part * size + i];
    c[rows_c[i / n] + columns_c[i % n]] = total;
  }
}
