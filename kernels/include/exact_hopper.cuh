// Products of fp32 matrices on Hopper's tensor cores, each operand in two fp16 parts (two_parts.cuh): what the kernels of wgmma share.
//
// A block of GROUPS warpgroups makes 64 GROUPS rows by WGMMA_N columns; a stage holds 64 of the depth of both parts of both operands. For
// each 16 of the depth: low * high, high * low, high * high. The tensor cores cut what they add instead of rounding it, so that long sums
// drift; after each PROMOTE of the depth the sums are taken over into others, by the fp32 pipes, which round. While one warpgroup does that,
// another's products run.
//
// Set by the build: GROUPS, WGMMA_N, STAGES, PROMOTE (16, 32 or 64).

#define STORAGE 1
#include "vector.cuh"
#include "half.cuh"
#include "two_parts.cuh"
#include "cp_async.cuh"
#include "mbarrier.cuh"
#include "wgmma.cuh"
#include "overlap.cuh"

#define THREADS (128 * GROUPS)
#define DEPTH 64
#define ROWS (64 * GROUPS)
#define A_UNITS (ROWS * 8)       // 16 bytes of a part of a stage
#define B_UNITS (WGMMA_N * 8)
#define STAGE (2 * (A_UNITS + B_UNITS))
#define HALF_SUMS (WGMMA_N / 2)  // of a lane

// The 16-byte unit of a line of 128 bytes (wgmma.cuh).
__device__ __forceinline__ int swapped(int line, int unit) { return line * 8 + (unit ^ (line & 7)); }

// The products of a stage, taken over into `total`. `a`, `b`: high parts of this warpgroup's operands, low ones A_UNITS and B_UNITS units on.
// ALONG 0: 16 further is 32 bytes on; 1: 2048. `between` is done while the first products run.
template <int ALONG, class Between>
__device__ __forceinline__ void take_stage(float (&total)[HALF_SUMS], const Vec16* a, const Vec16* b, Between between) {
  constexpr int further = ALONG ? 2048 : 32;
  constexpr int next = DEPTH * 128;  // along: from 64 columns to the next 64
  const Operand a_high = operand_at<128>(a, 1024, next), a_low = operand_behind(a_high, A_UNITS * 16);
  const Operand b_high = operand_at<128>(b, 1024, next), b_low = operand_behind(b_high, B_UNITS * 16);
#pragma unroll
  for (int part = 0; part < DEPTH / PROMOTE; ++part) {
    float sum[HALF_SUMS];
    products_begin();
#pragma unroll
    for (int step = part * (PROMOTE / 16); step < (part + 1) * (PROMOTE / 16); ++step) {
      const int by = step * further;
      wgmma<ALONG, ALONG>(sum, operand_behind(a_low, by), operand_behind(b_high, by), step > part * (PROMOTE / 16));
      wgmma<ALONG, ALONG>(sum, operand_behind(a_high, by), operand_behind(b_low, by), 1);
      wgmma<ALONG, ALONG>(sum, operand_behind(a_high, by), operand_behind(b_high, by), 1);
    }
    products_close();
    if (part == 0) between();
    products_wait<0>();
#pragma unroll
    for (int i = 0; i < HALF_SUMS; ++i) total[i] += sum[i];
  }
}
