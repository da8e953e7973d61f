// A tile of channels whose rows stay on chip, shared out among the blocks of one column of the grid, and two sums per channel over
// all of them, in one cooperative launch.
//
// An NHWC tensor seen as [rows, vectors of VEC channels]. Grid: (blocks, tiles), all running at once, one on an SM. Block: THREADS
// threads as [ty][tx], tx over the `tile` vectors of the column, ty over rows; a thread has the rows first, first + stride, ...
// of its vector: the first HOLD in registers, the next `kept` in shared memory, each thread's own column of slots. With STREAM
// there are more, which it reads again.
//
// Sums go: thread -> block (shared memory, a warp a sum) -> exchange.cuh -> every block adds its column's partial sums as they come, in
// one order: deterministic, without floating-point atomics, and nobody waits for one block that would add them for all.
//
// The exchange has [tiles][blocks][2][VEC][tile] words.

#include "exchange.cuh"

#define AT_ONCE 4  // partial sums under way a thread, four words each
#define GRID_WIDTH (MAX_TILE * VEC)  // channels of the widest tile
#define GRID_SCRATCH (VEC == 8 ? 16 * THREADS : 8 * THREADS)  // floats: as many as the threads' sums, or THREADS times four doubles

struct __align__(16) Double4 {
  double x, y, z, w;
};

struct GridTile {
  int tx, vector;     // of this thread; vector: -1 when it has none
  int first, stride;  // rows
};

__device__ __forceinline__ GridTile grid_tile(int tile, int vectors) {
  GridTile t;
  const int rows_per_pass = THREADS / tile, ty = threadIdx.x / tile;
  t.tx = threadIdx.x % tile;
  t.first = blockIdx.x * rows_per_pass + ty;
  t.stride = gridDim.x * rows_per_pass;
  const int vector = blockIdx.y * tile + t.tx;
  t.vector = ty < rows_per_pass && vector < vectors ? vector : -1;
  return t;
}

// The channel whose constants and sums thread `threadIdx.x` of a block looks after; -1 when it has none. Its place in the
// tile, o = j * tile + tx, is threadIdx.x.
__device__ __forceinline__ int grid_channel(int tile, int vectors) {
  const int vector = blockIdx.y * tile + threadIdx.x % tile;
  return threadIdx.x < tile * VEC && vector < vectors ? vector * VEC + threadIdx.x / tile : -1;
}

// Adds a[] and b[] over all rows of the tile. Afterwards thread o < tile * VEC of every block has the sums of its channel
// (grid_channel) in `first` and `second`. All threads of the column's blocks call it. scratch: GRID_SCRATCH floats of shared memory,
// 16-byte aligned.
__device__ __forceinline__ void sum_over_grid(
    int tile, const float (&a)[VEC], const float (&b)[VEC], float* scratch, const Exchange& exchange, double& first,
    double& second) {
  const int width = tile * VEC, columns = 2 * width, blocks = gridDim.x;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < VEC; ++j) {
    scratch[j * THREADS + threadIdx.x] = a[j];
    scratch[(VEC + j) * THREADS + threadIdx.x] = b[j];
  }
  const unsigned int before = exchanged_before(exchange);
  __syncthreads();
  float* const mine = exchanged(exchange) + (blockIdx.y * blocks + blockIdx.x) * columns;
  const int turns = 32 / tile, lanes = turns * tile, used = THREADS / tile * tile;  // lanes `tile` apart have the same vector
  for (int s = threadIdx.x / 32; s < 2 * VEC; s += THREADS / 32) {
    float sum = 0.f;
    if (lane < lanes) {
#pragma unroll 8
      for (int i = lane; i < used; i += lanes) sum += scratch[s * THREADS + i];
    }
    double all = sum;
    for (int k = 1; k < turns; ++k) all += __shfl_down_sync(0xffffffffu, sum, k * tile);
    if (lane < tile) send(mine + s * tile + lane, (float)all);
  }
  __syncthreads();
  const int quads = columns / 4, groups = THREADS / quads < blocks ? THREADS / quads : blocks;
  const int quad = threadIdx.x % quads, group = threadIdx.x / quads;
  if (group < groups) {
    const float4* const at = (const float4*)(exchanged(exchange) + blockIdx.y * blocks * columns) + quad;
    Double4 sum = {0.0, 0.0, 0.0, 0.0};
    for (int p = group; p < blocks; p += AT_ONCE * groups) {
      float4 v[AT_ONCE];
      const int count = (blocks - p + groups - 1) / groups;
      receive(at + p * quads, groups * quads, count, v);
#pragma unroll
      for (int u = 0; u < AT_ONCE; ++u) {
        if (u >= count) break;
        sum.x += v[u].x;
        sum.y += v[u].y;
        sum.z += v[u].z;
        sum.w += v[u].w;
      }
    }
    ((Double4*)scratch)[group * quads + quad] = sum;
  }
  clear_before(exchange, before);
  __syncthreads();
  first = second = 0.0;
  if (threadIdx.x < width) {
    const double* const sums = (const double*)scratch + threadIdx.x;
#pragma unroll 4
    for (int g = 0; g < groups; ++g) {
      first += sums[g * columns];
      second += sums[g * columns + width];
    }
  }
}
