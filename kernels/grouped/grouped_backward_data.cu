// Grouped 3 x 3 convolution of stride 2, gradient of the input, gathered.
//
//   dx[n,h,w,i] = sum over (r, s) with h + 1 - r and w + 1 - s even, and o, of w[o,i,r,s] * dy[n, (h + 1 - r)/2, (w + 1 - s)/2, o]
//
// Shapes    dy: [N, OH, OW, C], dx: [N, H, W, C], fp16 or bf16; w: [C, GROUP, 3, 3] in the same dtype or fp32, any strides.
// Replaces  the input's part of aten::convolution_backward with 4 to 64 channels a group.
// Bytes     dy once, dx once. ResNeXt-50's [256,256,56,56] in bf16: 103 + 411 MB.
// Bound     DRAM bandwidth: 0.121 ms there at 4.24 TB/s; mma.sync 0.02.
// Grid      (blocks over items, slabs of WARPS octets). A pixel (i, j) of dy's grid makes dx at (2i, 2j) .. (2i + 1, 2j + 1): even rows
//           and columns have one tap, odd ones two, so one fragment of dy's columns j and j + 1 serves both columns, and a row of
//           dy ends the odd row above it, makes an even row and begins an odd one. Ring and way out as in grouped_forward.cu.
// Numerics  fp32 sums on the tensor cores in a fixed order, rounded once. Two runs are bit-equal. With GROUP 4, what is not finite in dy
//           makes dx not finite in the neighbouring group of its octet too.
// Limits    padding 1, dilation 1, C a multiple of 8; build with TRANSPOSED 1, STRIDE 2.

#include "vector.cuh"
#include "overlap.cuh"
#include "cp_async.cuh"
#include "mma.cuh"
#include "grouped.cuh"
#include "grouped_slab.cuh"

#define EVEN_STEPS ((OCTETS + 1) / 2)  // chunks are (column j, octet), then (column j + 1, octet); even columns use the first
#define STORES TILES

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) grouped_backward_data(
    const Vec16* __restrict__ dy, const Weight* __restrict__ weight, Vec16* __restrict__ dx, int items, int batch, int octets,
    int height, int width, int out_height, int out_width, int images, int strip, int strips, int segments, int segment_rows,
    int weight_out, int weight_in, int weight_row, int weight_column) {
  overlap_launches();
  extern __shared__ __align__(16) Vec16 shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int padded = strip + 1;
  const int row_units = images * padded * PIXEL;
  Vec16* staged = shared + STAGES * row_units;
  const Strides strides = {weight_out, weight_in, weight_row, weight_column};

  unsigned int even[3][EVEN_STEPS][2], odd[3][OCTETS][2];  // by tap row
  const int octet = blockIdx.y * WARPS + warp;
#pragma unroll
  for (int r = 0; r < 3; ++r) {
#pragma unroll
    for (int chunk = 0; chunk < 2 * EVEN_STEPS; ++chunk)
      even[r][chunk / 2][chunk % 2] = chunk < OCTETS ? taps_of(weight, strides, octet, octets, chunk * 8, r, 1) : 0u;
#pragma unroll
    for (int chunk = 0; chunk < 2 * OCTETS; ++chunk)
      odd[r][chunk / 2][chunk % 2] =
          taps_of(weight, strides, octet, octets, chunk % OCTETS * 8, r, chunk < OCTETS ? 2 : 0);
  }

  int at[TILES];
#pragma unroll
  for (int i = 0; i < TILES; ++i) {
    const int m = i * 16 + lane % 16 < images * strip ? i * 16 + lane % 16 : 0;
    at[i] = (m / strip * padded + m % strip) * PIXEL + warp / OCTETS * OCTETS;
  }
  auto offset = [&](int chunk) { return chunk / OCTETS * PIXEL + chunk % OCTETS; };
  const int pixel = threadIdx.x / WARPS, mine = blockIdx.y * WARPS + threadIdx.x % WARPS;

  float above[TILES][2][4];  // the odd row that the next row of dy ends, by parity of the column
#pragma unroll
  for (int i = 0; i < TILES; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) above[i][0][e] = above[i][1][e] = 0.f;

  for (int index = blockIdx.x; index < items; index += gridDim.x) {
    const Item item = item_of(index, images, strip, strips, segments);
    const int begin = item.segment * segment_rows;
    const int end = out_height - begin < segment_rows ? out_height : begin + segment_rows;
    int from[LOADS], to[STORES];
#pragma unroll
    for (int k = 0; k < LOADS; ++k) {
      const int p = k * 32 + pixel, image = item.image + p / padded, column = item.column + p % padded;
      const bool inside = p < images * padded && image < batch && column < out_width && mine < octets;
      from[k] = inside ? (p / padded * out_height * out_width + column) * octets + mine : -1;
    }
#pragma unroll
    for (int k = 0; k < STORES; ++k) {
      const int p = k * 32 + pixel, image = item.image + p / (2 * strip), column = 2 * item.column + p % (2 * strip);
      const bool inside = p < 2 * images * strip && image < batch && column < width && mine < octets;
      to[k] = inside ? (p / (2 * strip) * height * width + column) * octets + mine : -1;
    }
    const Vec16* image = dy + (i64)item.image * out_height * out_width * octets;
    Vec16* out_image = dx + (i64)item.image * height * width * octets;

    int fetched = begin, filled = 0, stage = 0;
    auto fetch = [&]() {
      if (fetched <= end && fetched < out_height) {
        const Vec16* row = image + (i64)fetched * out_width * octets;
#pragma unroll
        for (int k = 0; k < LOADS; ++k) {
          const int p = k * 32 + pixel;
          if (p < images * padded)
            cp_async16(
                shared + filled * row_units + p * PIXEL + threadIdx.x % WARPS, from[k] >= 0 ? row + from[k] : dy, from[k] >= 0);
        }
      }
      cp_async_commit();
      ++fetched;
      filled = filled + 1 == STAGES ? 0 : filled + 1;
    };
    auto put = [&](const float (&values)[TILES][2][4], int h) {
#pragma unroll
      for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int odd_column = 0; odd_column < 2; ++odd_column)
          stage_tile(
              (unsigned int*)(staged + (i * 32 + odd_column) * PIXEL + warp), values[i][odd_column], 8 * PIXEL);
      __syncthreads();
      if (h < height) {
        Vec16* line = out_image + (i64)h * width * octets;
#pragma unroll
        for (int k = 0; k < STORES; ++k)
          if (to[k] >= 0) store(line + to[k], staged[(k * 32 + pixel) * PIXEL + threadIdx.x % WARPS]);
      }
    };

    __syncthreads();  // the ring and the staged row of the item before are read
#pragma unroll
    for (int k = 0; k < STAGES - 1; ++k) fetch();
    for (int i = begin; i <= end; ++i) {
      cp_async_wait<STAGES - 2>();
      __syncthreads();
      fetch();
      const Vec16* row = shared + stage * row_units;
      auto add = [&](float (&into)[TILES][2][4], const unsigned int (&even_taps)[EVEN_STEPS][2],
                     const unsigned int (&odd_taps)[OCTETS][2]) {
#pragma unroll
        for (int step = 0; step < OCTETS; ++step) {
          const int lanes = lane < 16 ? offset(2 * step) : offset(2 * step + 1);
#pragma unroll
          for (int tile = 0; tile < TILES; ++tile) {
            unsigned int a[4];
            ldmatrix_x4(a, row + at[tile] + lanes);
            MMA(into[tile][1], a, odd_taps[step]);
            if (step < EVEN_STEPS) {
              if (2 * step + 1 == OCTETS) {  // the other half is column j + 1
                a[2] = a[0];
                a[3] = a[1];
              }
              MMA(into[tile][0], a, even_taps[step < EVEN_STEPS ? step : 0]);
            }
          }
        }
      };
      const bool inside = i < out_height;
      if (i > begin) {
        if (inside) add(above, even[0], odd[0]);
        put(above, 2 * i - 1);
        __syncthreads();
      }
      if (i < end) {
        float level[TILES][2][4];
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            level[tile][0][e] = level[tile][1][e] = above[tile][0][e] = above[tile][1][e] = 0.f;
        add(level, even[1], odd[1]);
        put(level, 2 * i);
        add(above, even[2], odd[2]);
      }
      stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
  }
}
