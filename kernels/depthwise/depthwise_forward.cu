// Depthwise convolution, forward; with FLIP and the transposed call also the data gradient of stride 1.
//
//   y[n,oh,ow,c] = bias[c] + sum over (r, s) of w[c,r,s] * x[n, oh*stride - pad_h + r*dilation, ow*stride - pad_w + s*dilation, c]
//
// Shapes    x: [N, H, W, C], y: [N, OH, OW, C], fp16, bf16 or fp32; w: [C, 1, K, K] and bias [C] as the user's parameters lie, in
//           their own dtype. K odd, 3 to 15; STRIDE 1 (any dilation) or 2.
// Replaces  aten::convolution with as many groups as channels (cuDNN).
// Bytes     x once, y once. MobileNetV2's [256,96,112,112] k3 in bf16: 617 + 617 MB.
// Bound     DRAM bandwidth for k3 (0.29 ms there at 4.24 TB/s); fp32 FMA issue from k5 on: k7 makes 49 FMA for 4 bytes moved, about
//           1.7 times the DRAM floor at 60 TFLOP/s, so its goal is 0.45 of the byte limit.
// Grid      (blocks over strips, channel tiles). A thread walks down a strip of STRIP pixels: each input row is loaded once, widened
//           once and added to the SLOTS output rows that it reaches, whose sums stay in registers.
// Numerics  fp32 FMA in a fixed order, rounded once. No atomics: two runs are bit-equal.
// Limits    C a multiple of CH; byte offsets in a window of pixels below 2^31.

#include "channels.cuh"
#include "overlap.cuh"
#include "depthwise.cuh"

#define SLOTS ((K + STRIDE - 1) / STRIDE)
#define COLUMNS (STRIDE * (STRIP - 1) + K)

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) depthwise_forward(
    const Chunk* __restrict__ x, const Weight* __restrict__ weight, const Weight* __restrict__ bias, Chunk* __restrict__ y,
    i64 items, int vectors, int tile, int height, int width, int out_height, int out_width, int pad_height, int pad_width,
    int dilation, int strips, int segments, int segment_rows) {
  overlap_launches();
  __shared__ __align__(16) float taps[MAX_TILE * TAPS_OF_VECTOR];
  const Tile t = tile_of(tile, vectors);
  stage_taps(taps, weight, tile, vectors, FLIP);
  __syncthreads();
  if (!t.active) return;
  const float* mine = taps + t.tx * TAPS_OF_VECTOR;
#if KEEP_TAPS
  float kept[K][ROW];
#pragma unroll
  for (int r = 0; r < K; ++r) tap_row(mine, r, kept[r]);
#endif
  float start[CH];
#pragma unroll
  for (int j = 0; j < CH; ++j) start[j] = bias ? widen_weight(bias[t.vector * CH + j]) : 0.f;
  const int step = STRIDE == 1 ? dilation : STRIDE;  // input pixels from one output pixel to the next, both ways
  const int pixel = vectors * (int)sizeof(Chunk);
  const int column_bytes = STRIDE == 1 ? dilation * pixel : pixel, out_column_bytes = dilation * pixel;
  const i64 row_bytes = (i64)width * column_bytes, out_row_bytes = (i64)out_width * out_column_bytes;

  for (i64 item = (i64)blockIdx.x * t.strips_per_pass + t.ty; item < items; item += (i64)gridDim.x * t.strips_per_pass) {
    const Strip s = strip_of(item, strips, dilation, segments);
    const int rows = ceil_of(out_height - s.row_phase, dilation), columns = ceil_of(out_width - s.column_phase, dilation);
    const int begin = s.segment * segment_rows, end = rows - begin < segment_rows ? rows : begin + segment_rows;
    const int top = s.row_phase - pad_height, left = s.column_phase - pad_width + s.column * step;
    // Step m reads the input rows top + step * m + e, e < STRIDE. Steps without a row inside the image are left out.
    int first = ceil_of(-top - (STRIDE - 1), step);
    first = first < begin ? begin : first;
    int last = height - 1 - top < 0 ? -1 : (height - 1 - top) / step;
    last = last < end + SLOTS - 2 ? last : end + SLOTS - 2;
    unsigned int inside = 0u;
#pragma unroll
    for (int v = 0; v < COLUMNS; ++v) {
      const int at = left + v * (STRIDE == 1 ? dilation : 1);
      inside |= (unsigned int)(at >= 0 && at < width) << v;
    }
    const int count = columns - s.column;  // output pixels of the strip, if fewer than STRIP
    int row = top + step * first;          // the next input row to fetch
    const char* from = (const char*)(x + t.vector) + (((i64)s.n * height + row) * width + left) * pixel;
    int done = first - (SLOTS - 1);  // the output row that the step completes
    char* to = (char*)(y + t.vector) +
               (((i64)s.n * out_height + s.row_phase + (i64)done * dilation) * out_width + s.column_phase + (i64)s.column * dilation) * pixel;

    float sum[SLOTS][STRIP][CH];  // slot q: output row m - q
#pragma unroll
    for (int q = 0; q < SLOTS; ++q)
#pragma unroll
      for (int p = 0; p < STRIP; ++p)
#pragma unroll
        for (int j = 0; j < CH; ++j) sum[q][p][j] = start[j];

    Chunk raw[DEPTH][STRIDE][COLUMNS];  // columns outside the image stay zero
#pragma unroll
    for (int u = 0; u < DEPTH; ++u)
#pragma unroll
      for (int e = 0; e < STRIDE; ++e)
#pragma unroll
        for (int v = 0; v < COLUMNS; ++v) raw[u][e][v] = zero_chunk();
    auto fetch = [&](Chunk (&into)[COLUMNS]) {
      if (row >= 0 && row < height) {
#pragma unroll
        for (int v = 0; v < COLUMNS; ++v)
          if (inside >> v & 1u) into[v] = *(const Chunk*)(from + (i64)v * column_bytes);
      } else if (STRIDE > 1) {  // with stride 1 a row outside is never used
#pragma unroll
        for (int v = 0; v < COLUMNS; ++v) into[v] = zero_chunk();
      }
      row += STRIDE == 1 ? dilation : 1;
      from += row_bytes;
    };
    auto put = [&](const float (&values)[STRIP][CH], char* row) {
      Chunk v[STRIP];
#pragma unroll
      for (int p = 0; p < STRIP; ++p) v[p] = narrow(values[p]);
#pragma unroll
      for (int p = 0; p < STRIP; ++p)
        if (p < count) *(Chunk*)(row + (i64)p * out_column_bytes) = v[p];
    };

#pragma unroll
    for (int u = 0; u < DEPTH; ++u)
#pragma unroll
      for (int e = 0; e < STRIDE; ++e) fetch(raw[u][e]);

    for (int m = first; m <= last; m += DEPTH) {
#pragma unroll
      for (int u = 0; u < DEPTH; ++u) {
        if (m + u > last) break;
#pragma unroll
        for (int e = 0; e < STRIDE; ++e) {
          float in[COLUMNS][CH];
#pragma unroll
          for (int v = 0; v < COLUMNS; ++v) widen(raw[u][e][v], in[v]);
          fetch(raw[u][e]);
#pragma unroll
          for (int q = SLOTS - 1; q >= 0; --q) {
            if (STRIDE * q + e >= K) continue;
#if KEEP_TAPS
            const float(&w)[ROW] = kept[STRIDE * q + e];
#else
            float w[ROW];
            tap_row(mine, STRIDE * q + e, w);
#endif
#pragma unroll
            for (int p = 0; p < STRIP; ++p)
#pragma unroll
              for (int j = 0; j < CH; ++j) {
                float a = e > 0 ? sum[q][p][j] : (q > 0 ? sum[q > 0 ? q - 1 : 0][p][j] : start[j]);
#pragma unroll
                for (int i = 0; i < K; ++i) a = fmaf(w[i * CH + j], in[STRIDE * p + i][j], a);
                sum[q][p][j] = a;
              }
          }
        }
        if (done >= begin) put(sum[SLOTS - 1], to);
        ++done;
        to += out_row_bytes;
      }
    }
    // The rows whose remaining taps lie below the image.
#pragma unroll
    for (int q = SLOTS - 2; q >= 0; --q) {
      if (done >= begin && done < end) put(sum[q], to);
      ++done;
      to += out_row_bytes;
    }
  }
}
