// Layer normalisation over the channels of each pixel (NHWC). Backward, all three gradients in one launch.
//
//   h = (x - mean) * rstd        dbias = sum_m dy        dweight = sum_m dy * h
//   dx = rstd * (g - 1/C sum_c g - h * 1/C sum_c g * h)        g = dy * weight
//
// Shapes    as in the forward file; dy: [M, C], OUT; dx like x; dweight, dbias: [C] fp32.
//           partial: [blocks + ceil(blocks / 12)][2][LANES * VECTORS * VEC] fp32 scratch (include/tree_reduce.cuh).
// Replaces  aten::native_layer_norm_backward (three kernels, the parameters' gradients in two more passes over dy and x).
// Bytes     2 reads, 1 write. Mean and 1/std are made again from x in registers: 8 bytes a row less in each direction and
//           nothing saved, for 3 more flops an element of about 20.
// Bound     DRAM bandwidth. 256x96x56x56 bf16: 462 MB, 109 us at 4.24 TB/s.
// Grid      persistent blocks, one an SM as large as registers allow: each leaves a row of partial sums, and at 7x7 pixels
//           four small blocks an SM took as long to add theirs up as the pass itself. A lane keeps its channels' sums over all
//           its rows in registers (2 * VECTORS * VEC of them); warp, block and grid add them up at the end, in a fixed order.
//           Variance and the two sums of dx need only the mean and go through the lanes together: two rounds of shuffles a row.
// Numerics  fp32 within a block, fp64 across blocks. Deterministic.

#include "vector.cuh"
#include "mixed.cuh"
#include "row_statistics.cuh"
#include "tree_reduce.cuh"
#include "overlap.cuh"

#define SLOTS (LANES * VECTORS)
#define WIDTH (SLOTS * VEC)

#define SUMS ((THREADS / 32) * 2 * VEC * LANES)  // of all warps, one vector a lane

extern "C" __global__ void __launch_bounds__(THREADS, 1) layer_norm_backward(
    const OutVec* __restrict__ dy, const Vec16* __restrict__ x, const float* __restrict__ weight,
    Vec16* __restrict__ dx, float* __restrict__ partial, unsigned int* __restrict__ ticket,
    float* __restrict__ dweight, float* __restrict__ dbias, i64 rows, int vectors, float eps) {
  overlap_launches();
  // The weights, [quarter of a vector][slot]; afterwards the warps' sums, and those of the grid.
  __shared__ float4 shared[(2 * WIDTH > SUMS ? 2 * WIDTH : SUMS) / 4];
  const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
  const int groups = THREADS / LANES;
  const i64 stride = (i64)gridDim.x * groups * ROWS;
  const float inverse = 1.f / (float)(vectors * VEC);
  Vec16 v[ROWS][VECTORS];
  OutVec d[ROWS][VECTORS];
  const auto fetch = [&](i64 first) {
#pragma unroll
    for (int u = 0; u < ROWS; ++u) {
      const i64 row = first + u * groups + group;
#pragma unroll
      for (int k = 0; k < VECTORS; ++k) {
        v[u][k].w[0] = v[u][k].w[1] = v[u][k].w[2] = v[u][k].w[3] = 0u;
        if (row < rows && lane + k * LANES < vectors) {
          v[u][k] = load_last(x + row * vectors + lane + k * LANES);
          d[u][k] = load_out(dy + row * vectors + lane + k * LANES);
        }
      }
    }
  };
  i64 first = (i64)blockIdx.x * groups * ROWS;
  fetch(first);  // under way while the weights come
  for (int i = threadIdx.x; i < vectors * (VEC / 4); i += THREADS) {
    const float4 one = {1.f, 1.f, 1.f, 1.f};
    shared[(i % (VEC / 4)) * SLOTS + i / (VEC / 4)] = weight ? ((const float4*)weight)[i] : one;
  }
  __syncthreads();
  float dw[VECTORS][VEC], db[VECTORS][VEC];
#pragma unroll
  for (int k = 0; k < VECTORS; ++k)
#pragma unroll
    for (int j = 0; j < VEC; ++j) dw[k][j] = db[k][j] = 0.f;
  for (; first < rows; first += stride, fetch(first)) {
    float mean[ROWS], rstd[ROWS], s1[ROWS], s2[ROWS];
    row_means(v, inverse, mean);
#pragma unroll
    for (int u = 0; u < ROWS; ++u) rstd[u] = s1[u] = s2[u] = 0.f;
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) {
      const int slot = lane + k * LANES;
      if (slot >= vectors) continue;
#pragma unroll
      for (int u = 0; u < ROWS; ++u) {
        if (first + u * groups + group >= rows) continue;
        float f[VEC], g[VEC];
        widen(v[u][k], f);
        widen_out(d[u][k], g);
#pragma unroll
        for (int q = 0; q < VEC / 4; ++q) {
          const float4 s = shared[q * SLOTS + slot];
          const float w[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int j = 4 * q + i;
            const float c = f[j] - mean[u], gw = g[j] * w[i];
            rstd[u] += c * c;
            s1[u] += gw;
            s2[u] += gw * c;
          }
        }
      }
    }
    add_over_lanes(rstd);
    add_over_lanes(s1);
    add_over_lanes(s2);
#pragma unroll
    for (int u = 0; u < ROWS; ++u) {  // dx = g w rstd + (x - mean) s2 + s1
      rstd[u] = rsqrtf(rstd[u] * inverse + eps);
      s1[u] *= -inverse * rstd[u];
      s2[u] *= -inverse * rstd[u] * rstd[u] * rstd[u];
    }
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) {
      const int slot = lane + k * LANES;
      if (slot >= vectors) continue;
#pragma unroll
      for (int u = 0; u < ROWS; ++u) {
        const i64 row = first + u * groups + group;
        if (row >= rows) continue;
        float f[VEC], g[VEC];
        widen(v[u][k], f);
        widen_out(d[u][k], g);
#pragma unroll
        for (int q = 0; q < VEC / 4; ++q) {
          const float4 s = shared[q * SLOTS + slot];
          const float w[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int j = 4 * q + i;
            const float c = f[j] - mean[u], h = g[j] * rstd[u];
            dw[k][j] += h * c;
            db[k][j] += g[j];
            f[j] = h * w[i] + (c * s2[u] + s1[u]);
          }
        }
        store(dx + row * vectors + slot, narrow(f));
      }
    }
  }
  // Lanes with the same channels: first within the warp, then over the warps, one vector a lane at a time. Sums
  // [warp][statistic][j][lane], so that neighbouring lanes write neighbouring banks.
  float* sums = (float*)shared;
  const int warp = threadIdx.x / 32;
#pragma unroll
  for (int k = 0; k < VECTORS; ++k) {
#pragma unroll
    for (int j = 0; j < VEC; ++j)
#pragma unroll
      for (int o = LANES; o < 32; o *= 2) {
        dw[k][j] += __shfl_xor_sync(0xffffffffu, dw[k][j], o);
        db[k][j] += __shfl_xor_sync(0xffffffffu, db[k][j], o);
      }
    __syncthreads();  // what `sums` held has been read
    if (threadIdx.x % 32 < LANES) {
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        sums[(warp * 2 * VEC + j) * LANES + lane] = dw[k][j];
        sums[(warp * 2 * VEC + VEC + j) * LANES + lane] = db[k][j];
      }
    }
    __syncthreads();
    for (int o = threadIdx.x; o < 2 * VEC * LANES; o += THREADS) {
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < THREADS / 32; ++i) sum += sums[i * 2 * VEC * LANES + o];
      const int statistic = o / (VEC * LANES), at = o % (VEC * LANES);
      partial[((i64)blockIdx.x * 2 + statistic) * WIDTH + k * VEC * LANES + at] = sum;
    }
  }
  if (!tree_reduce(partial, ticket, 2 * WIDTH, sums)) return;
  for (int c = threadIdx.x; c < vectors * VEC; c += THREADS) {
    const int vector = c / VEC, at = (vector / LANES * VEC + c % VEC) * LANES + vector % LANES;
    dweight[c] = sums[at];
    dbias[c] = sums[WIDTH + at];
  }
}
