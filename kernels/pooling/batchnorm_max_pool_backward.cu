// Batch normalisation, activation and max-pooling in one pass. Backward, second half: the input's gradient.
//
//   g[n,h,w,c] = act'(z) * sum over windows whose maximum is here of dy[n,oh,ow,c]
//   dx = weight * invstd * (g - dbias / M - (x - mean) * invstd^2 * sum_m g (x - mean) / M)                M = N*H*W
//
// The first half, the two sums a channel, is batchnorm_act_backward_reduce over the outputs with `chosen` for x: an element that
// no window chose adds nothing. Its coefficients are divided by the number of outputs; `share` = N*OH*OW / M makes it M.
//
// Shapes    as in batchnorm_max_pool_forward.cu; dy like y; coefficient: [2, C] fp32; dx like x. Every element is written.
// Replaces  aten::max_pool2d_with_indices_backward + threshold_backward + native_batch_norm_backward.
// Bytes     reduce: dy, chosen once; here: dy, index, x once, dx once. ResNet's stem in bf16: 206 + 565 + 411 MB instead of
//           2620 (pool: 154 + 411; reduce: 822; apply: 822 + 411).
// Bound     DRAM bandwidth: 0.279 ms there at 4.24 TB/s, 0.230 of it here.
// Grid      (channel tiles, blocks) over groups of elements as in max_pool_backward.cu; constants in shared memory.
// Numerics  z by the forward's own expression; fp32 sums in a fixed order; deterministic.
// Limits    as the forward; strides up to 4.

#include "vector.cuh"
#include "overlap.cuh"
#include "activation.cuh"
#include "packed.cuh"
#include "extremum.cuh"
#include "pool_window.cuh"
#include "gather_max.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) batchnorm_max_pool_backward(
    const Vec16* __restrict__ dy, const Positions* __restrict__ index, const Vec16* __restrict__ x,
    const float* __restrict__ saved, const float* __restrict__ weight, const float* __restrict__ bias,
    const float* __restrict__ coefficient, Vec16* __restrict__ dx,
    int vectors, int height, int width, int out_height, int out_width, int pad_h, int pad_w,
    int row_tiles, int column_tiles, int images, float share, float slope) {
  overlap_launches();
  __shared__ float constants[5][VEC][MAX_CHANNEL_TILE];  // in registers they would halve the occupancy
  const int vector = blockIdx.x * blockDim.x + threadIdx.x, channels = vectors * VEC;
  if (vector < vectors && threadIdx.y == 0 && threadIdx.z == 0) {
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      const int c = vector * VEC + j;
      constants[0][j][threadIdx.x] = saved[c];
      constants[1][j][threadIdx.x] = saved[channels + c] * weight[c];
      constants[2][j][threadIdx.x] = bias[c];
      constants[3][j][threadIdx.x] = coefficient[c] * share;
      constants[4][j][threadIdx.x] = coefficient[channels + c] * share;
    }
  }
  __syncthreads();
  if (vector >= vectors) return;
  const int tiles = images * row_tiles * column_tiles;
  for (int tile = blockIdx.y; tile < tiles; tile += gridDim.y) {
    const int image = tile / (row_tiles * column_tiles), rest = tile % (row_tiles * column_tiles);
    const int qh = rest / column_tiles * blockDim.z + threadIdx.z + pad_h / SH;
    const int qw = (rest % column_tiles * blockDim.y + threadIdx.y) * GROUP_W + pad_w / SW;
    const int h0 = qh * SH - pad_h, w0 = qw * SW - pad_w;
    if (h0 >= height || w0 >= width) continue;
    const i64 windows = (i64)image * out_height * out_width * vectors + vector;
    const i64 pixels = (i64)image * height * width * vectors + vector;
#pragma unroll
    for (int r = 0; r < SH; r += PHASE_ROWS) {
      Vec16 v[PHASE_ROWS][GROUP_W * SW];
#pragma unroll
      for (int i = 0; i < PHASE_ROWS; ++i)
#pragma unroll
        for (int j = 0; j < GROUP_W * SW; ++j) {
          const int h = h0 + r + i, w = w0 + j;
          v[i][j] = {{0u, 0u, 0u, 0u}};
          if (h >= 0 && h < height && w >= 0 && w < width) v[i][j] = load_last(x + pixels + (h * width + w) * vectors);
        }
      float sum[PHASE_ROWS][GROUP_W * SW][VEC];
      gather_max(sum, dy + windows, index + windows, r, qh, qw, vectors, out_height, out_width);
#pragma unroll
      for (int c = 0; c < VEC; ++c) {
        const float mean = constants[0][c][threadIdx.x], scale = constants[1][c][threadIdx.x];
        const float offset = constants[2][c][threadIdx.x];
        const float c1 = constants[3][c][threadIdx.x], c2 = constants[4][c][threadIdx.x];
#pragma unroll
        for (int i = 0; i < PHASE_ROWS; ++i)
#pragma unroll
          for (int j = 0; j < GROUP_W * SW; ++j) {
            float f[VEC];
            widen(v[i][j], f);
            const float d = f[c] - mean;
            const float g = through(sum[i][j][c], d * scale + offset, slope);
            sum[i][j][c] = scale * (g - c1 - d * c2);
          }
      }
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
}
