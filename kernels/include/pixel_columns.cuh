// Blocks over the channel vectors of all samples of an NHWC tensor [N, pixels, C], cut wherever it suits the block.
//
// A column is one channel vector of one sample: column = n * vectors + vector. A block takes `tile` neighbouring columns
// (they may belong to two samples) and THREADS / tile threads walk down each; blocks of one tile may share the pixels as
// `splits`. No channel count leaves threads without work, as tiles that must divide a row do. Include vector.cuh first.
// Limits: columns and the vectors of a sample below 2^31.

struct Column {
  int n, vector;  // the sample, -1 where this thread has no column
  int tx, ty, down;  // of the tile's columns; of the `down` threads of this column
  int first, end;  // pixels of this block
  __device__ __forceinline__ i64 at(int pixel, int pixels, int vectors) const { return ((i64)n * pixels + pixel) * vectors + vector; }
};

// `block`: tile by tile, the splits of a tile one after the other.
__device__ __forceinline__ Column column_of(int block, int splits, int tile, int samples, int pixels, int vectors) {
  Column c;
  const int split = block % splits, chunk = (pixels + splits - 1) / splits;
  c.tx = threadIdx.x % tile;
  c.ty = threadIdx.x / tile;
  c.down = THREADS / tile;
  const int column = block / splits * tile + c.tx;
  c.n = c.ty < c.down && column < samples * vectors ? column / vectors : -1;
  c.vector = column % vectors;
  c.first = split * chunk;
  c.end = c.first + chunk < pixels ? c.first + chunk : pixels;
  return c;
}

// The sums of a column's threads in its first one (ty = 0), in a fixed order. `shared`: VEC * THREADS floats. All threads call.
__device__ __forceinline__ void sum_column(const Column& c, int tile, float (&sum)[VEC], float* shared) {
  if (c.down == 1) return;
#pragma unroll
  for (int j = 0; j < VEC; ++j) shared[j * THREADS + threadIdx.x] = sum[j];
  __syncthreads();
  // A thread adds up one channel of one column: all threads take part, however few columns there are.
  for (int o = threadIdx.x; o < tile * VEC; o += THREADS) {
    float* of = shared + o / tile * THREADS + o % tile;
    float total = of[0];
#pragma unroll 4
    for (int r = 1; r < c.down; ++r) total += of[r * tile];
    of[0] = total;
  }
  __syncthreads();
  if (c.ty == 0) {
#pragma unroll
    for (int j = 0; j < VEC; ++j) sum[j] = shared[j * THREADS + threadIdx.x];
  }
}

// VEC floats at an address of 16 bytes' alignment.
__device__ __forceinline__ void load_floats(const float* __restrict__ from, float (&f)[VEC]) {
#pragma unroll
  for (int q = 0; q < VEC / 4; ++q) {
    const float4 v = ((const float4*)from)[q];
    f[4 * q] = v.x, f[4 * q + 1] = v.y, f[4 * q + 2] = v.z, f[4 * q + 3] = v.w;
  }
}

__device__ __forceinline__ void store_floats(float* to, const float (&f)[VEC]) {
#pragma unroll
  for (int q = 0; q < VEC / 4; ++q) {
    const float4 v = {f[4 * q], f[4 * q + 1], f[4 * q + 2], f[4 * q + 3]};
    ((float4*)to)[q] = v;
  }
}
