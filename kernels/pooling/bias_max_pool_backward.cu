// Max-pooling of relu(x + bias), backward: every element gathers from the windows that cover it and chose it, and the bias gets the
// sum of what they had to give.
//
//   dx[n,h,w,c] = sum over windows (oh, ow) that cover (h, w) at tap (kh, kw) of dy[n,oh,ow,c] where index = kh*KW + kw
//   dbias[c] = sum over windows of dy[n,oh,ow,c] where index != 255, which stands where ReLU gave 0
//
// Shapes    dy: [N, OH, OW, C] as the forward's y; index: [N, OH, OW, C] bytes; dx: [N, H, W, C]. Every element is written. dbias:
//           [C] fp32. partial: [gridDim.y, C] fp32 scratch; ticket: one zeroed counter a channel tile, left zeroed.
// Replaces  aten::max_pool2d_with_indices_backward, threshold_backward, and the sum over all pixels for the bias.
// Bytes     dy and index once, dx once. VGG's first in bf16, [128,64,224,224] k2 s2: 206 + 103 + 822 MB, where the passes apart move
//           3597.
// Bound     DRAM bandwidth: 0.267 ms there at 4.24 TB/s.
// Grid      (channel tiles, blocks): a block walks over tiles of all images, groups of SH x SW elements as in max_pool_backward.cu, and
//           keeps its channels' sums in registers. A window is counted by the group it begins in.
// Numerics  fp32 sums in a fixed order, of the blocks in fp64; deterministic, no atomics on values.
// Limits    strides 2 to 4, padding below the stride: then each window begins in one group; KH*KW < 255.

#include "vector.cuh"
#include "overlap.cuh"
#include "packed.cuh"
#include "extremum.cuh"
#include "pool_window.cuh"
#include "gather_max.cuh"

#define LOADS 8  // of other blocks' sums that a thread of the last block has under way

struct __align__(16) Double4 {
  double x, y, z, w;
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) bias_max_pool_backward(
    const Vec16* __restrict__ dy, const Positions* __restrict__ index, Vec16* __restrict__ dx, float* __restrict__ partial,
    unsigned int* __restrict__ ticket, float* __restrict__ dbias, int vectors, int height, int width, int out_height,
    int out_width, int pad_h, int pad_w, int row_tiles, int column_tiles, int images) {
  overlap_launches();
  __shared__ Double4 scratch[THREADS];
  __shared__ bool last;
  float* sums = (float*)scratch;  // [threads over each other][channels of the tile]: VEC a thread, at most as many bytes
  const int vector = blockIdx.x * blockDim.x + threadIdx.x;
  const int tiles = vector < vectors ? images * row_tiles * column_tiles : 0;
  float total[VEC];
#pragma unroll
  for (int c = 0; c < VEC; ++c) total[c] = 0.f;

  for (int tile = blockIdx.y; tile < tiles; tile += gridDim.y) {
    const int image = tile / (row_tiles * column_tiles), rest = tile % (row_tiles * column_tiles);
    const int qh = rest / column_tiles * blockDim.z + threadIdx.z, qw = rest % column_tiles * blockDim.y + threadIdx.y;
    const int h0 = qh * SH - pad_h, w0 = qw * SW - pad_w;
    if (h0 >= height || w0 >= width) continue;
    const i64 windows = (i64)image * out_height * out_width * vectors + vector;
    const i64 pixels = (i64)image * height * width * vectors + vector;
    if (qh < out_height && qw < out_width) {
      const i64 own = windows + (qh * out_width + qw) * vectors;
      float g[VEC];
      widen(load(dy + own), g);
      const Positions chosen = index[own];
#pragma unroll
      for (int c = 0; c < VEC; ++c)
        if (position_of(chosen, c) != 255) total[c] += g[c];
    }
#pragma unroll
    for (int r = 0; r < SH; r += PHASE_ROWS) {
      float sum[PHASE_ROWS][GROUP_W * SW][VEC];
      gather_max(sum, dy + windows, index + windows, r, qh, qw, vectors, out_height, out_width);
#pragma unroll
      for (int i = 0; i < PHASE_ROWS; ++i)
#pragma unroll
        for (int j = 0; j < GROUP_W * SW; ++j) {
          const int h = h0 + r + i, w = w0 + j;
          if (h >= 0 && h < height && w >= 0 && w < width)
            store(dx + pixels + (h * width + w) * vectors, narrow(sum[i][j]));
        }
    }
  }

  // Threads of a channel vector, then the blocks of the channel tile in the one that ends last.
  const int row = threadIdx.z * blockDim.y + threadIdx.y, rows = blockDim.y * blockDim.z;
  const int thread = row * blockDim.x + threadIdx.x, threads = rows * blockDim.x;
  const int channels = vectors * VEC, wide = blockDim.x * VEC, first = blockIdx.x * wide;
#pragma unroll
  for (int c = 0; c < VEC; ++c) sums[(row * VEC + c) * blockDim.x + threadIdx.x] = total[c];  // neighbouring banks
  __syncthreads();
  for (int o = thread; o < wide; o += threads) {
    float sum = 0.f;
    for (int r = 0; r < rows; ++r) sum += sums[r * wide + o];
    const int channel = first + o % blockDim.x * VEC + o / blockDim.x;
    if (channel < channels) partial[(i64)blockIdx.y * channels + channel] = sum;
  }
  __threadfence();
  __syncthreads();
  if (thread == 0) last = atomicAdd(ticket + blockIdx.x, 1u) == gridDim.y - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  // Four channels a thread and LOADS sums under way: read one float behind the other this took 80 to 175 us, longer than most passes.
  const int columns = wide / 4, parts = threads / columns > 0 ? threads / columns : 1;
  for (int base = 0; base < columns; base += threads) {
    const int o = base + (parts > 1 ? thread % columns : thread), part = parts > 1 ? thread / columns : 0;
    const bool inside = o < columns && part < parts && first + o * 4 < channels;
    Double4 sum = {0.0, 0.0, 0.0, 0.0};
    if (inside) {
      const float4* at = (const float4*)(partial + first) + o;
      for (int b = part; b < gridDim.y; b += LOADS * parts) {
        float4 v[LOADS];
#pragma unroll
        for (int k = 0; k < LOADS; ++k) {
          const int from = b + k * parts;
          v[k] = from < gridDim.y ? __ldcg(at + (i64)from * (channels / 4)) : make_float4(0.f, 0.f, 0.f, 0.f);
        }
#pragma unroll
        for (int k = 0; k < LOADS; ++k) {
          sum.x += v[k].x;
          sum.y += v[k].y;
          sum.z += v[k].z;
          sum.w += v[k].w;
        }
      }
    }
    scratch[thread] = sum;
    __syncthreads();
    if (inside && part == 0) {
      for (int k = 1; k < parts; ++k) {
        const Double4 other = scratch[thread + k * columns];
        sum.x += other.x;
        sum.y += other.y;
        sum.z += other.z;
        sum.w += other.w;
      }
      ((float4*)(dbias + first))[o] = make_float4((float)sum.x, (float)sum.y, (float)sum.z, (float)sum.w);
    }
    __syncthreads();
  }
  if (thread == 0) ticket[blockIdx.x] = 0u;
}
