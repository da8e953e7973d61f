// Passes without sums see NHWC tensors as one row of 16-byte vectors, [M * C / VEC]: a block takes THREADS * UNROLL neighbours, of which
// a thread has every THREADS-th, so that each load and store of a block is one piece of memory whatever C is. A vector's channels are
// found by division. Blocks begin at the end: what was written last is still in L2. Limits: fewer than 2^31 vectors.

__device__ __forceinline__ unsigned int first_vector() {
  return (gridDim.x - 1 - blockIdx.x) * (THREADS * UNROLL) + threadIdx.x;
}
