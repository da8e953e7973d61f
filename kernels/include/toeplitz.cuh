// Rows of a plane as products with Toeplitz matrices on the tensor cores: what the kernels of large depthwise taps share.
//
// A plane is one channel of one image, [H, W], as in NCHW. It is staged in shared memory as 16-bit values with zeros around it. fp16 and bf16
// are staged as they are; fp32 is staged as two fp16 parts of the value times a power of two (PARTS 2, two_parts.cuh).
//
// Set by the build: STORAGE, WEIGHT_STORAGE (0 fp32, 1 fp16, 2 bf16), KH, KW, COPY elements a copy, THREADS.

#include "vector.cuh"
#include "half.cuh"
#include "two_parts.cuh"
#include "cp_async.cuh"
#include "mma.cuh"
#include "overlap.cuh"

#if STORAGE == 0
typedef float Element;
#define PARTS 2
#else
typedef unsigned short Element;
#define PARTS 1
#endif
#if WEIGHT_STORAGE == 0
typedef float Weight;
#else
typedef unsigned short Weight;
#endif
typedef unsigned short Half;

#if STORAGE == 2
#define MMA mma_bf16
#else
#define MMA mma_f16
#endif

__device__ __forceinline__ float widen_element(Element e) {
#if STORAGE == 0
  return e;
#elif STORAGE == 1
  return widen_f16(e);
#else
  return widen_bf16(e);
#endif
}

__device__ __forceinline__ float widen_tap(Weight w) {
#if WEIGHT_STORAGE == 0
  return w;
#elif WEIGHT_STORAGE == 1
  return widen_f16(w);
#else
  return widen_bf16(w);
#endif
}

// Two results as they are stored, the first in the low half. Not of fp32.
__device__ __forceinline__ unsigned int narrow_pair(float low, float high) {
#if STORAGE == 2
  return narrow_bf16x2(low, high);
#else
  return narrow_f16x2(low, high);
#endif
}

struct __align__(8) Element8 { unsigned int w[2]; };

// ROWS rows by COLUMNS columns of a plane, from (row, column) on, to shared memory with PITCH values a row; zeros outside the plane. The
// low parts come `plane_of_low` values behind the high ones. Wait for the copies, and a barrier, before use.
template <int ROWS, int COLUMNS, int PITCH>
__device__ __forceinline__ void stage(
    Half* to, int plane_of_low, const Element* __restrict__ plane, bool present, int row, int column, int height, int width, float scale) {
  constexpr int across = COLUMNS / COPY;
#pragma unroll 4
  for (int i = threadIdx.x; i < ROWS * across; i += THREADS) {
    const int r = i / across, c = i % across * COPY;
    const int h = row + r, w = column + c;
    const bool inside = present && h >= 0 && h < height && w >= 0 && w < width;
    const Element* from = inside ? plane + h * width + w : plane;
    Half* at = to + r * PITCH + c;
#if STORAGE == 0
    float f[COPY];
#if COPY == 4
    Vec16 v = {{0u, 0u, 0u, 0u}};
    if (inside) v = *(const Vec16*)from;
    widen(v, f);
#elif COPY == 2
    Element8 v = {{0u, 0u}};
    if (inside) v = *(const Element8*)from;
    f[0] = __uint_as_float(v.w[0]), f[1] = __uint_as_float(v.w[1]);
#else
    f[0] = inside ? *from : 0.f;
#endif
#pragma unroll
    for (int e = 0; e < COPY; ++e) {
      const unsigned int parts = two_parts<false>(f[e] * scale);
      at[e] = (Half)(parts & 0xffffu);
      at[plane_of_low + e] = (Half)(parts >> 16);
    }
#elif COPY == 8
    cp_async16(at, from, inside);
#elif COPY == 4
    cp_async8(at, from, inside);
#elif COPY == 2
    cp_async4(at, from, inside);
#else
    *at = inside ? *from : (Half)0;
#endif
  }
}

// The largest finite magnitude of that part of a plane, of this thread's share.
template <int ROWS>
__device__ __forceinline__ unsigned int largest(const Element* __restrict__ plane, int row, int height, int width) {
  const int begin = row < 0 ? 0 : row, end = row + ROWS < height ? row + ROWS : height;
  unsigned int most = 0u;
  for (int i = begin * width + (int)threadIdx.x; i < end * width; i += THREADS) {
    const unsigned int found = magnitude(widen_element(plane[i]));
    most = found > most ? found : most;
  }
  return most;
}
