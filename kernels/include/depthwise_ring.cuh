// The depthwise kernels' pixels in flight: a thread copies the pixels of its own strip into its own places in shared memory, rows
// ahead, and waits for its own copies only. No barrier, and no register, stands between two warps or holds a pixel under way.
//
// DEPTH steps (rows, or pairs of rows) are in the ring, one of which is being worked on: set by the build.

#include "column_copy.cuh"
#include "cp_async.cuh"

// Bit v: whether column at + v lies in [0, width).
template <int columns>
__device__ __forceinline__ unsigned int columns_inside(int at, int width) {
  unsigned int inside = 0u;
#pragma unroll
  for (int v = 0; v < columns; ++v) inside |= (unsigned int)((unsigned int)(at + v) < (unsigned int)width) << v;
  return inside;
}

// Pixels that lie `pixel` bytes apart into chunks that lie THREADS apart; zeros when the row is not `valid`.
template <int columns>
__device__ __forceinline__ void copy_columns(
    SharedAddress to, const char* from, int pixel, unsigned int inside, bool valid = true) {
#pragma unroll
  for (int v = 0; v < columns; ++v)
    if (inside >> v & 1u) copy_chunk(to, v * THREADS, from, v, pixel, valid);
}

template <int columns>
__device__ __forceinline__ void clear_columns(Chunk* ring, unsigned int which) {
#pragma unroll
  for (int v = 0; v < columns; ++v)
    if (which >> v & 1u) ring[v * THREADS] = zero_chunk();
}

template <int columns>
__device__ __forceinline__ void take_columns(const Chunk* ring, Chunk (&to)[columns]) {
#pragma unroll
  for (int v = 0; v < columns; ++v) to[v] = ring[v * THREADS];
}

template <int columns>
__device__ __forceinline__ void put_columns(char* to, int pixel, unsigned int wanted, const float (&values)[columns][CH]) {
  Chunk finished[columns];
#pragma unroll
  for (int v = 0; v < columns; ++v) finished[v] = narrow(values[v]);
#pragma unroll
  for (int v = 0; v < columns; ++v)
    if (wanted >> v & 1u) store(to, v, pixel, finished[v]);
}
