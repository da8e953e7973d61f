// Two sums per channel over all rows of an NHWC tensor seen as [rows, channels], deterministic, in one launch.
//
// A thread owns VEC channels for the whole kernel, so per-channel constants sit in registers and no index arithmetic
// is left in the loop. Rows go: thread -> block (shared memory) -> partial sums in global memory -> the block that
// finishes last in its channel tile adds the partials in a fixed order. No atomics on floating-point values.
//
// Block: THREADS threads as [ty][tx], tx over `tile` channel vectors, ty over rows. Grid: (row blocks, channel tiles).
// partial: [gridDim.x][2][channels] fp32. ticket: one zeroed counter a channel tile; left zeroed.

struct __align__(16) Double4 {
  double x, y, z, w;
};

struct Tile {
  int tx, ty, rows_per_pass, vector;  // vector: this thread's channel vector, or -1 when it has none
};

__device__ __forceinline__ Tile tile_of(int tile, int vectors) {
  Tile t;
  t.tx = threadIdx.x % tile;
  t.ty = threadIdx.x / tile;
  t.rows_per_pass = THREADS / tile;
  int vector = blockIdx.y * tile + t.tx;
  t.vector = (t.ty < t.rows_per_pass && vector < vectors) ? vector : -1;
  return t;
}

// Adds up a[] and b[] over the block and, in the last block, over all blocks. Returns true in the last block, where
// total[0][c] and total[1][c] (c: channel within the tile) then hold the sums. `shared` has 2 * VEC * THREADS floats.
__device__ __forceinline__ bool reduce_channels(
    const Tile& t, int tile, int vectors, const float (&a)[VEC], const float (&b)[VEC],
    float* partial, unsigned int* ticket, float* shared, double* total) {
  const int width = tile * VEC;  // channels of a tile
  const int channels = vectors * VEC;
  const int first = blockIdx.y * width;
  if (t.ty < t.rows_per_pass) {
#pragma unroll
    for (int j = 0; j < VEC; ++j) {  // [ty][stat][j][tx]: neighbouring threads write neighbouring banks
      shared[(t.ty * 2 * VEC + j) * tile + t.tx] = a[j];
      shared[(t.ty * 2 * VEC + VEC + j) * tile + t.tx] = b[j];
    }
  }
  __syncthreads();
  for (int o = threadIdx.x; o < 2 * width; o += THREADS) {
    float sum = 0.f;
#pragma unroll 8
    for (int r = 0; r < t.rows_per_pass; ++r) sum += shared[r * 2 * width + o];
    const int stat = o / width, j = (o % width) / tile, x = o % tile;
    const int channel = first + x * VEC + j;
    if (channel < channels) partial[((i64)blockIdx.x * 2 + stat) * channels + channel] = sum;
  }
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(ticket + blockIdx.y, 1u) == gridDim.x - 1;
  __syncthreads();
  if (!last) return false;
  __threadfence();
  // The tile's sums over gridDim.x partials, four channels a thread: with 16-byte loads, eight in flight, one SM reads
  // them in a few microseconds; with 4-byte loads this tail took as long as the pass itself at 2048 channels.
  const int columns = 2 * width / 4;
  const int groups = THREADS / columns > 0 ? THREADS / columns : 1;
  Double4* scratch = (Double4*)shared;  // THREADS of them: 32 * THREADS bytes, as many as `shared` has at VEC = 4
  for (int base = 0; base < columns; base += THREADS) {
    const int column = base + (groups > 1 ? threadIdx.x % columns : threadIdx.x);
    const int g = groups > 1 ? threadIdx.x / columns : 0;
    const int stat = column * 4 / width, channel = first + column * 4 % width;
    Double4 sum = {0.0, 0.0, 0.0, 0.0};
    if (column < columns && g < groups && channel < channels) {
      const float4* at = (const float4*)(partial + (i64)stat * channels + channel);
      const i64 step = 2 * (i64)channels / 4;
#pragma unroll 8
      for (int p = g; p < gridDim.x; p += groups) {
        const float4 v = __ldcg(at + p * step);
        sum.x += v.x;
        sum.y += v.y;
        sum.z += v.z;
        sum.w += v.w;
      }
    }
    scratch[threadIdx.x] = sum;
    __syncthreads();
    if (column < columns && g == 0) {
      for (int k = 1; k < groups; ++k) {
        const Double4 other = scratch[threadIdx.x + k * columns];
        sum.x += other.x;
        sum.y += other.y;
        sum.z += other.z;
        sum.w += other.w;
      }
      total[column * 4] = sum.x;
      total[column * 4 + 1] = sum.y;
      total[column * 4 + 2] = sum.z;
      total[column * 4 + 3] = sum.w;
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) ticket[blockIdx.y] = 0u;
  __syncthreads();
  return true;
}
