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
// for 672 channels. So there are two exchanges: each block adds the partial sums of its share of the channels, and sends what comes of them
// to all.
//
// A row may be several of the tensor's, where its channels are no whole vectors: then a channel has several of the row's columns.
//
// The exchange has [owners][blocks][share][2] words, and behind them [channels][2], channels to the next even number.

struct Share {
  int even, channels, owners;  // channels in all, even; those of a block, an even number; blocks that have some
};

__device__ __forceinline__ Share share_of(int channels) {
  Share s;
  s.even = channels + channels % 2;
  s.channels = 2 * ((s.even + 2 * (int)gridDim.x - 1) / (2 * (int)gridDim.x));
  s.owners = (s.even + s.channels - 1) / s.channels;
  return s;
}

__device__ __forceinline__ int exchanged_words(int channels) {
  const Share s = share_of(channels);
  return s.owners * (int)gridDim.x * 2 * s.channels + 2 * s.even;
}

// The place of a column among a block's constants, which stand as grid_tile's threads read them: [VEC][vectors]; and the column at a place.
__device__ __forceinline__ int place_of(int column, int vectors) { return column % VEC * vectors + column / VEC; }
__device__ __forceinline__ int column_at(int place, int vectors) { return place % vectors * VEC + place / vectors; }

// The channel that this thread finishes the sums of, two lanes of a warp for each four words; -1 where it has none.
__device__ __forceinline__ int owned_channel(int channels) {
  const int share = share_of(channels).channels, own = threadIdx.x / 32 * 2 + threadIdx.x % 32;
  const int channel = blockIdx.x * share + own;
  return threadIdx.x % 32 < 2 && own < share && channel < channels ? channel : -1;
}

// Adds a[] and b[] over all rows, and all columns of a channel. The thread of owned_channel gets its channel's sums in finish(first, second), whose
// two floats take(channel, x, y) then gets in some thread of every block, for every channel. All threads of all blocks call it. scratch:
// GRID_SCRATCH floats of shared memory. At most 2 * THREADS columns, and THREADS / 16 channels a block.
template <typename Finish, typename Take>
__device__ __forceinline__ void sum_over_rows(
    int vectors, int channels, const float (&a)[VEC], const float (&b)[VEC], float* scratch, const Exchange& exchange, Finish finish,
    Take take) {
  const int columns = vectors * VEC, blocks = gridDim.x, lane = threadIdx.x % 32, used = THREADS / vectors * vectors;
  const Share s = share_of(channels);
#pragma unroll
  for (int j = 0; j < VEC; ++j) {
    scratch[j * THREADS + threadIdx.x] = a[j];
    scratch[(VEC + j) * THREADS + threadIdx.x] = b[j];
  }
  const unsigned int before = exchanged_before(exchange);
  __syncthreads();
  double first[2] = {0.0, 0.0}, second[2] = {0.0, 0.0};
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    const int place = threadIdx.x + u * THREADS, j = place / vectors;
    if (place < columns)
      for (int i = place % vectors; i < used; i += vectors) {
        first[u] += scratch[j * THREADS + i];
        second[u] += scratch[(VEC + j) * THREADS + i];
      }
  }
  if (channels < columns) {  // of several columns: they meet in shared memory
    __syncthreads();
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const int place = threadIdx.x + u * THREADS;
      if (place < columns) {
        const int column = column_at(place, vectors);
        scratch[column] = (float)first[u];
        scratch[columns + column] = (float)second[u];
      }
    }
    __syncthreads();
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      first[u] = second[u] = 0.0;
      const int channel = threadIdx.x + u * THREADS;
      if (channel < channels)
        for (int column = channel; column < columns; column += channels) {
          first[u] += scratch[column];
          second[u] += scratch[columns + column];
        }
    }
  }
  float* const partial = exchanged(exchange);
  float* const made = partial + s.owners * blocks * 2 * s.channels;
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    const int place = threadIdx.x + u * THREADS, channel = channels < columns ? place : column_at(place, vectors);
    if (place < (channels < columns ? s.even : columns)) {
      float* const to = partial + ((channel / s.channels * blocks + (int)blockIdx.x) * s.channels + channel % s.channels) * 2;
      send(to, (float)first[u]);
      send(to + 1, (float)second[u]);
    }
  }
  clear_before(exchange, before);
  // Two channels a warp: four words of each block.
  const int own = threadIdx.x / 32 * 2;
  if (own < s.channels && (int)blockIdx.x * s.channels + own < s.even) {
    const float4* const at = (const float4*)(partial + (int)blockIdx.x * blocks * s.channels * 2) + own / 2;
    Double4 sum = {0.0, 0.0, 0.0, 0.0};
    for (int p = lane; p < blocks; p += AT_ONCE * 32) {
      float4 v[AT_ONCE];
      const int count = (blocks - p + 31) / 32;
      receive(at + p * (s.channels / 2), 32 * (s.channels / 2), count, v);
#pragma unroll
      for (int u = 0; u < AT_ONCE; ++u) {
        if (u >= count) break;
        sum.x += v[u].x;
        sum.y += v[u].y;
        sum.z += v[u].z;
        sum.w += v[u].w;
      }
    }
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) {
      sum.x += __shfl_xor_sync(0xffffffffu, sum.x, apart);
      sum.y += __shfl_xor_sync(0xffffffffu, sum.y, apart);
      sum.z += __shfl_xor_sync(0xffffffffu, sum.z, apart);
      sum.w += __shfl_xor_sync(0xffffffffu, sum.w, apart);
    }
    const int channel = blockIdx.x * s.channels + own + lane;
    if (lane < 2 && channel < s.even) {
      float2 found = {0.f, 0.f};
      if (channel < channels) found = lane ? finish(sum.z, sum.w) : finish(sum.x, sum.y);
      send(made + 2 * channel, found.x);
      send(made + 2 * channel + 1, found.y);
    }
  }
  if ((int)threadIdx.x < s.even / 2) {
    float4 v[1];
    receive((const float4*)made + threadIdx.x, 1, 1, v);
    const int channel = 2 * (int)threadIdx.x;
    take(channel, v[0].x, v[0].y);
    if (channel + 1 < channels) take(channel + 1, v[0].z, v[0].w);
  }
}
#endif
