// Casts of many tensors in one launch: fp32 to half precision, or with WIDENS back.
//
//   to[t][i] = from[t][i], rounded to nearest even
//
// Shapes    `count` dense tensors of `elements[t]` values each, in any order of dimensions that from and to share; the one fp32, the
//           other fp16 (STORAGE 1) or bf16 (2). A launch takes up to TENSORS.
// Replaces  aten::_foreach_copy_ (one multi-tensor launch, 65,536 values a block), aten::_to_copy of each weight and each gradient.
// Bytes     6 a value: 4 of the one, 2 of the other. The 11.2 M weights of a ResNet-18: 67 MB.
// Bound     DRAM bandwidth: 0.016 ms there at 4.24 TB/s. What the optimizer has just written, or the backward, may still be in L2.
// Grid      one dimension: a block has CHUNK values of one tensor, 4 a thread and load, UNROLL loads under way. begin[t] is the first
//           block of tensor t, which a block looks up by halves; those of absent tensors lie behind the grid.
// Numerics  one rounding, or none.
// Limits    fewer than 2^31 values a tensor; addresses are multiples of 16 bytes.

#include "vector.cuh"
#include "overlap.cuh"
#include "half.cuh"

#define CHUNK (THREADS * 4 * UNROLL)

struct Table {
  const void* from[TENSORS];
  void* to[TENSORS];
  int begin[TENSORS];
  int elements[TENSORS];
};

struct __align__(8) Halves { unsigned int w[2]; };

#if STORAGE == 1
#define NARROWED narrow_f16x2
#define WIDENED widen_f16
#else
#define NARROWED narrow_bf16x2
#define WIDENED widen_bf16
#endif

#if WIDENS
typedef Halves From;
typedef Vec16 To;
typedef unsigned short FromOne;
typedef float ToOne;
__device__ __forceinline__ Vec16 cast(const Halves& v) {
  Vec16 found;
#pragma unroll
  for (int i = 0; i < 4; ++i) found.w[i] = __float_as_uint(WIDENED((unsigned short)(v.w[i / 2] >> 16 * (i % 2) & 0xffffu)));
  return found;
}
__device__ __forceinline__ float cast(unsigned short v) { return WIDENED(v); }
#else
typedef Vec16 From;
typedef Halves To;
typedef float FromOne;
typedef unsigned short ToOne;
__device__ __forceinline__ Halves cast(const Vec16& v) {
  return {NARROWED(__uint_as_float(v.w[0]), __uint_as_float(v.w[1])), NARROWED(__uint_as_float(v.w[2]), __uint_as_float(v.w[3]))};
}
__device__ __forceinline__ unsigned short cast(float v) { return (unsigned short)NARROWED(v, 0.f); }
#endif

extern "C" __global__ void __launch_bounds__(THREADS) cast_tensors(const __grid_constant__ Table table) {
  overlap_launches();
  const int block = blockIdx.x;
  int t = 0;
#pragma unroll
  for (int step = TENSORS / 2; step > 0; step /= 2)
    if (table.begin[t + step] <= block) t += step;
  const int elements = table.elements[t], first = (block - table.begin[t]) * CHUNK, fours = elements / 4;
  const From* from = (const From*)table.from[t];
  To* to = (To*)table.to[t];
  From v[UNROLL];
#pragma unroll
  for (int i = 0; i < UNROLL; ++i) {
    const int at = first / 4 + i * THREADS + threadIdx.x;
    if (at < fours) v[i] = from[at];
  }
#pragma unroll
  for (int i = 0; i < UNROLL; ++i) {
    const int at = first / 4 + i * THREADS + threadIdx.x;
    if (at < fours) to[at] = cast(v[i]);
  }
  const int rest = fours * 4 + threadIdx.x;
  if (rest >= first && rest < elements && rest - first < CHUNK) ((ToOne*)to)[rest] = cast(((const FromOne*)from)[rest]);
}
