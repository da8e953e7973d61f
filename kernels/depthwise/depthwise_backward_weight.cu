// Depthwise convolution, gradient of weight and bias.
//
//   dw[c,r,s] = sum over (n, oh, ow) of dy[n,oh,ow,c] * x[n, oh*stride - pad_h + r*dilation, ow*stride - pad_w + s*dilation, c]
//   db[c]     = sum over (n, oh, ow) of dy[n,oh,ow,c]
//
// Shapes    x: [N, H, W, C], dy: [N, OH, OW, C], fp16, bf16 or fp32; dw: [C, 1, K, K], db: [C] in the parameters' dtype.
//           partial: [blocks][K*K + 1][C] fp32.
// Replaces  the parameters' part of aten::convolution_backward with as many groups as channels (cuDNN, its weakest).
// Bytes     x once, dy once (x again for each group of TAP_ROWS rows of taps, from L2 where it stays). [256,96,112,112] k3 in
//           bf16: 617 + 617 MB.
// Bound     DRAM bandwidth for k3 (0.29 ms there at 4.24 TB/s); fp32 FMA issue from k5 on.
// Grid      (blocks over strips, channel tiles, groups of tap rows). A thread has the sums of TAP_ROWS x K taps of CH channels in
//           registers over all of its strips; a block adds its threads' sums in shared memory, the second kernel the blocks'.
// Numerics  fp32 sums a thread, a block and over blocks in a fixed order. No atomics: two runs are bit-equal.
// Limits    C a multiple of CH; TAP_ROWS divides the registers, not K.

#include "channels.cuh"
#include "overlap.cuh"
#include "depthwise.cuh"

#define SLOTS ((TAP_ROWS + STRIDE - 1) / STRIDE)
#define COLUMNS (STRIDE * (STRIP - 1) + K)
#define TAPS (K * K + 1)  // the last one is the bias
#define AT_ONCE 8         // taps that the block adds up between two barriers

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) depthwise_backward_weight(
    const Chunk* __restrict__ dy, const Chunk* __restrict__ x, float* __restrict__ partial, i64 items, int vectors, int tile,
    int height, int width, int out_height, int out_width, int pad_height, int pad_width, int dilation, int strips,
    int segments, int segment_rows) {
  overlap_launches();
  __shared__ float shared[AT_ONCE * CH * THREADS];
  const Tile t = tile_of(tile, vectors);
  const int tap_row = blockIdx.z * TAP_ROWS;  // the first of this block's rows of taps
  const int step = STRIDE == 1 ? dilation : STRIDE;
  const int pixel = vectors * (int)sizeof(Chunk);
  const int column_bytes = STRIDE == 1 ? dilation * pixel : pixel, out_column_bytes = dilation * pixel;
  const i64 row_bytes = (i64)width * column_bytes, out_row_bytes = (i64)out_width * out_column_bytes;

  float sum[TAP_ROWS][K][CH], of_bias[CH];
#pragma unroll
  for (int j = 0; j < CH; ++j) {
    of_bias[j] = 0.f;
#pragma unroll
    for (int r = 0; r < TAP_ROWS; ++r)
#pragma unroll
      for (int i = 0; i < K; ++i) sum[r][i][j] = 0.f;
  }

  if (t.active)
    for (i64 item = (i64)blockIdx.x * t.strips_per_pass + t.ty; item < items; item += (i64)gridDim.x * t.strips_per_pass) {
      const Strip s = strip_of(item, strips, dilation, segments);
      const int rows = ceil_of(out_height - s.row_phase, dilation), columns = ceil_of(out_width - s.column_phase, dilation);
      const int begin = s.segment * segment_rows, end = rows - begin < segment_rows ? rows : begin + segment_rows;
      const int top = s.row_phase - pad_height + tap_row * dilation;
      const int left = s.column_phase - pad_width + s.column * step;
      // Step m brings the dy row m and the x rows top + step * m + e, e < STRIDE, which meet the dy rows m, m - 1, ...
      int last = height - 1 - top < 0 ? -1 : (height - 1 - top) / step;
      last = last < end + SLOTS - 2 ? last : end + SLOTS - 2;
      const int count = columns - s.column;
      unsigned int inside = 0u;
#pragma unroll
      for (int v = 0; v < COLUMNS; ++v) {
        const int at = left + v * (STRIDE == 1 ? dilation : 1);
        inside |= (unsigned int)(at >= 0 && at < width) << v;
      }
      int row = top + step * begin, dy_row = begin;  // the next to fetch
      const char* from = (const char*)(x + t.vector) + (((i64)s.n * height + row) * width + left) * pixel;
      const char* dy_from = (const char*)(dy + t.vector) +
                            (((i64)s.n * out_height + s.row_phase + (i64)dy_row * dilation) * out_width + s.column_phase +
                             (i64)s.column * dilation) * pixel;

      Chunk raw[STRIDE][COLUMNS], dy_raw[STRIP];  // columns outside the images stay zero
#pragma unroll
      for (int p = 0; p < STRIP; ++p) dy_raw[p] = zero_chunk();
#pragma unroll
      for (int e = 0; e < STRIDE; ++e)
#pragma unroll
        for (int v = 0; v < COLUMNS; ++v) raw[e][v] = zero_chunk();
      auto fetch = [&](Chunk (&into)[COLUMNS]) {
        if (row >= 0 && row < height) {
#pragma unroll
          for (int v = 0; v < COLUMNS; ++v)
            if (inside >> v & 1u) into[v] = load(from, v, column_bytes);
        }
        row += STRIDE == 1 ? dilation : 1;
        from += row_bytes;
      };
      auto fetch_dy = [&]() {
        if (dy_row < end) {
#pragma unroll
          for (int p = 0; p < STRIP; ++p)
            if (p < count) dy_raw[p] = load(dy_from, p, out_column_bytes);
        } else {
#pragma unroll
          for (int p = 0; p < STRIP; ++p) dy_raw[p] = zero_chunk();
        }
        ++dy_row;
        dy_from += out_row_bytes;
      };

      float g[SLOTS][STRIP][CH];  // dy row m lies in slot (m - begin) % SLOTS
#pragma unroll
      for (int q = 0; q < SLOTS; ++q)
#pragma unroll
        for (int p = 0; p < STRIP; ++p)
#pragma unroll
          for (int j = 0; j < CH; ++j) g[q][p][j] = 0.f;
      fetch_dy();
#pragma unroll
      for (int e = 0; e < STRIDE; ++e) fetch(raw[e]);

      for (int m = begin; m <= last; m += SLOTS) {
#pragma unroll
        for (int u = 0; u < SLOTS; ++u) {
          if (m + u > last) break;
#pragma unroll
          for (int p = 0; p < STRIP; ++p) {
            widen(dy_raw[p], g[u][p]);
#pragma unroll
            for (int j = 0; j < CH; ++j) of_bias[j] += g[u][p][j];
          }
          fetch_dy();
#pragma unroll
          for (int e = 0; e < STRIDE; ++e) {
            const int held = top + step * (m + u) + e;
            float in[COLUMNS][CH];
#pragma unroll
            for (int v = 0; v < COLUMNS; ++v) widen(raw[e][v], in[v]);
            fetch(raw[e]);
            if (held < 0 || held >= height) continue;
#pragma unroll
            for (int q = 0; q < SLOTS; ++q) {
              if (STRIDE * q + e >= TAP_ROWS) continue;
#pragma unroll
              for (int i = 0; i < K; ++i)
#pragma unroll
                for (int j = 0; j < CH; ++j) {
                  float a = sum[STRIDE * q + e][i][j];
#pragma unroll
                  for (int p = 0; p < STRIP; ++p) a = fmaf(g[(u - q + SLOTS) % SLOTS][p][j], in[STRIDE * p + i][j], a);
                  sum[STRIDE * q + e][i][j] = a;
                }
            }
          }
        }
      }
    }

  // Over the strips of the block, AT_ONCE taps at a time, in the order of ty.
  const int width_of_tile = tile * CH, channels = vectors * CH;
  auto add_up = [&](int first_tap, int taps) {
    __syncthreads();
    for (int o = threadIdx.x; o < taps * width_of_tile; o += THREADS) {
      const int tap = o / width_of_tile, c = o % width_of_tile, channel = blockIdx.y * width_of_tile + c;
      float total = 0.f;
      for (int y = 0; y < t.strips_per_pass; ++y) total += shared[(tap * CH + c % CH) * THREADS + y * tile + c / CH];
      if (channel < channels) partial[((i64)blockIdx.x * TAPS + first_tap + tap) * channels + channel] = total;
    }
    __syncthreads();
  };
  const int own = (tap_row + TAP_ROWS < K ? TAP_ROWS : K - tap_row) * K;  // the last block may have fewer rows
#pragma unroll
  for (int begin = 0; begin < TAP_ROWS * K; begin += AT_ONCE) {
#pragma unroll
    for (int k = 0; k < AT_ONCE; ++k)
      if (begin + k < TAP_ROWS * K)
#pragma unroll
        for (int j = 0; j < CH; ++j)
          shared[(k * CH + j) * THREADS + threadIdx.x] =
              sum[(begin + k < TAP_ROWS * K ? begin + k : 0) / K][(begin + k) % K][j];
    const int left_over = own - begin < AT_ONCE ? own - begin : AT_ONCE;
    add_up(tap_row * K + begin, left_over);
  }
  if (blockIdx.z == 0) {
#pragma unroll
    for (int j = 0; j < CH; ++j) shared[j * THREADS + threadIdx.x] = of_bias[j];
    add_up(K * K, 1);
  }
}
