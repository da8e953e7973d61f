// Grouped 3 x 3 convolution, gradient of the weight.
//
//   dw[o,i,r,s] = sum over (n, oh, ow) of dy[n,oh,ow,o] * x[n, oh*STRIDE - 1 + r, ow*STRIDE - 1 + s, first of o's group + i]
//
// Shapes    x: [N, H, W, C], dy: [N, OH, OW, C], fp16 or bf16; dw: [C, GROUP, 3, 3] in the weight's dtype and strides.
//           partial: [splits][C / 8 / OUTPUTS][SUMS][4][32] fp32, as the products' fragments lie.
// Replaces  the weight's part of aten::convolution_backward with 4 to 64 channels a group.
// Bytes     x once, dy once, partial sums (in L2). RegNetY's [256,216,28,28] in bf16: 87 + 87 MB.
// Flops     2 * 9 * GROUP an output: 19 G there.
// Bound     DRAM bandwidth: 0.041 ms there at 4.24 TB/s; mma.sync at 600 TFLOP/s takes 0.037 with tiles as they are filled.
// Grid      (splits of the items, slabs of BESIDE groups), a warp OUTPUTS octets of a group's outputs. The products'
//           rows are 16 channels of x (two chunks: tap column and octet), columns an octet of dy, depth 16 pixels; both come out of shared
//           memory transposed. A row of x meets three rows of dy, whose fragments stay in registers and move on by a row with each
//           row of x. A warp has its sums over all of its block's items in registers. The ring of rows runs through from item to
//           item: it is empty once.
// Numerics  fp32 sums on the tensor cores, over splits in fp64, in a fixed order. No atomics: two runs are bit-equal.
// Limits    padding 1, dilation 1, C a multiple of 8; build with TRANSPOSED 0.

#include "vector.cuh"
#include "overlap.cuh"
#include "cp_async.cuh"
#include "mma.cuh"
#include "grouped.cuh"

#define SLAB (BESIDE * OCTETS)    // octets of a pixel that a block has
#define PIXEL (SLAB | 1)          // odd: the 8 pixels of an ldmatrix matrix lie in 32 different banks
#define UNITS (OCTETS / OUTPUTS)  // warps that share a group
#define ROW_PIXELS (TILES * 16)
#define STEPS ((CHUNKS + 1) / 2)   // pairs of chunks; an odd last one is doubled, and what is twice is not read
#define SUMS (STEPS * 3 * OUTPUTS)
#define SUM_THREADS 256

typedef unsigned int Gradients[TILES][OUTPUTS][2];  // a row of dy: a fragment an octet

__device__ __forceinline__ void clear(Gradients& rows) {
#pragma unroll
  for (int i = 0; i < TILES * OUTPUTS * 2; ++i) rows[i / (OUTPUTS * 2)][i / 2 % OUTPUTS][i % 2] = 0u;
}

__device__ __forceinline__ void move(Gradients& to, const Gradients& from) {
#pragma unroll
  for (int i = 0; i < TILES * OUTPUTS * 2; ++i)
    to[i / (OUTPUTS * 2)][i / 2 % OUTPUTS][i % 2] = from[i / (OUTPUTS * 2)][i / 2 % OUTPUTS][i % 2];
}

// A row of dy from shared memory; `row` is where this lane's pixel of the first tile has the warp's octets.
__device__ __forceinline__ void read(Gradients& to, const Vec16* row) {
#pragma unroll
  for (int i = 0; i < TILES; ++i) {
    const Vec16* tile = row + i * 16 * PIXEL;
#if OUTPUTS == 1
    ldmatrix_x2_trans(to[i][0], tile);
#else
#pragma unroll
    for (int n = 0; n < OUTPUTS; n += 2) {
      unsigned int two[4];
      ldmatrix_x4_trans(two, tile + n + threadIdx.x % 32 / 16);
      to[i][n][0] = two[0];
      to[i][n][1] = two[1];
      to[i][n + 1][0] = two[2];
      to[i][n + 1][1] = two[3];
    }
#endif
  }
}

// Adds what a row of x makes with the rows of dy that it meets by tap rows 0, 1, 2. `at`: this lane's pixel of each tile.
template <bool zero, bool one, bool two>
__device__ __forceinline__ void add_row(
    float (&sum)[SUMS][4], const Vec16* row, const int (&at)[TILES], int strip, const Gradients& g0, const Gradients& g1,
    const Gradients& g2) {
  auto offset = [&](int chunk) {  // with STRIDE 2 even columns stand before odd ones
    const int s = chunk / OCTETS;
    return (STRIDE == 1 ? s : s == 0 ? 0 : s == 1 ? strip + 1 : 1) * PIXEL + chunk % OCTETS;
  };
#pragma unroll
  for (int i = 0; i < TILES; ++i)
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const int low = offset(2 * step), high = 2 * step + 1 < CHUNKS ? offset(2 * step + 1) : low;
      unsigned int a[4];
      ldmatrix_x4_trans(a, row + at[i] + (threadIdx.x / 8 % 2 ? high : low));
#pragma unroll
      for (int n = 0; n < OUTPUTS; ++n) {
        if (zero) MMA(sum[(step * 3 + 0) * OUTPUTS + n], a, g0[i][n]);
        if (one) MMA(sum[(step * 3 + 1) * OUTPUTS + n], a, g1[i][n]);
        if (two) MMA(sum[(step * 3 + 2) * OUTPUTS + n], a, g2[i][n]);
      }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) grouped_backward_weight(
    const Vec16* __restrict__ dy, const Vec16* __restrict__ x, float* __restrict__ partial, int items, int batch, int octets,
    int height, int width, int out_height, int out_width, int images, int strip, int strips, int segments, int segment_rows) {
  overlap_launches();
  extern __shared__ __align__(16) Vec16 shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int beside = warp / UNITS, slab = blockIdx.y * SLAB;
  const int padded = STRIDE * (strip - 1) + 3;
  const int x_units = images * padded * PIXEL, dy_units = ROW_PIXELS * PIXEL;  // of a row
  const int stage_units = STRIDE * x_units + dy_units, ring_units = STAGES * stage_units;  // a stage: a row of dy, STRIDE rows of x

  // ldmatrix takes (pixels 0-7, first chunk) (pixels 0-7, second) (pixels 8-15, first) (pixels 8-15, second) of x.
  int at[TILES];
#pragma unroll
  for (int i = 0; i < TILES; ++i) {
    const int p = i * 16 + lane % 8 + lane / 16 * 8, m = p < images * strip ? p : 0;
    at[i] = (m / strip * padded + m % strip) * PIXEL + beside * OCTETS;
  }
  const int dy_at = STRIDE * x_units + lane % 16 * PIXEL + warp * OUTPUTS;

  // Of this thread's vectors of a row: the unit in a stage, and image and column among the block's.
  struct Mine {
    int into;
    short image, column;
  };
  auto mine_of = [&](int k, int columns) {
    const int v = k * THREADS + threadIdx.x, pixel = v / SLAB;
    return Mine{pixel * PIXEL + v % SLAB, (short)(pixel / columns), (short)(pixel % columns)};
  };
  const int octet = slab + threadIdx.x % SLAB;  // all of a thread's vectors have the same: THREADS is a multiple of SLAB
  Mine of_x[LOADS], of_dy[DY_LOADS];
#pragma unroll
  for (int k = 0; k < LOADS; ++k) {
    of_x[k] = mine_of(k, padded);
    const int column = of_x[k].column;
    if (STRIDE == 2) of_x[k].into += (column % 2 * (strip + 1) + column / 2 - column) * PIXEL;
  }
#pragma unroll
  for (int k = 0; k < DY_LOADS; ++k) of_dy[k] = mine_of(k, strip);

  // What is fetched runs ahead of what is read, over the ends of items.
  int coming = blockIdx.x, fetched = 0, rows = 0, h = 0, filled = 0;  // item, rows of it so far and in all, row of x, place
  int from[LOADS], dy_from[DY_LOADS];
  const Vec16 *next = x, *dy_next = dy;
  const i64 x_row = (i64)width * octets, dy_row = (i64)out_width * octets;
  auto fetch = [&]() {
    if (fetched >= rows && coming < items) {
      const Item item = item_of(coming, images, strip, strips, segments);
      const int begin = item.segment * segment_rows;
      const int end = out_height - begin < segment_rows ? out_height : begin + segment_rows;
      coming += gridDim.x;
      fetched = 0;
      rows = (end - 1 - begin) * STRIDE + 3;
      h = begin * STRIDE - 1;
      next = x + ((i64)item.image * height + h) * x_row;
      dy_next = dy + ((i64)item.image * out_height + begin) * dy_row;
#pragma unroll
      for (int k = 0; k < LOADS; ++k) {
        const int image = of_x[k].image, column = item.column * STRIDE - 1 + of_x[k].column;
        const bool inside = image < images && item.image + image < batch && column >= 0 && column < width && octet < octets;
        from[k] = inside ? (image * height * width + column) * octets + octet : -1;
      }
#pragma unroll
      for (int k = 0; k < DY_LOADS; ++k) {
        const int image = of_dy[k].image, column = item.column + of_dy[k].column;
        const bool inside = image < images && item.image + image < batch && column < out_width && octet < octets;
        dy_from[k] = inside ? (image * out_height * out_width + column) * octets + octet : -1;
      }
    }
#pragma unroll
    for (int u = 0; u < STRIDE; ++u) {
      Vec16* to = shared + filled + u * x_units;
      if (fetched + u < rows && h + u >= 0 && h + u < height) {
#pragma unroll
        for (int k = 0; k < LOADS; ++k)
          if (of_x[k].image < images) cp_async16(to + of_x[k].into, from[k] >= 0 ? next + u * x_row + from[k] : x, from[k] >= 0);
      }
    }
    Vec16* to = shared + filled + STRIDE * x_units;
    if (fetched < rows - 2) {  // the last two rows of x end what rows of dy before them began
#pragma unroll
      for (int k = 0; k < DY_LOADS; ++k)
        if (of_dy[k].into < dy_units)
          cp_async16(to + of_dy[k].into, dy_from[k] >= 0 ? dy_next + dy_from[k] : dy, dy_from[k] >= 0);
    }
    cp_async_commit();
    fetched += STRIDE;
    h += STRIDE;
    next += STRIDE * x_row;
    dy_next += dy_row;
    filled = filled + stage_units == ring_units ? 0 : filled + stage_units;
  };
  int stage = 0;
  auto arrived = [&]() {  // the rows at `stage`, for all threads; those before are read, and fetched into
    cp_async_wait<STAGES - 2>();
    __syncthreads();
    fetch();
  };
  auto advance = [&]() { stage = stage + stage_units == ring_units ? 0 : stage + stage_units; };

  float sum[SUMS][4];
#pragma unroll
  for (int i = 0; i < SUMS * 4; ++i) sum[i / 4][i % 4] = 0.f;
#pragma unroll 1
  for (int k = 0; k < STAGES - 1; ++k) fetch();
#pragma unroll 1
  for (int index = blockIdx.x; index < items; index += gridDim.x) {
    const int begin = index % segments * segment_rows;
    const int end = out_height - begin < segment_rows ? out_height : begin + segment_rows;
    Gradients g0, g1;
    clear(g0);
    clear(g1);
#if STRIDE == 1
    Gradients g2;
#pragma unroll 1
    for (int row = begin - 1; row <= end; ++row) {
      arrived();
      move(g2, g1);
      move(g1, g0);
      if (row + 1 < end) {
        read(g0, shared + stage + dy_at);
      } else {
        clear(g0);
      }
      if (row >= 0 && row < height) add_row<true, true, true>(sum, shared + stage, at, strip, g0, g1, g2);
      advance();
    }
#else
#pragma unroll 1
    for (int oh = begin; oh <= end; ++oh) {
      arrived();
      move(g1, g0);
      if (oh < end) {
        read(g0, shared + stage + dy_at);
      } else {
        clear(g0);
      }
      if (oh > 0 && 2 * oh - 1 < height) add_row<true, false, true>(sum, shared + stage, at, strip, g0, g0, g1);
      if (oh < end && 2 * oh < height) add_row<false, true, false>(sum, shared + stage + x_units, at, strip, g0, g0, g0);
      advance();
    }
#endif
  }

  const int first = slab + warp * OUTPUTS;
  if (first >= octets) return;
  float* mine = partial + ((i64)blockIdx.x * octets + first) * (SUMS / OUTPUTS * 128) + lane;
#pragma unroll
  for (int i = 0; i < SUMS; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) mine[(i * 4 + e) * 32] = sum[i][e];
}

// dw from the sums of `splits` blocks, added in a fixed order, in fp64. A block has SUM_THREADS / parts places of fragments, `parts`
// threads a place.
extern "C" __global__ void __launch_bounds__(SUM_THREADS) grouped_backward_weight_sum(
    const float* __restrict__ partial, Weight* __restrict__ dweight, int splits, int parts, int all, int weight_out, int weight_in,
    int weight_row, int weight_column) {
  overlap_launches();
  __shared__ double totals[SUM_THREADS];
  const int places = SUM_THREADS / parts, place = blockIdx.x * places + threadIdx.x % places;
  double total = 0.0;
  if (place < all) {
#pragma unroll 8
    for (int b = threadIdx.x / places; b < splits; b += parts) total += partial[(i64)b * all + place];
  }
  totals[threadIdx.x] = total;
  __syncthreads();
  if ((int)threadIdx.x >= places || place >= all) return;
  for (int p = 1; p < parts; ++p) total += totals[p * places + threadIdx.x];

  const int lane = place % 32, e = place / 32 % 4, i = place / 128 % SUMS, unit = place / 128 / SUMS;
  const int chunk = i / (3 * OUTPUTS) * 2 + e / 2, c = chunk % OCTETS * 8 + lane / 4;
  const int out = (unit * OUTPUTS + i % OUTPUTS) * 8 + lane % 4 * 2 + e % 2;
  if (chunk >= CHUNKS || out % CG / GROUP != c / GROUP) return;  // twice, or of the octet's other group
  Weight* to =
      dweight + out * weight_out + c % GROUP * weight_in + i / OUTPUTS % 3 * weight_row + chunk / OCTETS * weight_column;
#if WEIGHT_STORAGE == 0
  *to = (float)total;
#else
  const float f[VEC] = {(float)total, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
  *to = (Weight)narrow(f).w[0];
#endif
}
