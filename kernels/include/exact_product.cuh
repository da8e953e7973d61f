// Products of fp32 matrices on the tensor cores, each operand in two fp16 parts (two_parts.cuh): a tile of BM by BN of a block.
//
// A warp makes BM / WARPS_M rows by BN / WARPS_N columns. For each 16 of the depth: low * high, high * low, high * high. The tensor cores cut
// what they add instead of rounding it, so that long sums drift; every PROMOTE stages of 32 the sums are taken over into others, by
// the fp32 pipes, which round.
//
// Set by the build: BM, BN, WARPS_M, WARPS_N, STAGES, PROMOTE.

#include "vector.cuh"
#include "half.cuh"
#include "two_parts.cuh"
#include "cp_async.cuh"
#include "mma.cuh"
#include "overlap.cuh"

#define THREADS (32 * WARPS_M * WARPS_N)
#define BK 32
#define UNITS (BK / 8)                     // 16-byte units of a stage's depth
#define TILES_M (BM / WARPS_M / 16)        // products of a warp, down and across
#define TILES_N (BN / WARPS_N / 8)

struct Sums {
  float of[TILES_M][TILES_N][4];
};

__device__ __forceinline__ void clear(Sums& s) {
#pragma unroll
  for (int m = 0; m < TILES_M; ++m)
#pragma unroll
    for (int n = 0; n < TILES_N; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) s.of[m][n][e] = 0.f;
}

__device__ __forceinline__ void add(Sums& total, const Sums& s) {
#pragma unroll
  for (int m = 0; m < TILES_M; ++m)
#pragma unroll
    for (int n = 0; n < TILES_N; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) total.of[m][n][e] += s.of[m][n][e];
}

// One step of 16: a(part, m, fragment) and b(part, n, fragments of n and n + 1) load from shared memory.
template <class A, class B>
__device__ __forceinline__ void step(Sums& s, A a, B b) {
  unsigned int right[2][TILES_N][2];
#pragma unroll
  for (int part = 0; part < 2; ++part)
#pragma unroll
    for (int n = 0; n < TILES_N; n += 2) {
      unsigned int both[4];
      b(part, n, both);
      right[part][n][0] = both[0], right[part][n][1] = both[1];
      right[part][n + 1][0] = both[2], right[part][n + 1][1] = both[3];
    }
#pragma unroll
  for (int m = 0; m < TILES_M; ++m) {
    unsigned int high[4], low[4];
    a(0, m, high);
    a(1, m, low);
#pragma unroll
    for (int n = 0; n < TILES_N; ++n) mma_f16(s.of[m][n], low, right[0][n]);
#pragma unroll
    for (int n = 0; n < TILES_N; ++n) mma_f16(s.of[m][n], high, right[1][n]);
#pragma unroll
    for (int n = 0; n < TILES_N; ++n) mma_f16(s.of[m][n], high, right[0][n]);
  }
}
