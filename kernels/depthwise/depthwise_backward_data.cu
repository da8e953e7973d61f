// Depthwise convolution of stride 2, gradient of the input, gathered.
//
//   dx[n,h,w,c] = sum over (r, s) with h + pad_h - r and w + pad_w - s even of w[c,r,s] * dy[n, (h + pad_h - r)/2, (w + pad_w - s)/2, c]
//
// Shapes    dy: [N, OH, OW, C], dx: [N, H, W, C], fp16, bf16 or fp32; w: [C, 1, K, K] in its own dtype.
// Replaces  the input's part of aten::convolution_backward with as many groups as channels (cuDNN).
// Bytes     dy once, dx once: 1.25 tensors of the input's size. MobileNetV2's [256,96,112,112] k3 in bf16: 154 + 617 MB.
// Bound     DRAM bandwidth for k3 (0.18 ms there at 4.24 TB/s); fp32 FMA issue for k7.
// Grid      (blocks over strips, channel tiles). A thread makes pairs of rows and columns of dx, so that the parity of a tap is
//           known when it is compiled and no thread idles.
// Numerics  fp32 FMA in a fixed order, rounded once. No atomics: two runs are bit-equal.
// Limits    stride 2 in both directions, no dilation; C a multiple of CH.

#include "channels.cuh"
#include "overlap.cuh"
#include "depthwise.cuh"

#define NEIGHBOURS ((K + 1) / 2)  // dy rows that reach one row of dx
#define COLUMNS (STRIP + NEIGHBOURS - 1)

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) depthwise_backward_data(
    const Chunk* __restrict__ dy, const Weight* __restrict__ weight, Chunk* __restrict__ dx, i64 items, int vectors, int tile,
    int height, int width, int out_height, int out_width, int pad_height, int pad_width, int strips, int segments,
    int segment_rows) {
  overlap_launches();
  __shared__ __align__(16) float taps[MAX_TILE * TAPS_OF_VECTOR];
  const Tile t = tile_of(tile, vectors);
  stage_taps(taps, weight, tile, vectors, false);
  __syncthreads();
  if (!t.active) return;
  const float* mine = taps + t.tx * TAPS_OF_VECTOR;
  const int pixel = vectors * (int)sizeof(Chunk);
  const i64 row_bytes = (i64)width * pixel, out_row_bytes = (i64)out_width * pixel;
  const int pairs = (height - 1 + pad_height) / 2 + 1;  // row pairs, counted from the padded image's first row

  for (i64 item = (i64)blockIdx.x * t.strips_per_pass + t.ty; item < items; item += (i64)gridDim.x * t.strips_per_pass) {
    const Strip s = strip_of(item, strips, 1, segments);
    const int begin = pad_height / 2 + s.segment * segment_rows;
    const int end = pairs - begin < segment_rows ? pairs : begin + segment_rows;
    const int column = pad_width / 2 + s.column;  // dy column of the strip's first pair of columns
    const int first = begin - (NEIGHBOURS - 1) < 0 ? 0 : begin - (NEIGHBOURS - 1);
    const int last = end - 1 < out_height - 1 ? end - 1 : out_height - 1;
    unsigned int inside = 0u, wanted = 0u;
#pragma unroll
    for (int v = 0; v < COLUMNS; ++v) {
      const int at = column - (NEIGHBOURS - 1) + v;
      inside |= (unsigned int)(at >= 0 && at < out_width) << v;
    }
#pragma unroll
    for (int v = 0; v < 2 * STRIP; ++v) {
      const int at = 2 * column + v - pad_width;
      wanted |= (unsigned int)(at >= 0 && at < width) << v;
    }
    int row = first;  // the next dy row to fetch
    const char* from =
        (const char*)(dy + t.vector) + (((i64)s.n * out_height + row) * out_width + column - (NEIGHBOURS - 1)) * pixel;
    int pair = first;  // the pair of dx rows that the step completes
    char* to = (char*)(dx + t.vector) + (((i64)s.n * height + 2 * pair - pad_height) * width + 2 * column - pad_width) * pixel;

    float sum[K][2 * STRIP][CH];  // slot r: padded dx row 2 * pair + r
#pragma unroll
    for (int r = 0; r < K; ++r)
#pragma unroll
      for (int p = 0; p < 2 * STRIP; ++p)
#pragma unroll
        for (int j = 0; j < CH; ++j) sum[r][p][j] = 0.f;
    Chunk raw[DEPTH][COLUMNS];  // columns outside dy stay zero
#pragma unroll
    for (int u = 0; u < DEPTH; ++u)
#pragma unroll
      for (int v = 0; v < COLUMNS; ++v) raw[u][v] = zero_chunk();
    auto fetch = [&](Chunk (&into)[COLUMNS]) {
      if (row <= last) {
#pragma unroll
        for (int v = 0; v < COLUMNS; ++v)
          if (inside >> v & 1u) into[v] = load(from, v, pixel);
      }
      ++row;
      from += out_row_bytes;
    };
    auto put = [&](const float (&values)[2 * STRIP][CH], int e) {
      const int target = 2 * pair + e - pad_height;
      if (target < 0 || target >= height) return;
      char* line = to + e * row_bytes;
      Chunk v[2 * STRIP];
#pragma unroll
      for (int p = 0; p < 2 * STRIP; ++p) v[p] = narrow(values[p]);
#pragma unroll
      for (int p = 0; p < 2 * STRIP; ++p)
        if (wanted >> p & 1u) store(line, p, pixel, v[p]);
    };

#pragma unroll
    for (int u = 0; u < DEPTH; ++u) fetch(raw[u]);
    for (int m = first; m <= last; m += DEPTH) {
#pragma unroll
      for (int u = 0; u < DEPTH; ++u) {
        if (m + u > last) break;
        float in[COLUMNS][CH];
#pragma unroll
        for (int v = 0; v < COLUMNS; ++v) widen(raw[u][v], in[v]);
        fetch(raw[u]);
#pragma unroll
        for (int r = 0; r < K; ++r) {
          float w[ROW];
          tap_row(mine, r, w);
#pragma unroll
          for (int p = 0; p < 2 * STRIP; ++p)
#pragma unroll
            for (int j = 0; j < CH; ++j) {
              float a = r + 2 < K ? sum[r + 2 < K ? r + 2 : 0][p][j] : 0.f;
#pragma unroll
              for (int i = p % 2; i < K; i += 2) a = fmaf(w[i * CH + j], in[p / 2 - i / 2 + NEIGHBOURS - 1][j], a);
              sum[r][p][j] = a;
            }
        }
        if (pair >= begin) {
          put(sum[0], 0);
          put(sum[1], 1);
        }
        ++pair;
        to += 2 * row_bytes;
      }
    }
    // The rows below the last row of dy.
#pragma unroll
    for (int g = 1; g < NEIGHBOURS; ++g) {
      if (pair >= begin && pair < end) {
        put(sum[2 * g], 0);
        if (2 * g + 1 < K) {
          put(sum[2 * g + 1 < K ? 2 * g + 1 : 0], 1);
        } else {
          float none[2 * STRIP][CH];
#pragma unroll
          for (int p = 0; p < 2 * STRIP; ++p)
#pragma unroll
            for (int j = 0; j < CH; ++j) none[p][j] = 0.f;
          put(none, 1);
        }
      }
      ++pair;
      to += 2 * row_bytes;
    }
  }
}
