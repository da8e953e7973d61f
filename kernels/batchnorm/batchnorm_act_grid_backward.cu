// Batch normalisation (+ residual add) + activation, training mode. Backward in one launch of the whole GPU that reads dy and x once
// and keeps them on chip, or of larger ones what the chip holds (STREAM).
//
//   g = dy * act'(z)      dbias = sum_m g      dweight = invstd * sum_m g * (x - mean)
//   dx = weight * invstd * (g - dbias / M - (x - mean) * invstd^2 * sum_m g (x - mean) / M)      dresidual = g
//
// FORK      y was used twice: dy is the sum of two gradients, dy and dy2, as in batchnorm_act_backward.cu.
// Shapes    dy, dy2, x, dx, dresidual: [M, C] NHWC; mask and saved as any forward wrote them; weight, bias, dweight, dbias: [C] fp32.
// Replaces  the two launches of batchnorm_act_backward.cu where x and dy fit the registers and the shared memory of all SMs, and beyond.
// Bytes     2 reads (+1/16 mask; FORK: +1), 1 write (+1 where dresidual is not dy itself: an activation, or FORK): 3 passes over the
//           tensor in place of 5, or 4 in place of 6, or with FORK 5 in place of 7. STREAM: and what is not kept again, x with dy (and
//           dy2), or with g where that is written in the first reading (KEEPS_G), from L2 as far as that holds it.
// Bound     as in batchnorm_act_grid_forward.cu: L2 or DRAM, and a chain of some 4 us. Arithmetic: 100 instructions a pair of
//           vectors and warp. Expected on an H200, bf16, ReLU, x from DRAM and dy from L2 (two launches measured 23.5 us at 12.6
//           MB on average):
//             16.8 MB 128x64x32x32  loads 7, stores 4.2: 17 us          8.4 MB 128x128x16x16  11 us       4.2 MB 128x256x8x8 8 us
//             12.8 MB 256x512x7x7   14 us                               8.0 MB 256x80x14x14   11 us
// WHOLE_ROWS  a block has whole rows, where pieces of them would split cache lines, or where it takes several rows for their channels to be
//           whole vectors: one more exchange, 3 us (11 MB: 21 for 18).
// Grid      (blocks, tiles), include/grid_tile.cuh; cooperative. HOLD rows of x and dy a thread in registers, `kept` more in shared
//           memory, all under way at once; of those dy2 and the mask follow UNROLL rows at a time.
// Numerics  those of the two launches (with FORK dx comes of a rounded g where that is kept or written): z by the forward's expression,
//           or the forward's bits; fp64 across warps and blocks.
// Limits    without STREAM M <= (HOLD + kept) * blocks * (THREADS / tile); fewer than 2^31 vectors; with a residual only slopes of 0
//           or 1 (none, ReLU, ReLU6); every block on an SM at once.

#ifndef STREAM
#define STREAM 0  // rows that are read twice, at a time; 0 where all are kept
#endif

#include "vector.cuh"
#include "gelu.cuh"
#include "cp_async.cuh"
#include "slots.cuh"
#include "written.cuh"
#include "grid_tile.cuh"
#include "prefetch.cuh"

#ifndef FORK
#define FORK 0
#endif
#define BY_MASK (RESIDUAL && ACT != 0)
#define KEEPS_G (RESIDUAL && (ACT != 0 || FORK))  // dresidual is written: it is not dy itself
// Between the sums and dx the chip holds dy, of which g is made a second time, or g: dy or zero, or a sum.
#define MAKES_G_TWICE (ACT > 2 && !FORK)
#define HOLDS_G (!MAKES_G_TWICE && (ACT != 0 || FORK))

#ifndef UNROLL
#define UNROLL (FORK ? 2 : 4)  // rows of shared memory at a time: their masks, or their other gradients, are under way together
#endif

// Constants of this thread's VEC channels.
struct Channel {
  float mean[VEC], scale[VEC];
#if ACT != 0 && !RESIDUAL
  float offset[VEC];
#endif
};

__device__ __forceinline__ void fetch(const float* constant, int tile, int tx, float (&k)[VEC]) {
#pragma unroll
  for (int j = 0; j < VEC; ++j) k[j] = constant[j * tile + tx];
}

// g[j] = (dy[j] + dy2[j]) * act'(z[j]);  d[j] = x[j] - mean[j]
__device__ __forceinline__ void gradient(
    const Channel& k, const Vec16& vx, const Vec16& dy, const Vec16& dy2, unsigned int bits, float slope, float (&g)[VEC],
    float (&d)[VEC]) {
  widen(vx, d);
  widen(dy, g);
#if FORK
  float other[VEC];
  widen(dy2, other);
#pragma unroll
  for (int j = 0; j < VEC; ++j) g[j] += other[j];
#endif
#pragma unroll
  for (int j = 0; j < VEC; ++j) {
    d[j] -= k.mean[j];
#if BY_MASK
    g[j] = (bits >> j) & 1u ? g[j] : 0.f;
#elif ACT != 0
    g[j] = through_streaming(g[j], d[j] * k.scale[j] + k.offset[j], slope);
#endif
  }
}

// Adds a vector's gradient to the sums. Afterwards `held`, which was dy, is what store_gradients wants.
__device__ __forceinline__ void accumulate(
    const Channel& k, const Vec16& vx, Vec16& held, const Vec16& dy2, unsigned int bits, float slope, float (&sum)[VEC],
    float (&product)[VEC]) {
  float g[VEC], d[VEC];
  gradient(k, vx, held, dy2, bits, slope, g, d);
#pragma unroll
  for (int j = 0; j < VEC; ++j) {
    sum[j] += g[j];
    product[j] += g[j] * d[j];
  }
#if HOLDS_G
  held = narrow(g);  // so that neither z nor the bits are needed again
#endif
}

__device__ __forceinline__ void store_gradient(
    const Channel& k, float (&g)[VEC], const float (&d)[VEC], const float (&c1)[VEC], const float (&c2)[VEC], Vec16* dx) {
#pragma unroll
  for (int j = 0; j < VEC; ++j) g[j] = k.scale[j] * (g[j] - c1[j] - d[j] * c2[j]);
  store(dx, narrow(g));
}

__device__ __forceinline__ void store_gradients(
    const Channel& k, const Vec16& vx, const Vec16& held, const float (&c1)[VEC], const float (&c2)[VEC], Vec16* dx,
    Vec16* dresidual, int place, float slope) {
  float g[VEC], d[VEC];
  widen(vx, d);
  widen(held, g);
#pragma unroll
  for (int j = 0; j < VEC; ++j) {
    d[j] -= k.mean[j];
#if MAKES_G_TWICE
    g[j] = through_streaming(g[j], d[j] * k.scale[j] + k.offset[j], slope);
#endif
  }
#if KEEPS_G
  store(dresidual + place, held);
#endif
  store_gradient(k, g, d, c1, c2, dx + place);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) batchnorm_act_grid_backward(
    const Vec16* __restrict__ dy, const Vec16* __restrict__ dy2, const Vec16* __restrict__ x,
    const unsigned char* __restrict__ mask, unsigned int* __restrict__ memory, int half,
    const float* __restrict__ saved, const float* __restrict__ weight, const float* __restrict__ bias,
    Vec16* __restrict__ dx, Vec16* __restrict__ dresidual, float* __restrict__ dweight, float* __restrict__ dbias,
    int rows, int vectors, int tile, int kept,
#if WHOLE_ROWS
    int channels, int joined,  // rows of the tensor in a row
#endif
    float slope) {
  extern __shared__ __align__(16) Vec16 slots[];  // [2][kept][THREADS]
  __shared__ __align__(16) float scratch[GRID_SCRATCH];
  __shared__ float constant[5 * GRID_WIDTH];
  const Exchange exchange = open_exchange(memory, half);
  const GridTile t = grid_tile(tile, vectors);
  const int width = tile * VEC;
#if !WHOLE_ROWS
  const int channels = vectors * VEC, joined = 1;
#endif
  const int end = t.vector < 0 ? 0 : rows;
  const int at = t.first * vectors + t.vector, step = t.stride * vectors;
  const Slot slot = first_slot(slots), above = slot + kept * SLOTS_APART;
#if STREAM
  const unsigned long long policy = evict_first();  // what is read again has L2 to itself
#endif
  Slot to = slot, to_above = above;
  for (int k = 0; k < kept; ++k, go_on(to), go_on(to_above)) {
    const int place = at + (HOLD + k) * step;
    if (t.first + (HOLD + k) * t.stride < end) {
#if STREAM
      copy_to(to, x + place, policy);
      copy_to(to_above, dy + place, policy);
#else
      copy_to(to, x + place);
      copy_to(to_above, dy + place);
#endif
#if FORK
      prefetch_l2(dy2 + place);
#endif
#if BY_MASK
      prefetch_l2(mask + place);
#endif
    }
  }
  cp_async_commit();
  Vec16 vx[HOLD], vdy[HOLD], vdy2[HOLD];
  unsigned int bits[HOLD];
#pragma unroll
  for (int u = 0; u < HOLD; ++u) {
    bits[u] = 0u;
    if (t.first + u * t.stride < end) {
      vx[u] = load_last(x + at + u * step);
      vdy[u] = load_last(dy + at + u * step);
#if FORK
      vdy2[u] = load_last(dy2 + at + u * step);
#endif
#if BY_MASK
      bits[u] = mask[at + u * step];
#endif
    }
  }
  // While the loads are under way.
#if WHOLE_ROWS
  if (t.vector >= 0) {
    for (int j = t.ty; j < VEC; j += t.rows_per_pass) {
      const int column = t.vector * VEC + j, channel = joined > 1 ? column % channels : column, place = j * tile + t.tx;
      constant[place] = saved[channel];
      constant[width + place] = saved[channels + channel] * weight[channel];
      constant[2 * width + place] = bias[channel];
    }
  }
  const int c = owned_channel(channels);
  const float its_invstd = c >= 0 ? saved[channels + c] : 0.f;
#else
  const int c = grid_channel(tile, vectors);
  if (c >= 0) {
    constant[threadIdx.x] = saved[c];
    constant[width + threadIdx.x] = saved[channels + c] * weight[c];
    constant[2 * width + threadIdx.x] = bias[c];
  }
#endif
  __syncthreads();
  Channel k;
  float sum[VEC], product[VEC];
  fetch(constant, tile, t.tx, k.mean);
  fetch(constant + width, tile, t.tx, k.scale);
#if ACT != 0 && !RESIDUAL
  fetch(constant + 2 * width, tile, t.tx, k.offset);
#endif
#pragma unroll
  for (int j = 0; j < VEC; ++j) sum[j] = product[j] = 0.f;
#pragma unroll
  for (int u = 0; u < HOLD; ++u)
    if (t.first + u * t.stride < end) accumulate(k, vx[u], vdy[u], vdy2[u], bits[u], slope, sum, product);
#if STREAM
  // What is not kept goes by while the copies are under way.
  for (int row = t.first + (HOLD + kept) * t.stride; row < end; row += STREAM * t.stride) {
    const int from = row * vectors + t.vector;
    Vec16 wx[STREAM], wdy[STREAM], wdy2[STREAM];
    unsigned int wbits[STREAM];
#pragma unroll
    for (int u = 0; u < STREAM; ++u) {
      wbits[u] = 0u;
      if (row + u * t.stride >= end) continue;
      wx[u] = load(x + from + u * step);
#if KEEPS_G  // which is read in their place
      wdy[u] = load_last(dy + from + u * step);
#if FORK
      wdy2[u] = load_last(dy2 + from + u * step);
#endif
#else
      wdy[u] = load(dy + from + u * step);
#if FORK
      wdy2[u] = load(dy2 + from + u * step);
#endif
#endif
#if BY_MASK
      wbits[u] = mask[from + u * step];
#endif
    }
#pragma unroll
    for (int u = 0; u < STREAM; ++u) {
      if (row + u * t.stride >= end) continue;
      accumulate(k, wx[u], wdy[u], wdy2[u], wbits[u], slope, sum, product);
#if KEEPS_G
      store(dresidual + from + u * step, wdy[u]);
#endif
    }
  }
#endif
  cp_async_wait<0>();
  // This thread's rows, and those in shared memory: whole batches of loads need no branch between them.
  const int passes = t.first < end ? (end - t.first + t.stride - 1) / t.stride : 0;
  const int own = (passes < HOLD + kept ? passes : HOLD + kept) - HOLD;
  for (int base = 0; base < own; base += UNROLL) {
    Vec16 kept_x[UNROLL], held[UNROLL], other[UNROLL];
    unsigned int kept_bits[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      kept_bits[u] = 0u;
      if (base + u < own) {
#if FORK
        other[u] = load_last(dy2 + at + (HOLD + base + u) * step);
#endif
#if BY_MASK
        kept_bits[u] = mask[at + (HOLD + base + u) * step];
#endif
      }
    }
    if (base + UNROLL <= own) {
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        kept_x[u] = load_slot(slot + (base + u) * SLOTS_APART);
        held[u] = load_slot(above + (base + u) * SLOTS_APART);
      }
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        accumulate(k, kept_x[u], held[u], other[u], kept_bits[u], slope, sum, product);
#if HOLDS_G
        store_slot(above + (base + u) * SLOTS_APART, held[u]);
#endif
      }
    } else {
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        if (base + u < own) {
          held[0] = load_slot(above + (base + u) * SLOTS_APART);
          accumulate(
              k, load_slot(slot + (base + u) * SLOTS_APART), held[0], other[u], kept_bits[u], slope, sum, product);
#if HOLDS_G
          store_slot(above + (base + u) * SLOTS_APART, held[0]);
#endif
        }
      }
    }
  }
  const double inverse = 1.0 / ((double)rows * joined);  // ahead of the sums: it takes as long as a trip to L2
#if WHOLE_ROWS
  sum_over_rows(
      vectors, channels, sum, product, scratch, exchange,
      [&](double first, double second) {
        const double invstd = its_invstd;
        if (threadIdx.x % 16 == 0) {
          dbias[c] = (float)first;
          dweight[c] = (float)(second * invstd);
        }
        return make_float2((float)(first * inverse), (float)(second * inverse * invstd * invstd));
      },
      [&](int channel, float its_first, float its_second) {
        for (int column = channel; column < width; column += channels) {
          const int place = place_of(column, vectors);
          constant[3 * width + place] = its_first;
          constant[4 * width + place] = its_second;
        }
      });
#else
  double first, second;
  sum_over_grid(tile, sum, product, scratch, exchange, first, second);
  if (c >= 0) {
    const double invstd = (double)saved[channels + c];
    constant[3 * width + threadIdx.x] = (float)(first * inverse);
    constant[4 * width + threadIdx.x] = (float)(second * inverse * invstd * invstd);
    if (blockIdx.x == 0) {
      dbias[c] = (float)first;
      dweight[c] = (float)(second * invstd);
    }
  }
#endif
  const unsigned int left = threadIdx.x == 0 ? leave_exchange(exchange) : 0u;
  __syncthreads();
  float c1[VEC], c2[VEC];
  fetch(constant + 3 * width, tile, t.tx, c1);
  fetch(constant + 4 * width, tile, t.tx, c2);
#if STREAM
  // Read again, the last of it first, which L2 still has.
  for (int last = passes - 1; last >= HOLD + kept; last -= STREAM) {
    Vec16 wx[STREAM], wg[STREAM], wdy2[STREAM];
#pragma unroll
    for (int u = 0; u < STREAM; ++u) {
      if (last - u < HOLD + kept) continue;
      const int place = at + (last - u) * step;
      wx[u] = load(x + place);
#if KEEPS_G
      wg[u] = load_written(dresidual + place);
#else
      wg[u] = load(dy + place);
#if FORK
      wdy2[u] = load(dy2 + place);
#endif
#endif
    }
#pragma unroll
    for (int u = 0; u < STREAM; ++u) {
      if (last - u < HOLD + kept) continue;
      float g[VEC], d[VEC];
#if KEEPS_G
      widen(wx[u], d);
      widen(wg[u], g);
#pragma unroll
      for (int j = 0; j < VEC; ++j) d[j] -= k.mean[j];
#else
      gradient(k, wx[u], wg[u], wdy2[u], 0u, slope, g, d);
#endif
      store_gradient(k, g, d, c1, c2, dx + at + (last - u) * step);
    }
  }
#endif
#pragma unroll
  for (int u = 0; u < HOLD; ++u)
    if (t.first + u * t.stride < end) store_gradients(k, vx[u], vdy[u], c1, c2, dx, dresidual, at + u * step, slope);
  for (int base = 0; base < own; base += UNROLL) {
    if (base + UNROLL <= own) {
      Vec16 kept_x[UNROLL], held[UNROLL];
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        kept_x[u] = load_slot(slot + (base + u) * SLOTS_APART);
        held[u] = load_slot(above + (base + u) * SLOTS_APART);
      }
#pragma unroll
      for (int u = 0; u < UNROLL; ++u)
        store_gradients(k, kept_x[u], held[u], c1, c2, dx, dresidual, at + (HOLD + base + u) * step, slope);
    } else {
#pragma unroll 1
      for (int row = base; row < own; ++row)
        store_gradients(
            k, load_slot(slot + row * SLOTS_APART), load_slot(above + row * SLOTS_APART), c1, c2, dx, dresidual,
            at + (HOLD + row) * step, slope);
    }
  }
  if (threadIdx.x == 0) close_exchange(exchange, left, exchanged_words(WHOLE_ROWS ? channels : width));
}
