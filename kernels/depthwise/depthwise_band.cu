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
//           tensor cores busy for 0.4 of the DRAM time. Shared memory: about 150 of the 223 clocks that DRAM takes for 1024 outputs.
// Grid      (blocks over items, channel tiles). See band.cuh. The sums of the K output rows that an input row reaches stay
//           in registers; a finished row goes through shared memory, so that whole sectors are written.
// Numerics  products of 16-bit values, fp32 sums in a fixed order, rounded once. No atomics: two runs are bit-equal. A window's pixels
//           outside a pixel's own taps meet zeros: where that makes a NaN of an infinity, the pixel is computed again without them.
// Limits    C a multiple of CH; stride 1, no dilation; images of a block within 31-bit byte offsets.

#include "band.cuh"

#define TURNS 2         // finished rows in shared memory: one is written out while the next is made
#define AHEAD (K - 1)   // input rows after an output row's first until it is done

extern "C" __global__ void __launch_bounds__(BAND_THREADS, MIN_BLOCKS) depthwise_band(
    const Chunk* __restrict__ x, const Weight* __restrict__ weight, const Weight* __restrict__ bias, Chunk* __restrict__ y,
    int items, int batch, int vectors, int height, int width, int out_height, int out_width, int pad_height, int pad_width,
    int origin, int lead, int groups, int column_tiles, int segment_rows) {
  __shared__ __align__(16) unsigned int stages[STAGES][COPIES * AT_ONCE * PITCH];
  __shared__ __align__(16) unsigned int done_rows[TURNS][ROW_COPIES * AT_ONCE * PITCH];
  __shared__ int in_places[2][COPIES * AT_ONCE], out_places[2][ROW_COPIES * AT_ONCE];  // of the items by turns
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int unit = threadIdx.x % UNITS, channel = blockIdx.y * TILE + unit * (COPY / 2);  // that this thread copies
  const bool copies = channel < vectors * CH;
  const int mine = blockIdx.y * WARPS + warp;  // the channels that this warp computes
  const int pixel = vectors * (int)sizeof(Chunk);
  const int row_bytes = width * pixel, out_row_bytes = out_width * pixel;
  const int image_bytes = height * row_bytes, out_image_bytes = out_height * out_row_bytes;
  const int pixel_of_copy = threadIdx.x / UNITS;  // and every AT_ONCE-th from there on
  const int cell = pixel_of_copy * PITCH + unit * (COPY / 4);

  // The bands: value k of a lane is pixel t + 4 k of the window (k 0, 1 in the first register), column g.
  unsigned int band[K][CH][2];
#pragma unroll
  for (int r = 0; r < K; ++r)
#pragma unroll
    for (int c = 0; c < CH; ++c) {
      float value[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int j = t + 4 * k, s = j + lead - g;
        const bool valid = mine < vectors && j < WINDOW && g < PIXELS && s >= 0 && s < K;
        value[k] = valid ? widen_weight(weight[((i64)mine * CH + c) * (K * K) + (FLIP ? K * K - 1 - (r * K + s) : r * K + s)]) : 0.f;
      }
      band[r][c][0] = pack(value[0], value[1]);
      band[r][c][1] = pack(value[2], value[3]);
    }
  float start[CH];
#pragma unroll
  for (int c = 0; c < CH; ++c) start[c] = BIAS && mine < vectors ? widen_weight(bias[mine * CH + c]) : 0.f;

  // Strips g and g + 8 of this lane, as pixels of a stage.
  const int strip = (g / STRIPS * PIECE + g % STRIPS * PIXELS) * PITCH + warp * (CH / 2);
  constexpr int next_strip = (STRIPS == 16 ? 8 * PIXELS : 8 / STRIPS * PIECE) * PITCH;

  auto first_row = [&](const Part& p) {  // of the input
    return p.begin < pad_height ? 0 : p.begin - pad_height;
  };
  auto last_row = [&](const Part& p) {
    const int row = p.end + AHEAD - 1 - pad_height;
    return row < height - 1 ? row : height - 1;
  };

  // What is copied next.
  int item_ahead = blockIdx.x, row_ahead = 0, last_ahead = -1, slot_ahead = 0, turn_ahead = 0;
  const char* from = (const char*)x + 2 * channel;
  auto aim = [&]() {
    if (item_ahead >= items) return;
    const Part p = part_of(item_ahead, groups, column_tiles, segment_rows, out_height);
    row_ahead = first_row(p);
    last_ahead = last_row(p);
    turn_ahead ^= 1;
    place<COPIES, PIECE>(in_places[turn_ahead], p.n, batch, p.column + origin, width, image_bytes, pixel);
    from = (const char*)x + 2 * channel + (i64)p.n * image_bytes + (i64)row_ahead * row_bytes;
  };
  auto fetch = [&]() {
    if (item_ahead < items) {
      const bool row_inside = copies && row_ahead >= 0 && row_ahead < height;
#pragma unroll
      for (int i = 0; i < COPIES; ++i) {
        const int place = in_places[turn_ahead][pixel_of_copy + AT_ONCE * i];
        const bool valid = row_inside && place >= 0;
        copy_unit(stages[slot_ahead] + cell + i * AT_ONCE * PITCH, from + (unsigned int)place, valid);
      }
      from += row_bytes;
      if (++row_ahead > last_ahead) {
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

  int slot = 0, turn = 0;
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const Part p = part_of(item, groups, column_tiles, segment_rows, out_height);
    const int first = first_row(p), last = last_row(p);
    turn ^= 1;
    place<ROW_COPIES, STRIPS * PIXELS>(out_places[turn], p.n, batch, p.column, out_width, out_image_bytes, pixel);
    int row = first + pad_height - AHEAD;  // of the output, that the next step completes
    char* to = (char*)y + 2 * channel + ((i64)p.n * out_height + row - 1) * out_row_bytes;  // of the finished row

    float sum[K][CH][4];
#pragma unroll
    for (int q = 0; q < K; ++q)
#pragma unroll
      for (int c = 0; c < CH; ++c)
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[q][c][i] = 0.f;

    // A pixel from its own taps alone; `otherwise` where none is wanted.
    auto exact = [&](int n, int oh, int ow, const Chunk& otherwise) {
      if (n >= batch || ow >= out_width || oh < p.begin || oh >= p.end || mine >= vectors) return otherwise;
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
        if (BIAS) total[c] += start[c];
      return narrow(total);
    };
    // A finished row to the output, whole sectors; `made` says which of the two in shared memory.
    auto write_out = [&](bool wanted, int made) {
      const bool inside = wanted && copies && row - 1 >= p.begin && row - 1 < p.end;
      Words<COPY / 4> value[ROW_COPIES];
      int place[ROW_COPIES];
#pragma unroll
      for (int i = 0; i < ROW_COPIES; ++i) {
        place[i] = out_places[turn][pixel_of_copy + AT_ONCE * i];
        value[i] = *(const Words<COPY / 4>*)(done_rows[made] + cell + i * AT_ONCE * PITCH);
      }
#pragma unroll
      for (int i = 0; i < ROW_COPIES; ++i) store_if(inside && place[i] >= 0, to + (unsigned int)place[i], value[i]);
    };
    int made = 0, phase = 0;  // the row that is made lies in done_rows[made], the one before in the other
    bool complete = false;
    for (int at = first; row < p.end; ++at) {
      const bool more = at <= last;  // else the rows are left whose remaining taps lie below the image
      if (more) cp_async_wait<STAGES - 2>();
      __syncthreads();
      // The window's pixels of strips g and g + 8, and from pairs of them the fragments, a channel each.
      Chunk in[2][WIDE ? 4 : 2];
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int k = 0; k < (WIDE ? 4 : 2); ++k)
          in[half][k] = *(const Chunk*)(stages[slot] + strip + half * next_strip + in_window(t + 4 * k) * PITCH);
      write_out(complete, TURNS - 1 - made);
      to += out_row_bytes;
      if (more) {
        fetch();  // into the stage that every warp has left before the barrier
        slot = slot + 1 < STAGES ? slot + 1 : 0;
      }
      unsigned int a[CH][4];
#pragma unroll
      for (int c = 0; c < CH; c += 2)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            a[c][2 * k + half] = k == 0 || WIDE ? low_halves(in[half][WIDE ? 2 * k : 0].w[c / 2], in[half][WIDE ? 2 * k + 1 : 1].w[c / 2]) : 0u;
            a[c + 1][2 * k + half] = k == 0 || WIDE ? high_halves(in[half][WIDE ? 2 * k : 0].w[c / 2], in[half][WIDE ? 2 * k + 1 : 1].w[c / 2]) : 0u;
          }
      Chunk ready[4];           // the finished row's pixels of this lane
      unsigned int probe = 0u;   // stays zero while they are finite
#pragma unroll
      for (int u = 0; u < K; ++u) {
        if (phase != u) continue;  // one for the whole block: registers need an index that the compiler knows
#pragma unroll
        for (int r = 0; r < K; ++r) {
          const int place = (u - r + K) % K;
#pragma unroll
          for (int c = 0; c < CH; ++c) {
            if (r == 0)  // a new output row
#pragma unroll
              for (int i = 0; i < 4; ++i) sum[place][c][i] = 0.f;
            if (more) product(sum[place][c], a[c], band[r][c]);
          }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float value[CH];
#pragma unroll
          for (int c = 0; c < CH; ++c) {
            value[c] = sum[(u + 1) % K][c][i];
            if (BIAS) value[c] += start[c];
          }
          ready[i] = narrow(value);
#pragma unroll
          for (int w = 0; w < WORDS; ++w) probe = add_nothing_of(ready[i].w[w], probe);
        }
      }
      complete = row + 1 > p.begin;
      if (complete) {
        if (probe != 0u) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int m = g + i / 2 * 8, column = 2 * t + i % 2;
            if (column < PIXELS) ready[i] = exact(p.n + m / STRIPS, row, p.column + m % STRIPS * PIXELS + column, ready[i]);
          }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int m = g + i / 2 * 8, column = 2 * t + i % 2;
          if (column < PIXELS) *(Chunk*)(done_rows[made] + (m * PIXELS + column) * PITCH + warp * (CH / 2)) = ready[i];
        }
      }
      ++row;
      phase = phase + 1 < K ? phase + 1 : 0;
      made = TURNS - 1 - made;
    }
    __syncthreads();
    write_out(complete, TURNS - 1 - made);
  }
}
