// Grouped 3 x 3 convolution of 16 or 24 channels a group, and with TRANSPOSED the gradient of its input of stride 1: a warp a group.
//
//   y[n,oh,ow,o] = sum over (r, s, i) of w[o,i,r,s] * x[n, oh*STRIDE - 1 + r, ow*STRIDE - 1 + s, first of o's group + i]
//   TRANSPOSED:    y and x change places, and taps are w[i's channel, o's place in its group, 2-r, 2-s]
//
// Shapes    x: [N, H, W, C], y: [N, OH, OW, C], fp16 or bf16; w: [C, GROUP, 3, 3] in the same dtype or fp32, any strides.
// Replaces  aten::convolution (cuDNN slices, transposes and pads it in NHWC).
// Bytes     x once, y once. RegNetY's [256,72,56,56] in bf16: 116 + 116 MB.
// Flops     2 * 9 * GROUP an output: 25 G there, all of them used but for tiles that are not full (28 of 32 pixels).
// Bound     DRAM bandwidth: 0.054 ms there at 4.24 TB/s; mma.sync at 600 TFLOP/s takes 0.047 with tiles as they are filled.
//           Shared memory: a tile's row of x costs 256 * CHUNKS bytes of ldmatrix for 3 * OCTETS products a pair of chunks.
// Grid      (blocks over items, slabs of BESIDE groups), a warp a group, ACROSS warps along the row. Rows of x pass through a ring of STAGES
//           rows (cp.async) and meet three rows of y, whose sums stay in registers: a product moves a sum on by a row, so that the
//           code is the same for each. Rows of y leave through shared memory in 16-byte vectors, behind the next row's barrier.
// Numerics  fp32 sums on the tensor cores in a fixed order, rounded once; fp32 weights are rounded to x's dtype before. Two runs are
//           bit-equal.
// Limits    padding 1, dilation 1, GROUP a multiple of 8, x and y of one dtype.

#include "vector.cuh"
#include "overlap.cuh"
#include "cp_async.cuh"
#include "mma.cuh"
#include "mma_k8.cuh"
#include "grouped.cuh"
#include "grouped_whole.cuh"

#define STORES ((ROW_PIXELS * SLAB + THREADS - 1) / THREADS)

// Adds what a row of x makes of rows of y: of the one that it is the last (tap row 2), the middle and the first row of.
template <bool is_last, bool is_middle, bool is_first>
__device__ __forceinline__ void add_row(
    const Vec16* row, const int (&at)[TILES], int strip, const unsigned int (&taps)[3][MATRICES], Sums& last, Sums& middle, Sums& first) {
  auto offset = [&](int chunk) {  // with STRIDE 2 even columns stand before odd ones
    const int s = chunk / OCTETS;
    return (STRIDE == 1 ? s : s == 0 ? 0 : s == 1 ? strip + 1 : 1) * PIXEL + chunk % OCTETS;
  };
#pragma unroll
  for (int pair = 0; pair < PAIRS; ++pair) {
    const int chunk = threadIdx.x % 32 < 16 ? offset(2 * pair) : offset(2 * pair + 1);
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
      unsigned int a[4];
      ldmatrix_x4(a, row + at[i] + chunk);
#pragma unroll
      for (int n = 0; n < OCTETS; ++n) {
        auto half = [&](int r, int which) { return taps[r][(2 * pair + which) * OCTETS + n]; };
        const unsigned int b[3][2] = {{half(0, 0), half(0, 1)}, {half(1, 0), half(1, 1)}, {half(2, 0), half(2, 1)}};
        if (is_last) MMA(last[i][n], a, b[2]);
        if (is_middle) MMA(middle[i][n], a, b[1]);
        if (is_first) MMA(first[i][n], a, b[0]);
      }
    }
  }
#if ODD
#pragma unroll
  for (int i = 0; i < TILES; ++i) {
    unsigned int a[2];
    ldmatrix_x2(a, row + at[i] + offset(CHUNKS - 1));
#pragma unroll
    for (int n = 0; n < OCTETS; ++n) {
      if (is_last) MMA_K8(last[i][n], a, taps[2][(CHUNKS - 1) * OCTETS + n]);
      if (is_middle) MMA_K8(middle[i][n], a, taps[1][(CHUNKS - 1) * OCTETS + n]);
      if (is_first) MMA_K8(first[i][n], a, taps[0][(CHUNKS - 1) * OCTETS + n]);
    }
  }
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) grouped_whole_forward(
    const Vec16* __restrict__ x, const Weight* __restrict__ weight, Vec16* __restrict__ y, int items, int batch, int octets,
    int height, int width, int out_height, int out_width, int images, int strip, int strips, int segments, int segment_rows,
    int weight_out, int weight_in, int weight_row, int weight_column) {
  overlap_launches();
  extern __shared__ __align__(16) Vec16 shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, slab = blockIdx.y * SLAB;
  const int padded = STRIDE * (strip - 1) + 3;  // columns with their neighbours
  const int row_units = images * padded * PIXEL, ring_units = STAGES * row_units;
  Vec16* staged = shared + ring_units;  // two rows of y, by turns

  unsigned int taps[3][MATRICES];
  load_taps(
      taps, shared, weight, {weight_out, weight_in, weight_row, weight_column}, blockIdx.y * BESIDE + warp % BESIDE, octets);

  int at[TILES];  // where this lane's pixel of each tile begins in a row of the ring
#pragma unroll
  for (int i = 0; i < TILES; ++i) {
    const int p = (warp / BESIDE * TILES + i) * 16 + lane % 16, m = p < images * strip ? p : 0;
    at[i] = (m / strip * padded + m % strip) * PIXEL + warp % BESIDE * OCTETS;
  }
  int into[LOADS];
#pragma unroll
  for (int k = 0; k < LOADS; ++k) {
    const Place place = place_of(k);
    const int column = place.pixel % padded, turned = column % 2 * (strip + 1) + column / 2;
    into[k] = STRIDE == 1 ? place.unit : (place.pixel - column + turned) * PIXEL + place.octet;
  }
  const i64 x_row = (i64)width * octets, y_row = (i64)out_width * octets;

  for (int index = blockIdx.x; index < items; index += gridDim.x) {
    const Item item = item_of(index, images, strip, strips, segments);
    const int begin = item.segment * segment_rows;
    const int end = out_height - begin < segment_rows ? out_height : begin + segment_rows;
    int from[LOADS], to[STORES];  // from the first image's row; with nothing to read, some place of it
    unsigned int inside = 0;
#pragma unroll
    for (int k = 0; k < LOADS; ++k) {
      const Place place = place_of(k);
      const int image = place.pixel / padded, column = item.column * STRIDE - 1 + place.pixel % padded;
      const bool is = image < images && item.image + image < batch && column >= 0 && column < width && slab + place.octet < octets;
      from[k] = is ? (image * height * width + column) * octets + slab + place.octet : 0;
      inside |= (is ? 1u : 0u) << k;
    }
#pragma unroll
    for (int k = 0; k < STORES; ++k) {
      const Place place = place_of(k);
      const int image = place.pixel / strip, column = item.column + place.pixel % strip;
      const bool is = image < images && item.image + image < batch && column < out_width && slab + place.octet < octets;
      to[k] = is ? (image * out_height * out_width + column) * octets + slab + place.octet : -1;
    }
    int fetched = begin * STRIDE - 1, filled = 0, stage = 0;
    const int behind = end * STRIDE + 2 - STRIDE;  // the row of x behind the last
    const Vec16* next = x + ((i64)item.image * height + fetched) * x_row;
    Vec16* line = y + ((i64)item.image * out_height + begin) * y_row;
    Vec16* full = staged;  // the row of y that is staged next, and then stored
    auto fetch = [&]() {
      if (fetched >= 0 && fetched < height && fetched < behind) {
#pragma unroll
        for (int k = 0; k < LOADS; ++k)
          if (k * THREADS + (int)threadIdx.x < images * padded * SLAB)
            cp_async16(shared + filled + into[k], next + from[k], inside >> k & 1u);
      }
      cp_async_commit();
      ++fetched;
      next += x_row;
      filled = filled + row_units == ring_units ? 0 : filled + row_units;
    };
    auto arrived = [&]() {  // the row at `stage`, for all threads; the one before it is read, and fetched into
      cp_async_wait<STAGES - 2>();
      __syncthreads();
      fetch();
    };
    auto advance = [&]() { stage = stage + row_units == ring_units ? 0 : stage + row_units; };
    auto put = [&]() {
#pragma unroll
      for (int k = 0; k < STORES; ++k)
        if (to[k] >= 0) store(line + to[k], full[place_of(k).unit]);
      line += y_row;
      full = full == staged ? staged + ROW_PIXELS * PIXEL : staged;
    };

    __syncthreads();  // the ring and the staged rows of the item before are read
#pragma unroll
    for (int k = 0; k < STAGES - 1; ++k) fetch();
#if STRIDE == 1
    Sums last, middle, first;
    clear(middle);
    clear(first);
#pragma unroll 1
    for (int h = begin - 1; h <= end; ++h) {
      arrived();
      if (h > begin + 1) put();
      move(last, middle);
      move(middle, first);
      clear(first);
      if (h >= 0 && h < height) add_row<true, true, true>(shared + stage, at, strip, taps, last, middle, first);
      advance();
      if (h > begin) stage_sums<1>(full, last, 0);
    }
#else
    Sums sum, next_sum;
    clear(next_sum);
    arrived();
    if (begin > 0) add_row<false, false, true>(shared + stage, at, strip, taps, sum, sum, next_sum);
    advance();
#pragma unroll 1
    for (int h = 2 * begin; h < 2 * end; h += 2) {
      arrived();
      if (h > 2 * begin) put();
      move(sum, next_sum);
      clear(next_sum);
      if (h < height) add_row<false, true, false>(shared + stage, at, strip, taps, sum, sum, sum);
      advance();
      arrived();
      if (h + 1 < height) add_row<true, false, true>(shared + stage, at, strip, taps, sum, sum, next_sum);
      advance();
      stage_sums<1>(full, sum, 0);
    }
#endif
    __syncthreads();
    put();
  }
}
