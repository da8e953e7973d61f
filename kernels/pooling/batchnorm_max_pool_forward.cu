// Batch normalisation (its apply step), activation and max-pooling in one pass: a network's stem. Forward.
//
//   z = (x - mean) * weight * invstd + bias      y = max over the window of act(z)      position = kh*KW + kw of that maximum
//
// Shapes    x: [N, H, W, C], y, chosen: [N, OH, OW, C], fp16, bf16 or fp32, C a multiple of VEC (8, or 4 for fp32); saved: [2, C]
//           fp32 (mean, invstd) from batchnorm_act_stats; weight, bias: [C] fp32; index: [N, OH, OW, C] bytes.
//           chosen: x where the maximum is. The backward sums over the outputs alone with it, and reads x once, not twice.
// Replaces  native_batch_norm's second half + activation + aten::max_pool2d_with_indices: act(z) is never written.
// Bytes     x once; y, chosen and 1 byte an output once. ResNet's stem in bf16, [256,64,112,112] k3 s2: 411 + 103 + 103 + 51 MB
//           instead of 1388 (apply: 411 + 411, pool: 411 + 103 + 51); with the statistics and the backward pass 2.26 GB instead
//           of 4.42, at 4.24 TB/s 0.53 ms instead of 1.04.
// Bound     DRAM bandwidth: 0.158 ms there.
// Grid      (channel tiles, blocks): a block keeps its channels' constants and walks over the tiles of all images, the last
//           first, so that what the statistics pass read last is still in L2.
// Numerics  act(z(x)) is monotone in x, also as rounded, so the maximum is found among the x themselves in packed words, with the
//           sign turned where the weight is negative, and only the winner is normalised: y is bit for bit what pooling the written
//           activation would give. Of x that round to the same y the largest gets the gradient, in PyTorch the first.
//           Where the weight is 0 all are equal and the first counts.
// Limits    activations that do not fall: none, ReLU, ReLU6, LeakyReLU with slope >= 0. Else as max_pool_forward.

#include "vector.cuh"
#include "overlap.cuh"
#include "activation.cuh"
#include "packed.cuh"
#include "extremum.cuh"
#include "pool_window.cuh"
#include "pool_strip.cuh"

// The lane of channel j in its word.
__device__ __forceinline__ unsigned int lane_of(int j) {
  return VEC == 4 ? 0xffffffffu : j % 2 ? 0xffff0000u : 0xffffu;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) batchnorm_max_pool_forward(
    const Vec16* __restrict__ x, const float* __restrict__ saved, const float* __restrict__ weight,
    const float* __restrict__ bias, Vec16* __restrict__ y, Positions* __restrict__ index, Vec16* __restrict__ chosen,
    int vectors, int height, int width, int out_height, int out_width, int pad_h, int pad_w,
    int row_tiles, int column_tiles, int images, float slope) {
  overlap_launches();
  __shared__ float constants[3][VEC][MAX_CHANNEL_TILE];  // mean, scale, offset: in registers they would halve the occupancy
  const int vector = blockIdx.x * blockDim.x + threadIdx.x;
  Vec16 turn = {{0u, 0u, 0u, 0u}}, flat = {{0u, 0u, 0u, 0u}};
  if (vector < vectors) {
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      const int c = vector * VEC + j;
      const float scale = saved[vectors * VEC + c] * weight[c];
      if (scale < 0.f) turn.w[j * 4 / VEC] |= lane_of(j) & SIGNS;
      if (scale == 0.f) flat.w[j * 4 / VEC] |= lane_of(j);
      if (threadIdx.y == 0 && threadIdx.z == 0) {
        constants[0][j][threadIdx.x] = saved[c];
        constants[1][j][threadIdx.x] = scale;
        constants[2][j][threadIdx.x] = bias[c];
      }
    }
  }
  __syncthreads();
  if (vector >= vectors) return;
  const bool any_flat = (flat.w[0] | flat.w[1] | flat.w[2] | flat.w[3]) != 0u;
  Vec16 outside;
#pragma unroll
  for (int i = 0; i < 4; ++i) outside.w[i] = LOWEST ^ turn.w[i];

  const int tiles = images * row_tiles * column_tiles;
  for (int tile = tiles - 1 - blockIdx.y; tile >= 0; tile -= gridDim.y) {
    const int image = tile / (row_tiles * column_tiles), rest = tile % (row_tiles * column_tiles);
    const int oh = rest / column_tiles * blockDim.z + threadIdx.z;
    const int ow = (rest % column_tiles * blockDim.y + threadIdx.y) * OUT_W;
    if (oh >= out_height || ow >= out_width) continue;
    const Vec16* from = x + (i64)image * height * width * vectors + vector;
    const int h0 = oh * SH - pad_h, w0 = ow * SW - pad_w;
    const int first_row = h0 < 0 ? (-h0 + DH - 1) / DH : 0;
    Extremum best[OUT_W];
#pragma unroll
    for (int t = 0; t < OUT_W; ++t) {
      const int left = w0 + t * SW;
      begin(best[t], first_row * KW + (left < 0 ? (-left + DW - 1) / DW : 0));
    }
#pragma unroll
    for (int base = 0; base < KH; base += ROWS_AT_ONCE) {
      Vec16 v[ROWS_AT_ONCE][COLUMNS];
      load_strip(v, from, base, h0, w0, vectors, height, width, outside);
#pragma unroll
      for (int k = 0; k < ROWS_AT_ONCE; ++k)
#pragma unroll
        for (int column = 0; column < COLUMNS; ++column) {
          if (base + k >= KH || !used(column)) continue;
#pragma unroll
          for (int i = 0; i < 4; ++i) v[k][column].w[i] ^= turn.w[i];
#pragma unroll
          for (int t = 0; t < OUT_W; ++t)
            if (has_tap(t, column)) take(best[t], v[k][column], (base + k) * KW + (column - t * SW) / DW);
        }
    }
    const i64 at = (((i64)image * out_height + oh) * out_width + ow) * vectors + vector;
#pragma unroll
    for (int t = 0; t < OUT_W; ++t) {
      if (ow + t >= out_width) break;
      Extremum& b = best[t];
#pragma unroll
      for (int i = 0; i < 4; ++i) b.value.w[i] ^= turn.w[i];
      if (any_flat) {
        const int left = w0 + t * SW, kw = left < 0 ? (-left + DW - 1) / DW : 0;
        const Vec16 v = load(from + ((h0 + first_row * DH) * width + left + kw * DW) * vectors);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          b.lane[i] = choose(flat.w[i], LANES(first_row * KW + kw), b.lane[i]);
          b.value.w[i] = choose(flat.w[i], v.w[i], b.value.w[i]);
        }
      }
      float f[VEC];
      widen(b.value, f);
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        const float mean = constants[0][j][threadIdx.x], scale = constants[1][j][threadIdx.x];
        f[j] = activate((f[j] - mean) * scale + constants[2][j][threadIdx.x], slope);
      }
      store(y + at + t * vectors, narrow(f));
      store(chosen + at + t * vectors, b.value);
      index[at + t * vectors] = positions(b);
    }
  }
}
