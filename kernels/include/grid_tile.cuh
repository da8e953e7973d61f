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
// The exchange has [tiles][blocks][2][VEC][tile] words. With WHOLE_ROWS, where a column is the whole row: sum_over_rows, below.

#include "exchange.cuh"

#ifndef WHOLE_ROWS
#define WHOLE_ROWS 0
#endif

#define AT_ONCE 4  // partial sums under way a thread, four words each
#define SUMMED_AT_ONCE 8  // sums of threads
#define OWNED_AT_ONCE 5  // and of whole rows, a lane: up to 160 blocks come at once
#define GRID_WIDTH (MAX_TILE * VEC)  // channels of the widest tile
#define GRID_SCRATCH (VEC == 8 ? 16 * THREADS : 8 * THREADS)  // floats: as many as the threads' sums, or THREADS times four doubles

struct __align__(16) Double4 {
  double x, y, z, w;
};

struct GridTile {
  int tx, ty, vector;  // of this thread; vector: -1 when it has none
  int first, stride;   // rows
  int rows_per_pass;   // of a block
};

__device__ __forceinline__ GridTile grid_tile(int tile, int vectors) {
  GridTile t;
  t.rows_per_pass = THREADS / tile;
  t.ty = threadIdx.x / tile;
  t.tx = threadIdx.x % tile;
  t.first = blockIdx.x * t.rows_per_pass + t.ty;
  t.stride = gridDim.x * t.rows_per_pass;
  const int vector = blockIdx.y * tile + t.tx;
  t.vector = t.ty < t.rows_per_pass && vector < vectors ? vector : -1;
  return t;
}

#if !WHOLE_ROWS
__device__ __forceinline__ int exchanged_words(int width) { return gridDim.x * gridDim.y * 2 * width; }

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

#else
// A block has whole rows, of more channels than it has threads perhaps: all partial sums for all blocks would be 94 MB of L2's loads
// for 672 channels. So there are two exchanges: a block adds the partial sums of its own channels, two a warp, and sends what comes of them
// to all.
//
// A row may be several of the tensor's, where its channels are no whole vectors: then a channel has several of the row's columns.
//
// The exchange has [pairs of channels][blocks][2][2] words, and behind them [COPIES][pairs][2][2]: as many blocks that look at the same words
// as there are would hinder who writes them (COPIES: at most 16, one a lane of half a warp).

__device__ __forceinline__ int pairs_of(int channels) { return (channels + 1) / 2; }

__device__ __forceinline__ int exchanged_words(int channels) { return pairs_of(channels) * ((int)gridDim.x + COPIES) * 4; }

// The place of a column among a block's constants, which stand as grid_tile's threads read them: [VEC][vectors].
__device__ __forceinline__ int place_of(int column, int vectors) { return column % VEC * vectors + column / VEC; }

// The channel that this half of a warp finishes the sums of; -1 where it has none.
__device__ __forceinline__ int owned_channel(int channels) {
  const int channel = 2 * ((int)blockIdx.x + (int)threadIdx.x / 32 * (int)gridDim.x) + (int)threadIdx.x % 32 / 16;
  return channel < channels ? channel : -1;
}

// values[0], values[step], ..., before `end`: no branch between the loads.
__device__ __forceinline__ float strided_sum(const float* values, int end, int step) {
  float sum = 0.f;
#pragma unroll 1
  for (int i = 0; i < end; i += SUMMED_AT_ONCE * step) {
    float v[SUMMED_AT_ONCE];
#pragma unroll
    for (int u = 0; u < SUMMED_AT_ONCE; ++u) v[u] = i + u * step < end ? values[i + u * step] : 0.f;
#pragma unroll
    for (int u = 0; u < SUMMED_AT_ONCE; ++u) sum += v[u];
  }
  return sum;
}

// Adds a[] and b[] over all rows, and all columns of a channel. The threads of owned_channel get its channel's sums in finish(first, second), whose
// two floats take(channel, x, y) then gets in some thread of every block, for every channel. All threads of all blocks call it. scratch:
// GRID_SCRATCH floats of shared memory. At most THREADS pairs of channels, and THREADS / 32 of them a block.
template <typename Finish, typename Take>
__device__ __forceinline__ void sum_over_rows(
    int vectors, int channels, const float (&a)[VEC], const float (&b)[VEC], float* scratch, const Exchange& exchange,
    Finish finish, Take take) {
  const int columns = vectors * VEC, blocks = gridDim.x, lane = threadIdx.x % 32, pairs = pairs_of(channels);
#pragma unroll
  for (int j = 0; j < VEC; ++j) {
    scratch[j * THREADS + threadIdx.x] = a[j];
    scratch[(VEC + j) * THREADS + threadIdx.x] = b[j];
  }
  const unsigned int before = exchanged_before(exchange);
  __syncthreads();
  for (int s = threadIdx.x / 32; s < 2 * VEC; s += THREADS / 32) {
    for (int vector = lane; vector < vectors; vector += 32) {  // a sum stays where its first value was: nobody else reads that
      float* const values = scratch + s * THREADS + vector;
      *values = strided_sum(values, THREADS - vectors + 1, vectors);
    }
  }
  __syncthreads();
  float4* const partial = (float4*)exchanged(exchange);
  float4* const made = partial + pairs * blocks;
  const int pair = threadIdx.x;
  if (pair < pairs) {
    float sums[2][2] = {};
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const int channel = 2 * pair + u;
      if (channel >= channels) break;
      const float* const at = scratch + channel % VEC * THREADS + channel / VEC;
      sums[u][0] = at[0];
      sums[u][1] = at[VEC * THREADS];
      if (channels < columns) {  // and its other columns
        double first = sums[u][0], second = sums[u][1];
        for (int column = channel + channels; column < columns; column += channels) {
          const float* const other = scratch + column % VEC * THREADS + column / VEC;
          first += other[0];
          second += other[VEC * THREADS];
        }
        sums[u][0] = (float)first;
        sums[u][1] = (float)second;
      }
    }
    send(partial + pair * blocks + blockIdx.x, make_float4(sums[0][0], sums[0][1], sums[1][0], sums[1][1]));
  }
  clear_before(exchange, before);
  const int own = blockIdx.x + threadIdx.x / 32 * blocks;
  if (own < pairs) {
    Double4 sum = {0.0, 0.0, 0.0, 0.0};
    for (int p = lane; p < blocks; p += OWNED_AT_ONCE * 32) {
      float4 v[OWNED_AT_ONCE];
      const int count = (blocks - p + 31) / 32;
      receive(partial + own * blocks + p, 32, count, v);
#pragma unroll
      for (int u = 0; u < OWNED_AT_ONCE; ++u) {
        if (u >= count) break;
        sum.x += v[u].x;
        sum.y += v[u].y;
        sum.z += v[u].z;
        sum.w += v[u].w;
      }
    }
    const bool other = lane >= 16;  // this half of the warp goes on with one channel
    double first = other ? sum.z : sum.x, second = other ? sum.w : sum.y;
    first += __shfl_xor_sync(0xffffffffu, other ? sum.x : sum.z, 16);
    second += __shfl_xor_sync(0xffffffffu, other ? sum.y : sum.w, 16);
#pragma unroll
    for (int apart = 8; apart > 0; apart /= 2) {
      first += __shfl_xor_sync(0xffffffffu, first, apart);
      second += __shfl_xor_sync(0xffffffffu, second, apart);
    }
    float* const copy = (float*)(made + lane % COPIES * pairs + own);
    send(copy + 2 * other, 2 * own + other < channels ? finish(first, second) : make_float2(0.f, 0.f));
  }
  if (pair < pairs) {
    float4 v[1];
    receive(made + blockIdx.x % COPIES * pairs + pair, 1, 1, v);
    take(2 * pair, v[0].x, v[0].y);
    if (2 * pair + 1 < channels) take(2 * pair + 1, v[0].z, v[0].w);
  }
}
#endif
