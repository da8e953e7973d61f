// Depthwise convolution and its data gradient on the tensor cores, 16-bit storage.
//
//   y[n,oh,ow,c] = bias[c] + sum over (r, s) of w[c,r,s] * x[n, oh - pad_h + r, ow - pad_w + s, c]
//
// Shapes    x: [N, H, W, C], y: [N, OH, OW, C], fp16 or bf16; w: [C, 1, K, K] and bias [C] in their own dtype, w rounded to x's.
// Replaces  aten::convolution with as many groups as channels, and the input's part of aten::convolution_backward. With FLIP the
//           taps are reversed: the data gradient is the convolution of dy with them.
// Bytes     x once, y once. ConvNeXt's [256,96,56,56] k7 in bf16: 154 + 154 MB.
// Bound     DRAM bandwidth (0.07 ms there at 4.25 TB/s). For 128 outputs of a channel: K m16n8k16, 2 K to 4 K times fewer issue
//           slots than fp32 FMA need (49 of them an output for k7, 1.6 times the DRAM floor); at about 6 clocks each, k7 keeps the
//           tensor cores busy for 0.4 of the DRAM time. Shared memory: about 160 of the 223 clocks that DRAM takes for 1024 outputs.
// Grid      (blocks over items, channel tiles). See band.cuh. The sums of the K output rows that an input row reaches stay
//           in registers and move on a place a row, which a product that reads one sum and writes another does for nothing: the
//           code is the same for each row. Finished rows go through shared memory, so that whole sectors are written.
// Numerics  products of 16-bit values, fp32 sums in a fixed order, rounded once. No atomics: two runs are bit-equal. A window's pixels
//           outside a pixel's own taps meet zeros: where that makes a NaN of an infinity, the pixel is computed again without them.
// Limits    C a multiple of CH; stride 1, no dilation; images of a block within 31-bit byte offsets.

#include "band.cuh"
#include "overlap.cuh"

#define ROWS 2          // input rows a step: one wait and one barrier for both, and the products of one hide the end of the other
#define TURNS 2         // steps whose finished rows are in shared memory: one's are written out while the next's are made
#define AHEAD (K - 1)   // input rows after an output row's first until it is done

// A row in shared memory: a plane for each copy that makes a pixel, in which neighbouring pixels lie side by side. Planes begin
// SKEW banks apart, so that the copies of a few neighbouring pixels lie in different banks.
#define CELL (COPY / 4)  // words
#define SKEW (32 / UNITS / CELL * CELL)
#define PLANE(pixels) (((pixels) * CELL + 31 - SKEW) / 32 * 32 + SKEW)

// The pixel of a strip's window that is value k of lane t. Strips lie PIXELS apart: for odd PIXELS those that are read at once
// share a bank two by two, for PIXELS 2, 4 and 6 in the other order.
#define IN_STRIP(t, k) (PIXELS % 2 ? 2 * (t) + (k) % 2 + (k) / 2 * 8 : (t) + 4 * (k))

extern "C" __global__ void __launch_bounds__(BAND_THREADS, MIN_BLOCKS) depthwise_band(
    const Chunk* __restrict__ x, const Weight* __restrict__ weight, const Weight* __restrict__ bias, Chunk* __restrict__ y,
    int items, int batch, int vectors, int height, int width, int out_height, int out_width, int pad_height, int pad_width,
    int origin, int lead, int groups, int column_tiles, int segment_rows) {
  overlap_launches();
  constexpr int in_plane = PLANE(STAGE_PIXELS), out_plane = PLANE(ROW_PIXELS);
  __shared__ __align__(16) unsigned int stages[STAGES][ROWS][UNITS * in_plane];
  __shared__ __align__(16) unsigned int done_rows[TURNS][ROWS][UNITS * out_plane];
  __shared__ __align__(16) float start[TILE];  // the bias, as little registers are left
  __shared__ __align__(16) Part part;          // of the item that is worked on, for the same reason
  __shared__ int in_places[2][COPIES * AT_ONCE];  // of the items by turns
  __shared__ int out_places[ROW_COPIES * AT_ONCE];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int unit = threadIdx.x % UNITS, channel = blockIdx.y * TILE + unit * (COPY / 2);  // that this thread copies
  const bool copies = channel < vectors * CH;
  const int mine = blockIdx.y * WARPS + warp;  // the channels that this warp computes
  const int pixel = vectors * (int)sizeof(Chunk);
  const int row_bytes = width * pixel, out_row_bytes = out_width * pixel;
  const int image_bytes = height * row_bytes, out_image_bytes = out_height * out_row_bytes;
  const int pixel_of_copy = threadIdx.x / UNITS;  // and every AT_ONCE-th from there on
  const int in_cell = pixel_of_copy * CELL + unit * in_plane, out_cell = pixel_of_copy * CELL + unit * out_plane;
  auto within = [&](int i, int pixels) {  // of a row, its copy `i`
    return AT_ONCE * (i + 1) <= pixels || pixel_of_copy + AT_ONCE * i < pixels;
  };

  // The bands: value k of a lane is pixel IN_STRIP(t, k) of the window (k 0, 1 in the first register), column g.
  unsigned int band[K][CH][2];
#pragma unroll
  for (int r = 0; r < K; ++r)
#pragma unroll
    for (int c = 0; c < CH; ++c) {
      float value[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int j = IN_STRIP(t, k), s = j + lead - g;
        const bool valid = mine < vectors && j < WINDOW && g < PIXELS && s >= 0 && s < K;
        value[k] = valid ? widen_weight(weight[((i64)mine * CH + c) * (K * K) + (FLIP ? K * K - 1 - (r * K + s) : r * K + s)]) : 0.f;
      }
      band[r][c][0] = pack(value[0], value[1]);
      band[r][c][1] = pack(value[2], value[3]);
    }
  for (int i = threadIdx.x; BIAS && i < TILE; i += BAND_THREADS)
    start[i] = blockIdx.y * TILE + i < vectors * CH ? widen_weight(bias[blockIdx.y * TILE + i]) : 0.f;

  // Strips g and g + 8 of this lane, as pixels of a stage.
  const int unit_of_warp = warp * CH / (COPY / 2), word_of_warp = warp * (CH / 2) % CELL;
  const int strip = unit_of_warp * in_plane + word_of_warp + (g / STRIPS * PIECE + g % STRIPS * PIXELS) * CELL;
  constexpr int next_strip = (STRIPS == 16 ? 8 * PIXELS : 8 / STRIPS * PIECE) * CELL;
  const int finished = unit_of_warp * out_plane + word_of_warp;

  // Rows of the input that a part meets: those above the image are left out, those below it are zeros that complete its last rows.
  // A step beyond the end, where their number is odd, completes a row that is not written.
  auto first_row = [&](const Part& p) { return p.begin < pad_height ? 0 : p.begin - pad_height; };
  auto end_row = [&](const Part& p) { return p.end + AHEAD - pad_height; };

  // What is copied next.
  int item_ahead = blockIdx.x, row_ahead = 0, end_ahead = 0, slot_ahead = 0, turn_ahead = 0;
  const char* from = (const char*)x + 2 * channel;
  auto aim = [&]() {
    if (item_ahead >= items) return;
    const Part p = part_of(item_ahead, groups, column_tiles, segment_rows, out_height);
    row_ahead = first_row(p);
    end_ahead = end_row(p);
    turn_ahead ^= 1;
    place<COPIES, PIECE>(in_places[turn_ahead], p.n, batch, p.column + origin, width, image_bytes, pixel);
    from = (const char*)x + 2 * channel + (i64)p.n * image_bytes + (i64)row_ahead * row_bytes;
  };
  auto fetch = [&]() {  // behind the last item zeros, which nobody reads
    const bool wanted = copies && item_ahead < items;
    // With two channels a warp there are too few registers for copies among the products: a branch keeps them apart.
    if (CH > 2 || item_ahead < items) {
#pragma unroll
      for (int i = 0; i < COPIES; ++i) {
        const int place = in_places[turn_ahead][pixel_of_copy + AT_ONCE * i];
        const char* column = from + (unsigned int)place;
#pragma unroll
        for (int b = 0; b < ROWS; ++b) {
          const bool valid = wanted && place >= 0 && row_ahead + b < height;
          if (within(i, STAGE_PIXELS))
            copy_unit(stages[slot_ahead][b] + in_cell + i * AT_ONCE * CELL, column + (i64)b * row_bytes, valid);
        }
      }
    }
    from += ROWS * (i64)row_bytes;
    row_ahead += ROWS;
    cp_async_commit();
    slot_ahead = slot_ahead + 1 < STAGES ? slot_ahead + 1 : 0;
  };
  auto move_on = [&]() {  // to the next item, when all rows of this one are copied
    if (item_ahead >= items || row_ahead < end_ahead) return;
    item_ahead += gridDim.x;
    aim();
  };
  aim();
#pragma unroll 1
  for (int i = 0; i < STAGES - 1; ++i) {
    __syncthreads();
    fetch();
    move_on();
  }

  int slot = 0;
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const Part p = part_of(item, groups, column_tiles, segment_rows, out_height);
    if (threadIdx.x == 0) part = p;
    place<ROW_COPIES, STRIPS * PIXELS>(out_places, p.n, batch, p.column, out_width, out_image_bytes, pixel);
    int row = first_row(p) + pad_height - AHEAD;  // of the output, the first that the next step completes
    char* to = (char*)y + 2 * channel + ((i64)p.n * out_height + row - ROWS) * out_row_bytes;  // of the step before

    // Of the output rows under way, the one that is completed next first. A product takes a sum one place on, for nothing.
    float sum[AHEAD][CH][4];
#pragma unroll
    for (int q = 0; q < AHEAD; ++q)
#pragma unroll
      for (int c = 0; c < CH; ++c)
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[q][c][i] = 0.f;

    // A pixel from its own taps alone.
    auto exact = [&](int n, int oh, int ow) {
      float total[CH];
#pragma unroll
      for (int c = 0; c < CH; ++c) total[c] = 0.f;
#pragma unroll 1
      for (int tap = 0; tap < K * K; ++tap) {
        const int ih = oh - pad_height + tap / K, iw = ow - pad_width + tap % K;
        if (ih < 0 || iw < 0 || ih >= height || iw >= width) continue;
        float value[CH], w[CH];
#pragma unroll
        for (int c = 0; c < CH; ++c) w[c] = widen_weight(weight[((i64)mine * CH + c) * (K * K) + (FLIP ? K * K - 1 - tap : tap)]);
        widen(narrow(w), w);
        widen(x[(((i64)n * height + ih) * width + iw) * vectors + mine], value);
#pragma unroll
        for (int c = 0; c < CH; ++c) total[c] = fmaf(value[c], w[c], total[c]);
      }
#pragma unroll
      for (int c = 0; c < CH; ++c)
        if (BIAS) total[c] += start[warp * CH + c];
      return narrow(total);
    };
    // The finished rows of the step before to the output, whole sectors; `made` says which of those in shared memory.
    auto write_out = [&](int made) {
      Words<COPY / 4> value[ROWS][ROW_COPIES];
      int place[ROW_COPIES];
#pragma unroll
      for (int i = 0; i < ROW_COPIES; ++i) {
        place[i] = out_places[pixel_of_copy + AT_ONCE * i];
#pragma unroll
        for (int b = 0; b < ROWS; ++b)
          if (within(i, ROW_PIXELS)) value[b][i] = *(const Words<COPY / 4>*)(done_rows[made][b] + out_cell + i * AT_ONCE * CELL);
      }
#pragma unroll
      for (int b = 0; b < ROWS; ++b) {
        const bool inside = copies && row - ROWS + b >= part.begin && row - ROWS + b < part.end;
#pragma unroll
        for (int i = 0; i < ROW_COPIES; ++i)
          store_if(inside && place[i] >= 0, to + (unsigned int)place[i] + (i64)b * out_row_bytes, value[b][i]);
      }
    };
    int made = 0;  // this step's rows go to done_rows[made], those of the step before lie in the other
    do {
      cp_async_wait<STAGES - 2>();
      __syncthreads();
      // The window's pixels of strips g and g + 8, and from pairs of them the fragments, a channel each.
      Chunk in[ROWS][2][WIDE ? 4 : 2];
#pragma unroll
      for (int b = 0; b < ROWS; ++b)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int k = 0; k < (WIDE ? 4 : 2); ++k)
            in[b][half][k] = *(const Chunk*)(stages[slot][b] + strip + half * next_strip + in_window(IN_STRIP(t, k)) * CELL);
      write_out(TURNS - 1 - made);
      to += ROWS * (i64)out_row_bytes;
      fetch();  // into the stage that every warp has left before the barrier; without a branch, so that the products hide it
      if (CH == 2) move_on();
      slot = slot + 1 < STAGES ? slot + 1 : 0;
      unsigned int probe[WORDS];  // stay zero while the finished rows are finite
#pragma unroll
      for (int w = 0; w < WORDS; ++w) probe[w] = 0u;
#pragma unroll
      for (int b = 0; b < ROWS; ++b) {
        unsigned int a[CH][4];
#pragma unroll
        for (int c = 0; c < CH; c += 2)
#pragma unroll
          for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int k = 0; k < 2; ++k) {
              const Chunk &low = in[b][half][WIDE ? 2 * k : 0], &high = in[b][half][WIDE ? 2 * k + 1 : 1];
              a[c][2 * k + half] = k == 0 || WIDE ? low_halves(low.w[c / 2], high.w[c / 2]) : 0u;
              a[c + 1][2 * k + half] = k == 0 || WIDE ? high_halves(low.w[c / 2], high.w[c / 2]) : 0u;
            }
        float whole[CH][4];  // the row that this one completes: the first, so that the others' products hide what follows
#pragma unroll
        for (int q = 0; q < K; ++q)
#pragma unroll
          for (int c = 0; c < CH; ++c) {
            float moved[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) moved[i] = q < AHEAD ? sum[q][c][i] : 0.f;
            product(moved, a[c], band[AHEAD - q][c]);
#pragma unroll
            for (int i = 0; i < 4; ++i) (q == 0 ? whole[c][i] : sum[q - 1][c][i]) = moved[i];
          }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float value[CH];
#pragma unroll
          for (int c = 0; c < CH; ++c) {
            value[c] = whole[c][i];
            if (BIAS) value[c] += start[warp * CH + c];
          }
          const Chunk ready = narrow(value);
#pragma unroll
          for (int w = 0; w < WORDS; ++w) probe[w] = add_nothing_of(ready.w[w], probe[w]);
          const int m = g + i / 2 * 8, column = 2 * t + i % 2;
          if (column < PIXELS) *(Chunk*)(done_rows[made][b] + finished + (m * PIXELS + column) * CELL) = ready;
        }
      }
      unsigned int found = probe[0];
#pragma unroll
      for (int w = 1; w < WORDS; ++w) found |= probe[w];
      if (found != 0u) {
#pragma unroll 1
        for (int i = 0; i < 4 * ROWS; ++i) {
          const int m = g + i / 2 % 2 * 8, column = 2 * t + i % 2, b = i / 4;
          const int n = part.n + m / STRIPS, oh = row + b, ow = part.column + m % STRIPS * PIXELS + column;
          if (column < PIXELS && n < batch && ow < out_width && oh >= part.begin && oh < part.end && mine < vectors)
            *(Chunk*)(done_rows[made][b] + finished + (m * PIXELS + column) * CELL) = exact(n, oh, ow);
        }
      }
      if (CH > 2) move_on();
      made = TURNS - 1 - made;
      row += ROWS;
    } while (row < part.end);
    __syncthreads();
    write_out(TURNS - 1 - made);
    __syncthreads();  // places and rows are read: the next item's may be written
  }
}
