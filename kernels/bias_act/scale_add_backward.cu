// Layer scale (a factor a channel), drop path (a factor a sample, include/keep.cuh) and residual add. Backward.
//
//   d = dy + dhalf      dbranch = d * scale[c] * keep[n]      dresidual = d
//   dscale[c] = sum_m d * keep[n] * (branch + bias[c])        dbias[c] = scale[c] sum_m d * keep[n]
//
// Shapes    dy like y, dhalf (TWIN 1), branch and dbranch as in the forward file; dscale, dbias: [C] fp32. dresidual is dy itself
//           and not written, but with TWIN or MIXED: then it is like the residual. bias and dbias may be null.
//           partial: [gridDim.x, 2, C] fp32 scratch; ticket: one zeroed counter a channel tile.
// Replaces  two products, a product and a sum over all pixels: 8 passes over the tensor; with a bias another sum: 1; with TWIN
//           dhalf's cast to fp32 and the addition of both gradients: 5.
// Bytes     2 reads, 1 write; with TWIN 1 read and 1 write more. Flops: 6 an element.
// Bound     DRAM bandwidth: 4.2 TB/s on an H200 is 0.29 ms for 256x96x56x56, branch bf16, dy fp32.
// Grid      (row blocks, channel tiles), rows walked from the end; the sums as in include/channel_reduce.cuh.
// Numerics  fp32 in registers and sums, fp64 across blocks; the order is fixed.
// Limits    M < 2^31; sm_80.

#include "vector.cuh"
#include "overlap.cuh"
#include "channel_reduce.cuh"
#include "keep.cuh"
#include "parameters.cuh"
#include "stream.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) scale_add_backward(
    const Vec16* __restrict__ dy, const Vec16* __restrict__ dhalf, const Vec16* __restrict__ branch,
    const float* __restrict__ bias, const float* __restrict__ scale, const Keep* __restrict__ keep,
    Vec16* __restrict__ dbranch, Vec16* __restrict__ dresidual, float* __restrict__ partial,
    unsigned int* __restrict__ ticket, float* __restrict__ dscale, float* __restrict__ dbias,
    int rows, int pixels, int vectors, int tile) {
  overlap_launches();
  const Tile t = tile_of(tile, vectors);
  __shared__ __align__(16) float shared[2 * VEC * THREADS];
  __shared__ double total[2 * VEC * MAX_TILE];
  float sum[VEC], plain[VEC];  // of d * keep * branch, and of d * keep
#pragma unroll
  for (int j = 0; j < VEC; ++j) sum[j] = plain[j] = 0.f;
  if (t.vector >= 0) {
    float factor[VEC];
    load_parameters(scale, t.vector, factor);
    const bool paired = tile % 2 == 0 && vectors % 2 == 0;
    const int stride = gridDim.x * t.rows_per_pass;
    const i64 step = (i64)stride * vectors;
    i64 row = rows - 1 - ((i64)blockIdx.x * t.rows_per_pass + t.ty);
    for (i64 last = row * vectors + t.vector; row >= 0; row -= UNROLL * (i64)stride, last -= UNROLL * step) {
      Stream vdy[UNROLL];
#if TWIN
      Vec16 vhalf[UNROLL];
#endif
      float k[UNROLL];
      Vec16 v[UNROLL];
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        const i64 at_row = row - u * (i64)stride;
        if (at_row < 0) continue;
        vdy[u] = load_stream(dy, last - u * step);  // it is the residual's gradient too: keep what fits in L2
#if TWIN
        vhalf[u] = load_last(dhalf + last - u * step);
#endif
        v[u] = load_last(branch + last - u * step);
#if KEEP
        k[u] = widen_keep(keep[(unsigned int)at_row / (unsigned int)pixels]);
#else
        k[u] = 1.f;
#endif
      }
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        if (row - u * (i64)stride < 0) continue;
        float g[VEC];
        widen_stream(vdy[u], g);
#if TWIN
        float h[VEC];
        widen(vhalf[u], h);
#pragma unroll
        for (int j = 0; j < VEC; ++j) g[j] += h[j];
#endif
#if MIXED
        store(dresidual + last - u * step, narrow(g));
#elif TWIN
        store_stream(dresidual, last - u * step, g, paired);
#endif
        float f[VEC];
        widen(v[u], f);
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
          g[j] *= k[u];
          sum[j] += g[j] * f[j];
          plain[j] += g[j];
          g[j] *= factor[j];
        }
        store(dbranch + last - u * step, narrow(g));
      }
    }
  }
  if (!reduce_channels(t, tile, vectors, sum, plain, partial, ticket, shared, total)) return;
  for (int o = threadIdx.x; o < tile * VEC; o += THREADS) {
    const int c = blockIdx.y * tile * VEC + o;
    if (c >= vectors * VEC) continue;
    const double d = total[tile * VEC + o];
    dscale[c] = (float)(bias ? total[o] + bias[c] * d : total[o]);
    if (bias) dbias[c] = (float)(scale[c] * d);
  }
}
