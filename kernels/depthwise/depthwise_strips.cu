// Depthwise convolution, forward; with FLIP and the transposed call also the data gradient of stride 1. 3, 5 and 7 taps.
//
//   y[n,oh,ow,c] = bias[c] + sum over (r, s) of w[c,r,s] * x[n, oh*stride - pad_h + r, ow*stride - pad_w + s, c]
//
// Shapes    x: [N, H, W, C], y: [N, OH, OW, C], fp16, bf16 or fp32; w: [C, 1, K, K] and bias [C] as the user's parameters lie, in
//           their own dtype. K 3, 5 or 7; STRIDE 1 or 2.
// Replaces  aten::convolution with as many groups as channels (cuDNN).
// Bytes     x once, y once. MobileNetV2's [256,96,112,112] k3 in bf16: 617 + 617 MB, 0.29 ms at 4.24 TB/s.
// Bound     An H200 has about 30 issue slots for each output of stride 1 in bf16 while its bytes move (4 B at 32 GB/s an SM, 128
//           lanes at 1.8 GHz): K*K of them are FMA, and 4 to 7 copies, conversions and stores. k3 and k5 are bound by bytes, if
//           enough of them are in flight: THREADS * DEPTH * COLUMNS chunks a block. k7 is bound by FMA issue.
// Grid      (blocks over strips, channel tiles). A thread walks down a strip of STRIP pixels. Input rows come through its ring in
//           shared memory DEPTH - 1 steps ahead; each is widened once and added to the SLOTS output rows that it reaches, whose sums
//           stay in registers, as all taps do.
// Moments   with MOMENTS also what a batch norm behind it needs (include/moments.cuh): [blocks over strips, 3, C] fp32. A thread adds up
//           what it stores, and the block its threads.
// Numerics  fp32 FMA in a fixed order, rounded once. No atomics: two runs are bit-equal.
// Limits    C a multiple of CH; no dilation; an image row's bytes below 2^31.

#include "channels.cuh"
#include "overlap.cuh"
#include "depthwise.cuh"
#include "depthwise_ring.cuh"
#ifndef MOMENTS
#define MOMENTS 0
#endif
#if MOMENTS
#include "moments.cuh"
#include "thread_moments.cuh"
#endif

#define SLOTS ((K + STRIDE - 1) / STRIDE)
#define COLUMNS (STRIDE * (STRIP - 1) + K)
#define STAGE (STRIDE * COLUMNS * THREADS)

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) depthwise_strips(
    const Chunk* __restrict__ x, const Weight* __restrict__ weight, const Weight* __restrict__ bias, Chunk* __restrict__ y,
    int items, int vectors, int tile, int height, int width, int out_height, int out_width, int pad_height, int pad_width,
    int strips, int segments, int segment_rows
#if MOMENTS
    , float* __restrict__ moments
#endif
) {
  overlap_launches();
  __shared__ __align__(16) Chunk ring[DEPTH * STAGE];
  __shared__ __align__(16) float taps[MAX_TILE * TAPS_OF_VECTOR];
  const Tile t = tile_of(tile, vectors);
  Chunk* const mine = ring + threadIdx.x;
  const SharedAddress first_stage = shared_address(mine), last_stage = ahead(first_stage, (DEPTH - 1) * STAGE);
  const int pixel = PIXEL ? PIXEL : vectors * (int)sizeof(Chunk);  // as a constant it makes addresses of columns free
  const i64 row_bytes = (i64)width * pixel, out_row_bytes = (i64)out_width * pixel;

  // The item at work: step m, first to last, reads the input rows top + STRIDE * m + e, e < STRIDE.
  int item = t.active ? blockIdx.x * t.strips_per_pass + t.ty : items;
  int begin = 0, end = 0, first = 0, last = 0, row = 0, row_end = 0, done = 0;
  SharedAddress into = first_stage;
  unsigned int inside = 0u, wanted = 0u;
  const char* from = nullptr;
  char* to = nullptr;
  auto fetch = [&]() {  // the next step's rows into stage `into`
    if (row < row_end) {
#pragma unroll
      for (int e = 0; e < STRIDE; ++e)  // with stride 1 no row outside is read
        copy_columns<COLUMNS>(ahead(into, e * COLUMNS * THREADS), from + e * row_bytes, pixel, inside,
                              STRIDE == 1 || (row + e >= 0 && row + e < height));
    }
    row += STRIDE;
    from += STRIDE * row_bytes;
    cp_async_commit();
    into = into == last_stage ? first_stage : ahead(into, STAGE);
  };
#if MOMENTS
  static_assert(sizeof(ring) >= 3 * CH * THREADS * sizeof(float), "the block's moments lie where its pixels did");
  ThreadMoments of = no_moments();
#endif
  auto put = [&](const float (&values)[STRIP][CH]) {
    if (done >= begin) {
#if MOMENTS
      add_pixels<STRIP>(of, values, wanted);
#endif
      put_columns<STRIP>(to, pixel, wanted, values);
    }
    ++done;
    to += out_row_bytes;
  };
  auto start = [&]() {
    const int column = item % strips * STRIP, rest = item / strips, segment = rest % segments, n = rest / segments;
    begin = segment * segment_rows;
    end = out_height - begin < segment_rows ? out_height : begin + segment_rows;
    const int top = -pad_height, left = column * STRIDE - pad_width;
    first = ceil_of(-top - (STRIDE - 1), STRIDE);
    first = first < begin ? begin : first;
    last = height - 1 - top < 0 ? -1 : (height - 1 - top) / STRIDE;
    last = last < end + SLOTS - 2 ? last : end + SLOTS - 2;
    inside = columns_inside<COLUMNS>(left, width);
    wanted = columns_inside<STRIP>(column, out_width);
    row = top + STRIDE * first;
    row_end = top + STRIDE * (last + 1);
    from = (const char*)(x + t.vector) + (((i64)n * height + row) * width + left) * pixel;
    done = first - (SLOTS - 1);  // the output row that a step completes
    to = (char*)(y + t.vector) + (((i64)n * out_height + done) * out_width + column) * pixel;
#pragma unroll
    for (int d = 0; d < DEPTH; ++d)
#pragma unroll
      for (int e = 0; e < STRIDE; ++e)
        clear_columns<COLUMNS>(mine + d * STAGE + e * COLUMNS * THREADS, ~inside);
    into = first_stage;
#pragma unroll
    for (int d = 0; d < DEPTH - 1; ++d) fetch();
  };

  if (item < items) start();
  stage_taps(taps, weight, tile, vectors, FLIP);
  __syncthreads();
#if !MOMENTS  // whose sums all threads of the block go through
  if (!t.active) return;
#endif
  float kept[K][ROW], bias_of[CH];
#pragma unroll
  for (int r = 0; r < K; ++r) tap_row(taps + t.tx * TAPS_OF_VECTOR, r, kept[r]);
#pragma unroll
  for (int j = 0; j < CH; ++j) bias_of[j] = BIAS && (!MOMENTS || t.active) ? widen_weight(bias[t.vector * CH + j]) : 0.f;

  while (item < items) {
    float sum[SLOTS][STRIP][CH];  // slot q: output row m - q
#pragma unroll
    for (int q = 0; q < SLOTS; ++q)
#pragma unroll
      for (int p = 0; p < STRIP; ++p)
#pragma unroll
        for (int j = 0; j < CH; ++j) sum[q][p][j] = bias_of[j];
    int at = 0;
    for (int m = first; m <= last; ++m) {
      cp_async_wait<DEPTH - 2>();
#pragma unroll
      for (int e = 0; e < STRIDE; ++e) {
        Chunk raw[COLUMNS];
        take_columns<COLUMNS>(mine + at + e * COLUMNS * THREADS, raw);
        if (e == STRIDE - 1) fetch();  // into the stage that the step before has read
        float in[COLUMNS][CH];
#pragma unroll
        for (int v = 0; v < COLUMNS; ++v) widen(raw[v], in[v]);
#pragma unroll
        for (int q = SLOTS - 1; q >= 0; --q) {
          if (STRIDE * q + e >= K) continue;
          const float(&w)[ROW] = kept[STRIDE * q + e < K ? STRIDE * q + e : 0];
#pragma unroll
          for (int p = 0; p < STRIP; ++p)
#pragma unroll
            for (int j = 0; j < CH; ++j) {
              float a = e > 0 ? sum[q][p][j] : (q > 0 ? sum[q > 0 ? q - 1 : 0][p][j] : bias_of[j]);
#pragma unroll
              for (int i = 0; i < K; ++i) a = fmaf(w[i * CH + j], in[STRIDE * p + i][j], a);
              sum[q][p][j] = a;
            }
        }
      }
      at = at == (DEPTH - 1) * STAGE ? 0 : at + STAGE;
      put(sum[SLOTS - 1]);
    }
    // The rows whose remaining taps lie below the image.
#pragma unroll
    for (int q = SLOTS - 2; q >= 0; --q)
      if (done < end) put(sum[q]);
    cp_async_wait<0>();
    item += gridDim.x * t.strips_per_pass;
    if (item < items) start();
  }
#if MOMENTS
  __syncthreads();  // everybody's pixels are read
  leave_block_moments(of, (float*)ring, moments, tile, t.strips_per_pass, vectors * CH);
#endif
}
