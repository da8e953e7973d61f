// Grouped 3 x 3 convolution, gradient of the weight.
//
//   dw[o,i,r,s] = sum over (n, oh, ow) of dy[n,oh,ow,o] * x[n, oh*STRIDE - 1 + r, ow*STRIDE - 1 + s, first of o's group + i]
//
// Shapes    x: [N, H, W, C], dy: [N, OH, OW, C], fp16 or bf16; dw: [C, GROUP, 3, 3] in the weight's dtype and strides.
//           partial: [splits][octets][3][STEPS][4][32] fp32, as the products' fragments lie.
// Replaces  the weight's part of aten::convolution_backward with 4 to 64 channels a group.
// Bytes     x once, dy once, partial sums (in L2). ResNeXt-50's [256,128,56,56] in bf16: 206 + 206 MB.
// Bound     DRAM bandwidth up to CG 16: 0.097 ms there at 4.24 TB/s; mma.sync 0.033. CG 32: both alike.
// Grid      (splits of the items, slabs of WARPS octets). The products' rows are 16 channels of x (two chunks: tap column and octet),
//           columns the warp's octet of dy, depth 16 pixels; both come out of shared memory transposed. A row of x meets three rows of
//           dy, whose fragments stay in registers. A warp has the sums of its octet over all its items in registers.
// Numerics  fp32 sums on the tensor cores and over splits (fp64) in a fixed order. No atomics: two runs are bit-equal.
// Limits    padding 1, dilation 1, C a multiple of 8; build with TRANSPOSED 0.

#include "vector.cuh"
#include "cp_async.cuh"
#include "mma.cuh"
#include "grouped.cuh"
#include "grouped_slab.cuh"

#define DY_LOADS ((TILES + 1) / 2)

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) grouped_backward_weight(
    const Vec16* __restrict__ dy, const Vec16* __restrict__ x, float* __restrict__ partial, int items, int batch, int octets,
    int height, int width, int out_height, int out_width, int images, int strip, int strips, int segments, int segment_rows) {
  extern __shared__ __align__(16) Vec16 shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int padded = STRIDE * (strip - 1) + 3;
  const int x_units = images * padded * PIXEL, row_units = x_units + TILES * 16 * PIXEL;  // a stage: a row of x, one of dy

  // ldmatrix takes (pixels 0-7, first chunk) (pixels 0-7, second) (pixels 8-15, first) (pixels 8-15, second) for x.
  int at[TILES];
#pragma unroll
  for (int i = 0; i < TILES; ++i) {
    const int p = i * 16 + lane % 8 + lane / 16 * 8, m = p < images * strip ? p : 0;
    at[i] = (m / strip * padded + m % strip) * PIXEL + warp / OCTETS * OCTETS;
  }
  auto offset = [&](int chunk) {
    const int s = chunk / OCTETS;
    return (STRIDE == 1 ? s : s == 0 ? 0 : s == 1 ? strip + 1 : 1) * PIXEL + chunk % OCTETS;
  };
  const int pixel = threadIdx.x / WARPS, mine = blockIdx.y * WARPS + threadIdx.x % WARPS;
  int into[LOADS];
#pragma unroll
  for (int k = 0; k < LOADS; ++k) {
    const int p = k * 32 + pixel, column = p % padded;
    const int place = STRIDE == 1 ? column : column % 2 * (strip + 1) + column / 2;
    into[k] = p < images * padded ? (p / padded * padded + place) * PIXEL + threadIdx.x % WARPS : -1;
  }

  float sum[3][STEPS][4];
#pragma unroll
  for (int r = 0; r < 3; ++r)
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[r][step][e] = 0.f;

  for (int index = blockIdx.x; index < items; index += gridDim.x) {
    const Item item = item_of(index, images, strip, strips, segments);
    const int begin = item.segment * segment_rows;
    const int end = out_height - begin < segment_rows ? out_height : begin + segment_rows;
    const int first = begin * STRIDE - 1, rows = (end - 1 - begin) * STRIDE + 3;
    int from[LOADS], dy_from[DY_LOADS];
#pragma unroll
    for (int k = 0; k < LOADS; ++k) {
      const int p = k * 32 + pixel, image = item.image + p / padded, column = item.column * STRIDE - 1 + p % padded;
      const bool inside = p < images * padded && image < batch && column >= 0 && column < width && mine < octets;
      from[k] = inside ? (p / padded * height * width + column) * octets + mine : -1;
    }
#pragma unroll
    for (int k = 0; k < DY_LOADS; ++k) {
      const int p = k * 32 + pixel, image = item.image + p / strip, column = item.column + p % strip;
      const bool inside = p < images * strip && image < batch && column < out_width && mine < octets;
      dy_from[k] = inside ? (p / strip * out_height * out_width + column) * octets + mine : -1;
    }
    const Vec16* image = x + (i64)item.image * height * width * octets;
    const Vec16* dy_image = dy + (i64)item.image * out_height * out_width * octets;

    int fetched = 0, filled = 0, stage = 0;
    auto fetch = [&]() {
      const int h = first + fetched, oh = begin + fetched / STRIDE;
      Vec16* to = shared + filled * row_units;
      if (fetched < rows && h >= 0 && h < height) {
        const Vec16* row = image + (i64)h * width * octets;
#pragma unroll
        for (int k = 0; k < LOADS; ++k)
          if (into[k] >= 0) cp_async16(to + into[k], from[k] >= 0 ? row + from[k] : x, from[k] >= 0);
      }
      if (fetched % STRIDE == 0 && oh < end) {
        const Vec16* row = dy_image + (i64)oh * out_width * octets;
#pragma unroll
        for (int k = 0; k < DY_LOADS; ++k) {
          const int p = k * 32 + pixel;
          if (p < TILES * 16)
            cp_async16(
                to + x_units + p * PIXEL + threadIdx.x % WARPS, dy_from[k] >= 0 ? row + dy_from[k] : dy, dy_from[k] >= 0);
        }
      }
      cp_async_commit();
      ++fetched;
      filled = filled + 1 == STAGES ? 0 : filled + 1;
    };

    unsigned int gradient[SLOTS][TILES][2];
#pragma unroll
    for (int q = 0; q < SLOTS; ++q)
#pragma unroll
      for (int i = 0; i < TILES; ++i) gradient[q][i][0] = gradient[q][i][1] = 0u;

    __syncthreads();  // the ring of the item before is read
#pragma unroll
    for (int k = 0; k < STAGES - 1; ++k) fetch();
    for (int q = 0; q < rows; q += PHASES) {
#pragma unroll
      for (int u = 0; u < PHASES; ++u) {
        if (q + u >= rows) break;
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        fetch();
        const Vec16* row = shared + stage * row_units;
        if (meets(u, 0)) {
          const bool there = begin + (q + u) / STRIDE < end;
#pragma unroll
          for (int i = 0; i < TILES; ++i) {
            if (there) {
              ldmatrix_x2_trans(gradient[slot_of(u, 0)][i], row + x_units + (i * 16 + lane % 16) * PIXEL + warp);
            } else {
              gradient[slot_of(u, 0)][i][0] = gradient[slot_of(u, 0)][i][1] = 0u;
            }
          }
        }
        const int h = first + q + u;
        if (h >= 0 && h < height) {
#pragma unroll
          for (int step = 0; step < STEPS; ++step) {
            const int low = offset(2 * step), high = 2 * step + 1 < CHUNKS ? offset(2 * step + 1) : low;
            const int lanes = lane / 8 % 2 ? high : low;
#pragma unroll
            for (int i = 0; i < TILES; ++i) {
              unsigned int a[4];
              ldmatrix_x4_trans(a, row + at[i] + lanes);
#pragma unroll
              for (int r = 0; r < 3; ++r)
                if (meets(u, r)) MMA(sum[r][step], a, gradient[slot_of(u, r)][i]);
            }
          }
        }
        stage = stage + 1 == STAGES ? 0 : stage + 1;
      }
    }
  }

  const int octet = blockIdx.y * WARPS + warp;
  if (octet >= octets) return;
  float* mine_of = partial + ((i64)blockIdx.x * octets + octet) * (3 * STEPS * 4 * 32) + lane;
#pragma unroll
  for (int r = 0; r < 3; ++r)
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
      for (int e = 0; e < 4; ++e) mine_of[((r * STEPS + step) * 4 + e) * 32] = sum[r][step][e];
}

// dw from the sums of `splits` blocks, added in a fixed order, in fp64. A thread: one place of a fragment.
extern "C" __global__ void __launch_bounds__(THREADS) grouped_backward_weight_sum(
    const float* __restrict__ partial, Weight* __restrict__ dweight, int splits, int octets, int weight_out, int weight_in,
    int weight_row, int weight_column) {
  const int all = octets * 3 * STEPS * 4 * 32, place = blockIdx.x * THREADS + threadIdx.x;
  if (place >= all) return;
  const int lane = place % 32, e = place / 32 % 4, step = place / 128 % STEPS, r = place / 128 / STEPS % 3;
  const int octet = place / 128 / STEPS / 3;
  const int chunk = 2 * step + e / 2, c = chunk % OCTETS * 8 + lane / 4, out = octet * 8 + lane % 4 * 2 + e % 2;
  if (chunk >= CHUNKS || out % CG / GROUP != c / GROUP) return;
  double total = 0.0;
#pragma unroll 8
  for (int b = 0; b < splits; ++b) total += partial[(i64)b * all + place];
  Weight* to = dweight + out * weight_out + c % GROUP * weight_in + r * weight_row + chunk / OCTETS * weight_column;
#if WEIGHT_STORAGE == 0
  *to = (float)total;
#else
  const float f[VEC] = {(float)total, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
  *to = (Weight)narrow(f).w[0];
#endif
}
