// A tile of channels whose rows are all held in the registers of one cluster, and two sums per channel over those rows.
//
// An NHWC tensor seen as [rows, vectors of VEC channels]. Grid: (CLUSTER, tiles). Block: THREADS threads as [ty][tx], tx over
// the `tile` (1, 2, 4 or 8) vectors of the block's column, ty over rows; the cluster's blocks take turns with the rows. A
// thread holds the HOLD rows first, first + stride, ... of its vector. rows <= HOLD * CLUSTER * THREADS / tile.
//
// Sums go: thread -> warp (shuffles) -> block (shared memory) -> cluster (each block reads the others' sums), always in the
// same order: deterministic, without atomics, and no sum passes through global memory.

#define MAX_HELD_TILE 8
#define HELD_WIDTH (MAX_HELD_TILE * VEC)  // channels of the widest tile
#define HELD_WARPS (THREADS / 32)

struct HeldTile {
  int tx, vector;    // of this thread; vector: -1 when it has none
  int first, stride; // rows
};

__device__ __forceinline__ HeldTile held_tile(int tile, int vectors) {
  HeldTile t;
  const int rows_per_pass = THREADS / tile;
  t.tx = threadIdx.x % tile;
  t.first = blockIdx.x * rows_per_pass + threadIdx.x / tile;
  t.stride = CLUSTER * rows_per_pass;
  const int vector = blockIdx.y * tile + t.tx;
  t.vector = vector < vectors ? vector : -1;
  return t;
}

// The channel whose constants and sums thread `threadIdx.x` of a block looks after; -1 when it has none. Its place in the
// tile, o = j * tile + tx, is threadIdx.x.
__device__ __forceinline__ int held_channel(int tile, int vectors) {
  const int vector = blockIdx.y * tile + threadIdx.x % tile;
  return threadIdx.x < tile * VEC && vector < vectors ? vector * VEC + threadIdx.x / tile : -1;
}

// Adds a[] and b[] over all rows of the tile. Afterwards thread o < tile * VEC of every block has the sums of its channel
// (held_channel) in `first` and `second`. All threads of the cluster call it, and must pass a cluster_wait() before they return: other
// blocks may still read `block`. warps: [HELD_WARPS][2 * HELD_WIDTH], block: [2 * HELD_WIDTH], both shared.
__device__ __forceinline__ void sum_held(
    int tile, float (&a)[VEC], float (&b)[VEC], float* warps, float* block, double& first, double& second) {
  const int width = tile * VEC, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int offset = 16; offset >= tile; offset >>= 1) {
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      a[j] += __shfl_down_sync(0xffffffffu, a[j], offset);
      b[j] += __shfl_down_sync(0xffffffffu, b[j], offset);
    }
  }
  if (lane < tile) {
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      warps[warp * 2 * HELD_WIDTH + j * tile + lane] = a[j];
      warps[warp * 2 * HELD_WIDTH + width + j * tile + lane] = b[j];
    }
  }
  __syncthreads();
  if (threadIdx.x < 2 * width) {
    double sum = 0.0;
#pragma unroll
    for (int w = 0; w < HELD_WARPS; ++w) sum += warps[w * 2 * HELD_WIDTH + threadIdx.x];
    block[threadIdx.x] = (float)sum;
  }
  cluster_arrive();
  cluster_wait();
  first = second = 0.0;
  if (threadIdx.x < width) {
#pragma unroll
    for (int rank = 0; rank < CLUSTER; ++rank) {
      first += cluster_read(block + threadIdx.x, rank);
      second += cluster_read(block + width + threadIdx.x, rank);
    }
  }
  cluster_arrive();
}
