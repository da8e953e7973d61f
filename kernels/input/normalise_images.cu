// uint8 images to normalised floating-point ones.
//
//   y[n,c,h,w] = table[c][x[n,c,h,w]]
//
// The table holds the 256 values that the script's own transforms (ToTensor, Normalize …) make of each channel, computed by them:
// the results are theirs bit for bit, whichever operations they use and in whichever order.
//
// Shapes    x: [N, P, C] (X_NHWC 1, what an image file decodes to) or [N, C, P] (0), P = H*W, uint8; table: [C, 256] fp32;
//           y: the same orders by Y_NHWC, fp32, fp16 or bf16 by STORAGE; C = CHANNELS is 1 or 3. Not x by planes with y by pixels.
// Replaces  aten::_to_copy, div, sub, div, contiguous, _to_copy on the GPU; on the CPU, ToTensor and Normalize in the workers, a
//           host-to-device copy of four times the bytes, and the pinning of it.
// Bytes     x once, y once: a pixel of 3 channels takes 3 + 12 (fp32) or 3 + 6. A 256x3x224x224 batch to fp32: 193 MB.
// Bound     DRAM bandwidth: 0.046 ms there at 4.24 TB/s. Its copy over PCIe 5 takes 0.8 ms, on whose stream this runs.
// Grid      one dimension, THREADS a block; a thread makes UNROLL groups, each WIDTH pixels of all channels (NHWC to NCHW) or
//           WIDTH elements (same order), as many as give a 16-byte store: every store of a warp is contiguous. WIDTH 1 where
//           planes or pointers are not aligned. 3 or 4 to 8 bytes a load, UNROLL groups of them in flight.
// Numerics  a table lookup in shared memory (3 KiB; random bytes meet in a bank about three at a time, which stays below the
//           time of the stores), rounded once to 16 bits.
// Limits    N*P*C < 2^31.

#include "vector.cuh"
#include "overlap.cuh"
#include "half.cuh"

#ifndef UNROLL
#define UNROLL 4
#endif

#if STORAGE == 0
typedef float Element;
#else
typedef unsigned short Element;
#endif

// WIDTH bytes that one load reads.
struct Bytes {
#if WIDTH == 1
  unsigned char b[1];
  __device__ __forceinline__ int at(int) const { return b[0]; }
#else
  unsigned int w[WIDTH / 4];
  __device__ __forceinline__ int at(int i) const { return w[i / 4] >> 8 * (i % 4) & 255u; }
#endif
};

__device__ __forceinline__ Bytes load_bytes(const unsigned char* p) {
  Bytes v;
#if WIDTH == 1
  v.b[0] = *p;
#elif WIDTH == 4
  v.w[0] = *reinterpret_cast<const unsigned int*>(p);
#else
  const unsigned long long pair = *reinterpret_cast<const unsigned long long*>(p);
  v.w[0] = (unsigned int)pair;
  v.w[1] = (unsigned int)(pair >> 32);
#endif
  return v;
}

__device__ __forceinline__ void store_group(Element* p, const float (&f)[WIDTH]) {
#if WIDTH > 1
  store(reinterpret_cast<Vec16*>(p), narrow(f));
#elif STORAGE == 0
  *p = f[0];
#elif STORAGE == 1
  *p = (unsigned short)narrow_f16x2(f[0], f[0]);
#else
  *p = (unsigned short)narrow_bf16x2(f[0], f[0]);
#endif
}

#define BY_PIXEL (CHANNELS > 1 && X_NHWC && !Y_NHWC)
#define READS (BY_PIXEL ? CHANNELS : 1)

extern "C" __global__ void __launch_bounds__(THREADS) normalise_images(
    const unsigned char* __restrict__ x, const float* __restrict__ table, Element* __restrict__ y, int groups,
    int groups_per_plane) {
  overlap_launches();
  __shared__ float values[CHANNELS * 256];
  for (int i = threadIdx.x; i < CHANNELS * 256; i += THREADS) values[i] = table[i];
  const i64 first = (i64)blockIdx.x * (THREADS * UNROLL) + threadIdx.x;
  Bytes in[UNROLL][READS];
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
    const i64 group = first + u * THREADS;
    if (group < groups) {
#pragma unroll
      for (int r = 0; r < READS; ++r) in[u][r] = load_bytes(x + (group * READS + r) * WIDTH);
    }
  }
  __syncthreads();
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
    const i64 at = first + u * THREADS;
    if (at >= groups) break;
    const int group = (int)at;
    float f[WIDTH];
#if BY_PIXEL
    const int image = group / groups_per_plane;
    Element* plane = y + ((i64)image * (CHANNELS * groups_per_plane) + (group - image * groups_per_plane)) * WIDTH;
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) {
#pragma unroll
      for (int k = 0; k < WIDTH; ++k) {
        const int byte = k * CHANNELS + c;
        f[k] = values[c * 256 + in[u][byte / WIDTH].at(byte % WIDTH)];
      }
      store_group(plane + (i64)c * groups_per_plane * WIDTH, f);
    }
#else
#if CHANNELS == 1
    const int row[1] = {0};
#elif Y_NHWC
    // Channels follow one another; the first element's is the phase.
    int row[CHANNELS];
    const int phase = (int)((i64)group * WIDTH % CHANNELS);
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) row[c] = (phase + c < CHANNELS ? phase + c : phase + c - CHANNELS) * 256;
#else
    const int row[1] = {group / groups_per_plane % CHANNELS * 256};
#endif
    const int rows = sizeof(row) / sizeof(row[0]);
#pragma unroll
    for (int k = 0; k < WIDTH; ++k) f[k] = values[row[k % rows] + in[u][0].at(k)];
    store_group(y + at * WIDTH, f);
#endif
  }
}
