// Depthwise convolution, gradient of weight and bias on the tensor cores, 16-bit storage.
//
//   dw[c,r,s] = sum over (n, oh, ow) of dy[n,oh,ow,c] * x[n, oh - pad_h + r, ow - pad_w + s, c]
//   db[c]     = sum over (n, oh, ow) of dy[n,oh,ow,c]
//
// Shapes    x: [N, H, W, C], dy: [N, OH, OW, C], fp16 or bf16. partial: [blocks][K*K + 1][C] fp32, which
//           depthwise_backward_weight_sum adds up; its last row is written with BIAS only.
// Replaces  the parameters' part of aten::convolution_backward with as many groups as channels (cuDNN, its weakest).
// Bytes     x once, dy once. [256,96,56,56] k7 in bf16: 154 + 154 MB.
// Bound     DRAM bandwidth (0.07 ms there at 4.25 TB/s). Over 16 strips, d[j, n] += x[strip, j] dy[strip, n]: one m16n8k16 a row of
//           taps for 128 values of dy, of whose result the diagonals j = n + s - lead are the gradient (1/16 to 1/2 of it).
// Grid      (blocks over items, channel tiles). See band.cuh. A warp keeps the products of CH channels over all its items, and the
//           last rows of dy as fragments.
// Numerics  products of 16-bit values, fp32 sums a block in a fixed order, over blocks in fp64. No atomics: two runs are bit-equal.
// Limits    C a multiple of CH; stride 1, no dilation; images of a block within 31-bit byte offsets.

#include "band.cuh"
#include "overlap.cuh"

#define X_CELLS (COPIES * AT_ONCE * PITCH)
#define DY_CELLS (ROW_COPIES * AT_ONCE * PITCH)

extern "C" __global__ void __launch_bounds__(BAND_THREADS, MIN_BLOCKS) depthwise_band_weight(
    const Chunk* __restrict__ dy, const Chunk* __restrict__ x, float* __restrict__ partial, int items, int batch, int vectors,
    int height, int width, int out_height, int out_width, int pad_height, int pad_width, int origin, int lead, int groups,
    int column_tiles, int segment_rows) {
  overlap_launches();
  __shared__ __align__(16) unsigned int stages[STAGES][X_CELLS + DY_CELLS];  // a row of x and one of dy
  __shared__ int x_places[2][COPIES * AT_ONCE], dy_places[2][ROW_COPIES * AT_ONCE];  // of the items by turns
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int unit = threadIdx.x % UNITS, channel = blockIdx.y * TILE + unit * (COPY / 2);  // that this thread copies
  const bool copies = channel < vectors * CH;
  const int pixel = vectors * (int)sizeof(Chunk);
  const int row_bytes = width * pixel, out_row_bytes = out_width * pixel;
  const int image_bytes = height * row_bytes, out_image_bytes = out_height * out_row_bytes;
  const int pixel_of_copy = threadIdx.x / UNITS;  // and every AT_ONCE-th from there on
  const int cell = pixel_of_copy * PITCH + unit * (COPY / 4);

  // A lane's pixels: g (and g + 8) of strips t, t + 4, t + 8 and t + 12.
  const int word = warp * (CH / 2);
  const int strip = (t / STRIPS * PIECE + t % STRIPS * PIXELS) * PITCH + word;
  const int dy_strip = X_CELLS + (t * PIXELS + (g < PIXELS ? g : PIXELS - 1)) * PITCH + word;
  auto strip_step = [](int i) { return (4 * i / STRIPS * PIECE + 4 * i % STRIPS * PIXELS) * PITCH; };

  auto last_step = [&](const Part& p) {
    const int last = height - 1 + pad_height;
    return last < p.end + K - 2 ? last : p.end + K - 2;
  };

  int item_ahead = blockIdx.x, step_ahead = 0, last_ahead = -1, end_ahead = 0, slot_ahead = 0, turn = 0;
  const char *from = (const char*)x + 2 * channel, *dy_from = (const char*)dy + 2 * channel;
  auto aim = [&]() {
    if (item_ahead >= items) return;
    const Part p = part_of(item_ahead, groups, column_tiles, segment_rows, out_height);
    step_ahead = p.begin;
    last_ahead = last_step(p);
    end_ahead = p.end;
    turn ^= 1;
    place<COPIES, PIECE>(x_places[turn], p.n, batch, p.column + origin, width, image_bytes, pixel);
    place<ROW_COPIES, STRIPS * PIXELS>(dy_places[turn], p.n, batch, p.column, out_width, out_image_bytes, pixel);
    from = (const char*)x + 2 * channel + (i64)p.n * image_bytes + (i64)(step_ahead - pad_height) * row_bytes;
    dy_from = (const char*)dy + 2 * channel + (i64)p.n * out_image_bytes + (i64)step_ahead * out_row_bytes;
  };
  auto fetch = [&]() {
    if (item_ahead < items) {
      const int row = step_ahead - pad_height;
      const bool row_inside = copies && row >= 0 && row < height;
#pragma unroll
      for (int i = 0; i < COPIES; ++i) {
        const int place = x_places[turn][pixel_of_copy + AT_ONCE * i];
        const bool valid = row_inside && place >= 0;
        copy_unit(stages[slot_ahead] + cell + i * AT_ONCE * PITCH, from + (unsigned int)place, valid);
      }
      from += row_bytes;
#pragma unroll
      for (int i = 0; i < ROW_COPIES; ++i) {
        const int place = dy_places[turn][pixel_of_copy + AT_ONCE * i];
        const bool valid = copies && step_ahead < end_ahead && place >= 0;
        copy_unit(stages[slot_ahead] + X_CELLS + cell + i * AT_ONCE * PITCH, dy_from + (unsigned int)place, valid);
      }
      dy_from += out_row_bytes;
      if (++step_ahead > last_ahead) {
        item_ahead += gridDim.x;
        aim();
      }
    }
    cp_async_commit();
    slot_ahead = slot_ahead + 1 < STAGES ? slot_ahead + 1 : 0;
  };
  aim();
#pragma unroll 1
  for (int i = 0; i < STAGES - 1; ++i) {
    __syncthreads();
    fetch();
  }

  float sum[K][CH][4];
#pragma unroll
  for (int r = 0; r < K; ++r)
#pragma unroll
    for (int c = 0; c < CH; ++c)
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[r][c][i] = 0.f;
#if BIAS
  float of_bias[4] = {0.f, 0.f, 0.f, 0.f};  // row c: the sums of dy of channel c, a column a pixel of a strip
  const unsigned int one = pack(1.f, 1.f);
#endif

  int slot = 0;
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const Part p = part_of(item, groups, column_tiles, segment_rows, out_height);
    const int last = last_step(p);
    unsigned int rows[K][CH][2];  // of dy; that of step m lies in slot (m - p.begin) % K
#pragma unroll
    for (int q = 0; q < K; ++q)
#pragma unroll
      for (int c = 0; c < CH; ++c) rows[q][c][0] = rows[q][c][1] = 0u;
    for (int m = p.begin, phase = 0; m <= last; ++m) {
      cp_async_wait<STAGES - 2>();
      __syncthreads();
      fetch();  // into the stage that every warp has left before the barrier
      const unsigned int* stage = stages[slot];
      slot = slot + 1 < STAGES ? slot + 1 : 0;
      const int row = m - pad_height;
      unsigned int a[CH][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const unsigned int* line = stage + strip + in_window(g + 8 * half) * PITCH;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          if (half == 1 && !WIDE) {
#pragma unroll
            for (int c = 0; c < CH; ++c) a[c][2 * k + half] = 0u;
            continue;
          }
          const Chunk v = *(const Chunk*)(line + strip_step(2 * k)), w = *(const Chunk*)(line + strip_step(2 * k + 1));
#pragma unroll
          for (int c = 0; c < CH; c += 2) {
            a[c][2 * k + half] = low_halves(v.w[c / 2], w.w[c / 2]);
            a[c + 1][2 * k + half] = high_halves(v.w[c / 2], w.w[c / 2]);
          }
        }
      }
#pragma unroll
      for (int u = 0; u < K; ++u) {
        if (phase != u) continue;  // one for the whole block: registers need an index that the compiler knows
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const unsigned int* line = stage + dy_strip + 8 * k * PIXELS * PITCH;
          const Chunk v = *(const Chunk*)line, w = *(const Chunk*)(line + 4 * PIXELS * PITCH);
#pragma unroll
          for (int c = 0; c < CH; c += 2) {
            rows[u][c][k] = low_halves(v.w[c / 2], w.w[c / 2]);
            rows[u][c + 1][k] = high_halves(v.w[c / 2], w.w[c / 2]);
          }
        }
#if BIAS
#pragma unroll
        for (int c = 0; c < CH; ++c) {
          const unsigned int row_of_ones = g == c ? one : 0u, ones[4] = {row_of_ones, 0u, row_of_ones, 0u};
          product(of_bias, ones, rows[u][c]);
        }
#endif
        if (row < 0 || row >= height) continue;
#pragma unroll
        for (int r = 0; r < K; ++r)
#pragma unroll
          for (int c = 0; c < CH; ++c) product(sum[r][c], a[c], rows[(u - r + K) % K][c]);
      }
      phase = phase + 1 < K ? phase + 1 : 0;
    }
  }

  // The diagonals: a warp's products of one channel and row of taps lie in its part of the stages, [16][8].
  __syncthreads();
  float* mine = (float*)stages[0] + warp * 128;
  const int vector_mine = blockIdx.y * WARPS + warp, channels = vectors * CH;
  float* to = partial + (i64)blockIdx.x * (K * K + 1) * channels + vector_mine * CH;
#pragma unroll
  for (int r = 0; r < K; ++r)
#pragma unroll
    for (int c = 0; c < CH; ++c) {
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 4; ++i) mine[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = sum[r][c][i];
      __syncwarp();
      if (lane < K && vector_mine < vectors) {
        float total = 0.f;
#pragma unroll
        for (int n = 0; n < PIXELS; ++n) {
          const int j = n + lane - lead;
          if (j >= 0 && j < WINDOW) total += mine[j * 8 + n];
        }
        to[(i64)(r * K + lane) * channels + c] = total;
      }
    }
#if BIAS
  __syncwarp();
  mine[g * 8 + 2 * t] = of_bias[0];
  mine[g * 8 + 2 * t + 1] = of_bias[1];
  __syncwarp();
  if (lane < CH && vector_mine < vectors) {
    float total = 0.f;
#pragma unroll
    for (int n = 0; n < PIXELS; ++n) total += mine[lane * 8 + n];
    to[(i64)K * K * channels + lane] = total;
  }
#endif
}
