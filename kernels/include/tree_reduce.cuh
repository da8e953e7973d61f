// Column sums over the blocks of a one-dimensional grid, in a fixed order, within the launch that made the partial sums.
//
// Two levels, so that no single block has to read every partial: the block that finishes last among FAN neighbours adds
// theirs, the last of those adds the groups' sums. FAN is near the root of the blocks there are, one an SM, and all of a
// thread's loads of a level are in flight at once: this tail is what a small tensor pays for most.
//
// partial: [gridDim.x + groups][width] fp32, rows 16-byte aligned, width a multiple of 4; this block's row has been written
// by this block. ticket: groups + 1 zeroed counters; left zeroed. groups = ceil(gridDim.x / FAN).

#define FAN 12

// Adds rows [first, first + count) of `rows` into `out` (global or shared memory). fp64 sums.
__device__ __forceinline__ void add_rows(const float* rows, int first, int count, int width, float* out) {
  for (int o = threadIdx.x; o < width / 4; o += THREADS) {
    const float4* at = (const float4*)(rows + (i64)first * width) + o;
    double a = 0.0, b = 0.0, c = 0.0, d = 0.0;
    for (int base = 0; base < count; base += FAN) {
      float4 v[FAN];
#pragma unroll
      for (int r = 0; r < FAN; ++r) {
        const float4 zero = {0.f, 0.f, 0.f, 0.f};
        v[r] = base + r < count ? __ldcg(at + (i64)(base + r) * (width / 4)) : zero;
      }
#pragma unroll
      for (int r = 0; r < FAN; ++r) {
        a += v[r].x;
        b += v[r].y;
        c += v[r].z;
        d += v[r].w;
      }
    }
    out[4 * o] = (float)a;
    out[4 * o + 1] = (float)b;
    out[4 * o + 2] = (float)c;
    out[4 * o + 3] = (float)d;
  }
}

// True in the one block that finishes last, where total[0 .. width) then holds the sums. `total` is shared memory.
__device__ __forceinline__ bool tree_reduce(float* partial, unsigned int* ticket, int width, float* total) {
  __shared__ bool last;
  const int blocks = gridDim.x, groups = (blocks + FAN - 1) / FAN;
  const int group = blockIdx.x / FAN, first = group * FAN;
  const int members = blocks - first < FAN ? blocks - first : FAN;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(ticket + group, 1u) == members - 1;
  __syncthreads();
  if (!last) return false;
  __threadfence();
  add_rows(partial, first, members, width, partial + (i64)(blocks + group) * width);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    ticket[group] = 0u;
    last = atomicAdd(ticket + groups, 1u) == groups - 1;
  }
  __syncthreads();
  if (!last) return false;
  __threadfence();
  add_rows(partial, blocks, groups, width, total);
  if (threadIdx.x == 0) ticket[groups] = 0u;
  __syncthreads();
  return true;
}
