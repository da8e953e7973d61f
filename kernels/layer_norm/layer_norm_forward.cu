// Layer normalisation over the channels of each pixel (NHWC), or over the last dimension of any contiguous tensor. Forward.
//
//   mean = 1/C sum_c x[m,c]     var = 1/C sum_c (x[m,c] - mean)^2     y = (x - mean) / sqrt(var + eps) * weight + bias
//
// Shapes    x: [M, C] rows contiguous, STORAGE; y: [M, C], OUT (autocast: another type than x). weight, bias: [C] fp32 or
//           null. C a multiple of VEC, C / VEC <= LANES * VECTORS.
// Replaces  aten::native_layer_norm, the casts autocast puts round it, and the layout copies some versions of it make.
// Bytes     1 read, 1 write; nothing is saved: the backward has x in registers anyway. About 9 flops an element.
// Bound     DRAM bandwidth. 256x96x56x56 bf16: 308 MB, 73 us at 4.24 TB/s.
// Grid      persistent blocks of THREADS. LANES threads a row, each with VECTORS vectors of it (vector = lane + k * LANES)
//           and ROWS rows under way, all in registers between the statistics and the store: x is read once.
// In flight ROWS * VECTORS * 16 bytes a thread: 96 at C = 96, so 96 KiB an SM with 1024 threads.
// Numerics  fp32, two passes over registers (no cancellation); NaN and infinity stay within their row.

#include "vector.cuh"
#include "mixed.cuh"
#include "row_statistics.cuh"
#include "overlap.cuh"

#define SLOTS (LANES * VECTORS)  // vectors a row has room for

extern "C" __global__ void __launch_bounds__(THREADS, 512 / THREADS) layer_norm_forward(
    const Vec16* __restrict__ x, const float* __restrict__ weight, const float* __restrict__ bias,
    OutVec* __restrict__ y, i64 rows, int vectors, float eps) {
  overlap_launches();
  // [quarter of a vector][slot]: neighbouring lanes read neighbouring 16-byte words.
  __shared__ float4 scale[VEC / 4][SLOTS], offset[VEC / 4][SLOTS];
  const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
  const int groups = THREADS / LANES;
  const i64 stride = (i64)gridDim.x * groups * ROWS;
  const float inverse = 1.f / (float)(vectors * VEC);
  Vec16 v[ROWS][VECTORS];
  const auto fetch = [&](i64 first) {
#pragma unroll
    for (int u = 0; u < ROWS; ++u) {
      const i64 row = first + u * groups + group;
#pragma unroll
      for (int k = 0; k < VECTORS; ++k) {
        v[u][k].w[0] = v[u][k].w[1] = v[u][k].w[2] = v[u][k].w[3] = 0u;
        if (row < rows && lane + k * LANES < vectors) v[u][k] = load(x + row * vectors + lane + k * LANES);
      }
    }
  };
  i64 first = (i64)blockIdx.x * groups * ROWS;
  fetch(first);  // under way while the weights come
  for (int i = threadIdx.x; i < vectors * (VEC / 4); i += THREADS) {
    const float4 one = {1.f, 1.f, 1.f, 1.f}, zero = {0.f, 0.f, 0.f, 0.f};
    scale[i % (VEC / 4)][i / (VEC / 4)] = weight ? ((const float4*)weight)[i] : one;
    offset[i % (VEC / 4)][i / (VEC / 4)] = bias ? ((const float4*)bias)[i] : zero;
  }
  __syncthreads();
  const bool paired = LANES % 2 == 0 && vectors % 2 == 0;
  // The loop's bounds are the block's, not the thread's: all lanes of a warp take part in every shuffle.
  for (; first < rows; first += stride, fetch(first)) {
    float mean[ROWS], rstd[ROWS];
    row_statistics(v, lane, vectors, inverse, eps, mean, rstd);
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) {
      const int slot = lane + k * LANES;
      if (slot >= vectors) continue;
      float w[VEC], b[VEC];
#pragma unroll
      for (int q = 0; q < VEC / 4; ++q) {
        const float4 s = scale[q][slot], t = offset[q][slot];
        w[4 * q] = s.x, w[4 * q + 1] = s.y, w[4 * q + 2] = s.z, w[4 * q + 3] = s.w;
        b[4 * q] = t.x, b[4 * q + 1] = t.y, b[4 * q + 2] = t.z, b[4 * q + 3] = t.w;
      }
#pragma unroll
      for (int u = 0; u < ROWS; ++u) {
        const i64 row = first + u * groups + group;
        if (row >= rows) continue;
        float f[VEC];
        widen(v[u][k], f);
#pragma unroll
        for (int j = 0; j < VEC; ++j) f[j] = (f[j] - mean[u]) * rstd[u] * w[j] + b[j];
        store_out(y + row * vectors + slot, f, paired);
      }
    }
  }
}
