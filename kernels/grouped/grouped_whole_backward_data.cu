// Grouped 3 x 3 convolution of stride 2 and 16 or 24 channels a group, gradient of the input, gathered: a warp a group.
//
//   dx[n,h,w,i] = sum over (r, s) with h + 1 - r and w + 1 - s even, and o, of w[o,i,r,s] * dy[n, (h + 1 - r)/2, (w + 1 - s)/2, o]
//
// Shapes    dy: [N, OH, OW, C], dx: [N, H, W, C], fp16 or bf16; w: [C, GROUP, 3, 3] in the same dtype or fp32, any strides.
// Replaces  the input's part of aten::convolution_backward.
// Bytes     dy once, dx once. RegNetY's [256,72,112,112] in bf16: 116 + 462 MB.
// Bound     DRAM bandwidth: 0.136 ms there at 4.24 TB/s; mma.sync at 600 TFLOP/s takes 0.047 with tiles as they are filled.
// Grid      (blocks over items, slabs of BESIDE groups), a warp a group, ACROSS warps along the row. A pixel (i, j) of dy's grid makes dx at
//           (2i, 2j) .. (2i + 1, 2j + 1): even rows and columns have one tap, odd ones two, so one fragment of dy's columns j and
//           j + 1 serves both columns, and a row of dy, read once, ends the odd row above it, makes an even row and begins an odd one.
// Numerics  fp32 sums on the tensor cores in a fixed order, rounded once. Two runs are bit-equal.
// Limits    padding 1, dilation 1, GROUP a multiple of 8; build with TRANSPOSED 1, STRIDE 2.

#include "vector.cuh"
#include "overlap.cuh"
#include "cp_async.cuh"
#include "mma.cuh"
#include "mma_k8.cuh"
#include "grouped.cuh"
#include "grouped_whole.cuh"

#define STORES ((2 * ROW_PIXELS * SLAB + THREADS - 1) / THREADS)

// Adds what a row of dy makes of an even (sum[0]) and an odd column by way of one tap row. Chunks of dy are (column j, octet), then
// (column j + 1, octet): an odd column takes tap column 2 of the first and 0 of the second, an even one tap column 1 of the first.
__device__ __forceinline__ void add_row(
    Sums (&sum)[2], const unsigned int (&a)[TILES][OCTETS][4], const unsigned int (&taps)[MATRICES]) {
  auto odd = [&](int chunk, int n) { return taps[((chunk < OCTETS ? 2 : 0) * OCTETS + chunk % OCTETS) * OCTETS + n]; };
  auto even = [&](int chunk, int n) { return taps[(OCTETS + chunk) * OCTETS + n]; };
#pragma unroll
  for (int pair = 0; pair < OCTETS; ++pair)
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
      for (int n = 0; n < OCTETS; ++n) {
        const unsigned int b[2] = {odd(2 * pair, n), odd(2 * pair + 1, n)};
        MMA(sum[1][i][n], a[i][pair], b);
        if (2 * pair + 1 < OCTETS) {
          const unsigned int c[2] = {even(2 * pair, n), even(2 * pair + 1, n)};
          MMA(sum[0][i][n], a[i][pair], c);
        } else if (2 * pair < OCTETS) {
          const unsigned int half[2] = {a[i][pair][0], a[i][pair][1]};
          MMA_K8(sum[0][i][n], half, even(2 * pair, n));
        }
      }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) grouped_whole_backward_data(
    const Vec16* __restrict__ dy, const Weight* __restrict__ weight, Vec16* __restrict__ dx, int items, int batch, int octets,
    int height, int width, int out_height, int out_width, int images, int strip, int strips, int segments, int segment_rows,
    int weight_out, int weight_in, int weight_row, int weight_column) {
  overlap_launches();
  extern __shared__ __align__(16) Vec16 shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, slab = blockIdx.y * SLAB;
  const int padded = strip + 1;
  const int row_units = images * padded * PIXEL, ring_units = STAGES * row_units;
  Vec16* staged = shared + ring_units;  // two rows of dx

  unsigned int taps[3][MATRICES];
  load_taps(
      taps, shared, weight, {weight_out, weight_in, weight_row, weight_column}, blockIdx.y * BESIDE + warp % BESIDE, octets);

  int at[TILES];
#pragma unroll
  for (int i = 0; i < TILES; ++i) {
    const int p = (warp / BESIDE * TILES + i) * 16 + lane % 16, m = p < images * strip ? p : 0;
    at[i] = (m / strip * padded + m % strip) * PIXEL + warp % BESIDE * OCTETS;
  }
  auto offset = [&](int chunk) { return chunk / OCTETS * PIXEL + chunk % OCTETS; };
  const i64 dy_row = (i64)out_width * octets, dx_row = (i64)width * octets;

  for (int index = blockIdx.x; index < items; index += gridDim.x) {
    const Item item = item_of(index, images, strip, strips, segments);
    const int begin = item.segment * segment_rows;
    const int end = out_height - begin < segment_rows ? out_height : begin + segment_rows;
    int from[LOADS], to[STORES];  // from the first image's row; with nothing to read, some place of it
    unsigned int inside = 0;
#pragma unroll
    for (int k = 0; k < LOADS; ++k) {
      const Place place = place_of(k);
      const int image = place.pixel / padded, column = item.column + place.pixel % padded;
      const bool is = image < images && item.image + image < batch && column < out_width && slab + place.octet < octets;
      from[k] = is ? (image * out_height * out_width + column) * octets + slab + place.octet : 0;
      inside |= (is ? 1u : 0u) << k;
    }
#pragma unroll
    for (int k = 0; k < STORES; ++k) {
      const Place place = place_of(k);
      const int image = place.pixel / (2 * strip), column = 2 * item.column + place.pixel % (2 * strip);
      const bool is = image < images && item.image + image < batch && column < width && slab + place.octet < octets;
      to[k] = is ? (image * height * width + column) * octets + slab + place.octet : -1;
    }
    int fetched = begin, filled = 0, stage = 0;
    const Vec16* next = dy + ((i64)item.image * out_height + begin) * dy_row;
    Vec16* line = dx + ((i64)item.image * height + 2 * begin - 1) * dx_row;
    auto fetch = [&]() {
      if (fetched <= end && fetched < out_height) {
#pragma unroll
        for (int k = 0; k < LOADS; ++k)
          if (k * THREADS + (int)threadIdx.x < images * padded * SLAB)
            cp_async16(shared + filled + place_of(k).unit, next + from[k], inside >> k & 1u);
      }
      cp_async_commit();
      ++fetched;
      next += dy_row;
      filled = filled + row_units == ring_units ? 0 : filled + row_units;
    };

    Sums above[2], level[2];  // the odd row that the next row of dy ends and the even row of this one, by parity of the column
    clear(above[0]);
    clear(above[1]);
    __syncthreads();  // the ring of the item before is read
#pragma unroll
    for (int k = 0; k < STAGES - 1; ++k) fetch();
#pragma unroll 1
    for (int i = begin; i <= end; ++i) {
      cp_async_wait<STAGES - 2>();
      __syncthreads();  // what was staged before is stored too
      fetch();
      const Vec16* row = shared + stage;
      unsigned int a[TILES][OCTETS][4];
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
        for (int pair = 0; pair < OCTETS; ++pair)
          ldmatrix_x4(a[tile][pair], row + at[tile] + (lane < 16 ? offset(2 * pair) : offset(2 * pair + 1)));
      if (i < out_height) add_row(above, a, taps[0]);
      stage_sums<2>(staged, above[0], 0);
      stage_sums<2>(staged, above[1], 1);
      if (i < end) {
        clear(level[0]);
        clear(level[1]);
        add_row(level, a, taps[1]);
        stage_sums<2>(staged + 2 * ROW_PIXELS * PIXEL, level[0], 0);
        stage_sums<2>(staged + 2 * ROW_PIXELS * PIXEL, level[1], 1);
        clear(above[0]);
        clear(above[1]);
        add_row(above, a, taps[2]);
      }
      __syncthreads();
#pragma unroll
      for (int k = 0; k < STORES; ++k) {
        if (to[k] < 0) continue;
        const int unit = place_of(k).unit;
        if (i > begin && 2 * i - 1 < height) store(line + to[k], staged[unit]);
        if (i < end) store(line + dx_row + to[k], staged[2 * ROW_PIXELS * PIXEL + unit]);
      }
      line += 2 * dx_row;
      stage = stage + row_units == ring_units ? 0 : stage + row_units;
    }
  }
}
