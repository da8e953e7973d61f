// Depthwise convolution, all gradients in one pass: of the input, of the taps and of the bias. 3, 5 and 7 taps.
//
//   dx[n,h,w,c] = sum over (r, s) of w[c,r,s] * dy[n, (h + pad_h - r)/UP, (w + pad_w - s)/UP, c]      where both divide
//   dw[c,r,s]   = sum over (n, h, w) of x[n,h,w,c] * dy[n, (h + pad_h - r)/UP, (w + pad_w - s)/UP, c]
//   db[c]       = sum of dy
//
// A pixel of x meets the same dy as the dx of that pixel: one window of dy in registers serves both sums.
//
// Shapes    dy: [N, OH, OW, C], x and dx: [N, H, W, C], fp16, bf16 or fp32; w: [C, 1, K, K] in its own dtype; partial:
//           [blocks][K*K + 1][C] fp32, which depthwise_backward_weight_sum adds up. UP is the convolution's stride, 1 or 2.
// Replaces  aten::convolution_backward with as many groups as channels (cuDNN).
// Bytes     dy, x and dx once: three tensors for stride 1 where two kernels move four. [256,96,112,112] k3 in bf16: 1.85 GB.
// Bound     DRAM bandwidth for k3 (0.44 ms there at 4.24 TB/s: 44 issue slots a pixel, 18 of them FMA); FMA issue from k5 on.
// Grid      (blocks over strips, channel tiles). A thread walks down a strip of STRIP * UP columns, UP rows a step, with the
//           NEIGHBOURS rows of dy that reach them in registers and the sums of all its taps over all its strips. dy and x come
//           through its ring in shared memory DEPTH - 1 steps ahead.
// Numerics  fp32 sums: of dx rounded once; of dw a thread, a block and (in fp64) over blocks, in a fixed order. No atomics.
// Limits    C a multiple of CH; no dilation; an image row's bytes below 2^31. PHASE is pad_width % UP.

#include "channels.cuh"
#include "overlap.cuh"
#include "depthwise.cuh"
#include "depthwise_ring.cuh"

#define NEIGHBOURS ((K + UP - 1) / UP)
#define COLUMNS (STRIP + NEIGHBOURS - 1)  // of dy
#define LEFT ((K - 1 - PHASE) / UP)       // of them, before the strip's own
#define WIDE (UP * STRIP)                 // columns of x and dx
#define STAGE ((COLUMNS + UP * WIDE) * THREADS)
#define TAPS (K * K + 1)  // the last one is the bias
#define AT_ONCE 4         // taps that the block adds up between two barriers
#define SUMS (AT_ONCE * CH * THREADS * 4)
#define RING (DEPTH * STAGE * (int)sizeof(Chunk))

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) depthwise_backward(
    const Chunk* __restrict__ dy, const Chunk* __restrict__ x, const Weight* __restrict__ weight, Chunk* __restrict__ dx,
    float* __restrict__ partial, int items, int vectors, int tile, int height, int width, int out_height, int out_width,
    int pad_height, int pad_width, int strips, int segments, int segment_rows) {
  overlap_launches();
  __shared__ __align__(16) unsigned char memory[RING > SUMS ? RING : SUMS];
  __shared__ __align__(16) float taps[MAX_TILE * TAPS_OF_VECTOR];
  const Tile t = tile_of(tile, vectors);
  Chunk* const mine = (Chunk*)memory + threadIdx.x;  // [DEPTH][dy's columns, then x's by rows][THREADS]
  const SharedAddress first_stage = shared_address(mine), last_stage = ahead(first_stage, (DEPTH - 1) * STAGE);
  const int pixel = PIXEL ? PIXEL : vectors * (int)sizeof(Chunk);  // as a constant it makes addresses of columns free
  const i64 row_bytes = (i64)width * pixel, out_row_bytes = (i64)out_width * pixel;

  // The item at work: steps first to end - 1; step a brings dy row a and the rows UP * a + e - pad_height of x, e < UP.
  int item = t.active ? blockIdx.x * t.strips_per_pass + t.ty : items;
  int begin = 0, end = 0, dy_row = 0, x_row = 0, x_end = 0, owned = 0;
  SharedAddress into = first_stage;
  unsigned int inside = 0u, wanted = 0u;
  const char *dy_from = nullptr, *x_from = nullptr;
  char* to = nullptr;
  auto fetch = [&]() {
    if ((unsigned int)dy_row < (unsigned int)out_height && dy_row < end) copy_columns<COLUMNS>(into, dy_from, pixel, inside);
    ++dy_row;
    dy_from += out_row_bytes;
#pragma unroll
    for (int e = 0; e < UP; ++e) {
      if (dy_row > begin && x_row >= 0 && x_row < x_end)
        copy_columns<WIDE>(ahead(into, (COLUMNS + e * WIDE) * THREADS), x_from, pixel, wanted);
      ++x_row;
      x_from += row_bytes;
    }
    cp_async_commit();
    into = into == last_stage ? first_stage : ahead(into, STAGE);
  };
  auto start = [&]() {
    const int column = item % strips * STRIP, rest = item / strips, segment = rest % segments, n = rest / segments;
    const int rows = (height - 1 + pad_height) / UP + 1;  // steps, counted from the padded image's first row
    begin = pad_height / UP + segment * segment_rows;
    end = rows - begin < segment_rows ? rows : begin + segment_rows;
    const int dy_column = column + (pad_width - PHASE) / UP - LEFT;
    inside = columns_inside<COLUMNS>(dy_column, out_width);
    wanted = columns_inside<WIDE>(UP * column, width);
    // dy columns before the strip's own are counted for the bias by the image's first strip, dy rows before by its first segment.
    owned = (column == 0 ? 0 : LEFT) | (segment == 0 ? 0 : begin) << 8;
    dy_row = begin - (NEIGHBOURS - 1);
    x_row = UP * dy_row - pad_height;
    x_end = height < UP * end - pad_height ? height : UP * end - pad_height;
    dy_from = (const char*)(dy + t.vector) + (((i64)n * out_height + dy_row) * out_width + dy_column) * pixel;
    const i64 at = (((i64)n * height + x_row) * width + UP * column) * pixel;
    x_from = (const char*)(x + t.vector) + at;
    to = (char*)(dx + t.vector) + at;
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
      clear_columns<COLUMNS>(mine + d * STAGE, ~inside);
#pragma unroll
      for (int e = 0; e < UP; ++e) clear_columns<WIDE>(mine + d * STAGE + (COLUMNS + e * WIDE) * THREADS, ~wanted);
    }
    into = first_stage;
#pragma unroll
    for (int d = 0; d < DEPTH - 1; ++d) fetch();
  };

  if (item < items) start();
  stage_taps(taps, weight, tile, vectors, false);
  __syncthreads();
  const float* const own_taps = taps + t.tx * TAPS_OF_VECTOR;
#if KEEP_TAPS
  float kept[K][ROW];
  if (t.active) {
#pragma unroll
    for (int r = 0; r < K; ++r) tap_row(own_taps, r, kept[r]);
  }
#endif
  float dw[K][K][CH], db[CH];
#pragma unroll
  for (int j = 0; j < CH; ++j) {
    db[j] = 0.f;
#pragma unroll
    for (int r = 0; r < K; ++r)
#pragma unroll
      for (int i = 0; i < K; ++i) dw[r][i][j] = 0.f;
  }

  while (item < items) {
    float window[NEIGHBOURS][COLUMNS][CH];  // dy row a lies in slot (a - first) % NEIGHBOURS
#pragma unroll
    for (int q = 0; q < NEIGHBOURS; ++q)
#pragma unroll
      for (int v = 0; v < COLUMNS; ++v)
#pragma unroll
        for (int j = 0; j < CH; ++j) window[q][v][j] = 0.f;
    int at = 0;
    for (int a = begin - (NEIGHBOURS - 1); a < end; a += NEIGHBOURS) {
#pragma unroll
      for (int u = 0; u < NEIGHBOURS; ++u) {
        if (a + u >= end) break;
        cp_async_wait<DEPTH - 2>();
        Chunk raw[COLUMNS], of_x[UP][WIDE];
        take_columns<COLUMNS>(mine + at, raw);
#pragma unroll
        for (int e = 0; e < UP; ++e) take_columns<WIDE>(mine + at + (COLUMNS + e * WIDE) * THREADS, of_x[e]);
        at = at == (DEPTH - 1) * STAGE ? 0 : at + STAGE;
        fetch();  // into the stage that the step before has read
        if ((unsigned int)(a + u) < (unsigned int)out_height) {
#pragma unroll
          for (int v = 0; v < COLUMNS; ++v) widen(raw[v], window[u][v]);
#if BIAS
          if (a + u >= owned >> 8) {
#pragma unroll
            for (int v = 0; v < LEFT + STRIP; ++v)
              if (v >= LEFT || v >= (owned & 255)) {
#pragma unroll
                for (int j = 0; j < CH; ++j) db[j] += window[u][v][j];
              }
          }
#endif
        } else {
#pragma unroll
          for (int v = 0; v < COLUMNS; ++v)
#pragma unroll
            for (int j = 0; j < CH; ++j) window[u][v][j] = 0.f;
        }
#pragma unroll
        for (int e = 0; e < UP; ++e) {
          const int row = UP * (a + u) + e - pad_height;
          if (a + u >= begin && row >= 0 && row < height) {
            float in[WIDE][CH], out[WIDE][CH];
#pragma unroll
            for (int v = 0; v < WIDE; ++v) {
              widen(of_x[e][v], in[v]);
#pragma unroll
              for (int j = 0; j < CH; ++j) out[v][j] = 0.f;
            }
#pragma unroll
            for (int r = e; r < K; r += UP) {
              const float(&line)[COLUMNS][CH] = window[(u - r / UP + NEIGHBOURS) % NEIGHBOURS];
#if KEEP_TAPS
              const float(&w)[ROW] = kept[r];
#else
              float w[ROW];
              tap_row(own_taps, r, w);
#endif
#pragma unroll
              for (int v = 0; v < WIDE; ++v)
#pragma unroll
                for (int i = (v + PHASE) % UP; i < K; i += UP)
#pragma unroll
                  for (int j = 0; j < CH; ++j) {
                    const float g = line[(v + PHASE) / UP - i / UP + LEFT][j];
                    out[v][j] = fmaf(w[i * CH + j], g, out[v][j]);
                    dw[r][i][j] = fmaf(in[v][j], g, dw[r][i][j]);
                  }
            }
            put_columns<WIDE>(to, pixel, wanted, out);
          }
          to += row_bytes;
        }
      }
    }
    cp_async_wait<0>();
    item += gridDim.x * t.strips_per_pass;
    if (item < items) start();
  }

  // Over the strips of the block, AT_ONCE taps at a time, in their order.
  float* const shared = (float*)memory;
  const int width_of_tile = tile * CH, channels = vectors * CH;
  auto add_up = [&](int first_tap, int count) {
    __syncthreads();
    for (int o = threadIdx.x; o < count * width_of_tile; o += THREADS) {
      const int tap = o / width_of_tile, c = o % width_of_tile, channel = blockIdx.y * width_of_tile + c;
      float total = 0.f;
#pragma unroll 4
      for (int l = 0; l < t.strips_per_pass; ++l) total += shared[(tap * CH + c % CH) * THREADS + l * tile + c / CH];
      if (channel < channels) partial[((i64)blockIdx.x * TAPS + first_tap + tap) * channels + channel] = total;
    }
  };
#pragma unroll
  for (int k = 0; k < TAPS; k += AT_ONCE) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
      if (k + i < TAPS)
#pragma unroll
        for (int j = 0; j < CH; ++j)
          shared[(i * CH + j) * THREADS + threadIdx.x] =
              k + i < K * K ? dw[(k + i < K * K ? k + i : 0) / K][(k + i) % K][j] : db[j];
    add_up(k, TAPS - k < AT_ONCE ? TAPS - k : AT_ONCE);
  }
}
