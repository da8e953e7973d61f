// Max-pooling, forward, with positions for the backward pass; with BIAS of relu(x + bias), which need not be written anywhere.
//
//   y[n,oh,ow,c] = max over (kh, kw) of x[n, oh*SH - pad_h + kh*DH, ow*SW - pad_w + kw*DW, c]      position = kh*KW + kw
//   BIAS: relu(that + bias[c]), and position 255 where it is 0: nothing behind it gets a gradient
//
// Shapes    x: [N, H, W, C], y: [N, OH, OW, C], fp16, bf16 or fp32, C a multiple of VEC (8, or 4 for fp32).
//           index: [N, OH, OW, C] bytes, only with INDICES. bias: [C] fp32, 16-byte aligned.
// Replaces  aten::max_pool2d_with_indices, whose index is 8 bytes an output. BIAS: and a convolution's bias pass and relu_ before it.
// Bytes     x once, y once, 1 byte an output. ResNet's stem in bf16, [256,64,112,112] k3 s2: 411 + 103 + 51 MB. VGG's first with
//           BIAS, [128,64,224,224] k2 s2: 822 + 206 + 103 MB, where the passes apart move 2770.
// Bound     DRAM bandwidth: 0.133 ms there at 4.24 TB/s. Comparing in packed words takes 3 instructions for two channels of a
//           tap; the whole thread about 290 (sm_90, nvdisasm), 58 M warp instructions there: half of that time if all four
//           schedulers issue. With values widened to fp32 the ALU pipe alone would take as long as DRAM.
// Grid      include/pool_window.cuh; a thread makes OUT_W neighbouring outputs of VEC channels and has their windows' taps
//           in flight together, up to AT_ONCE 16-byte loads.
// Numerics  exact. NaN wins, as in PyTorch; of equal values the first counts, of several NaNs the last. BIAS: adding a constant,
//           ReLU and rounding never turn an order round, so the maximum is found before them, and rounded once. Of x that round to
//           the same sum the largest gets the gradient, in PyTorch the first.
// Limits    KH*KW < 255; H*W*C/VEC < 2^31 an image; N <= 65535.

#include "vector.cuh"
#include "overlap.cuh"
#include "packed.cuh"
#include "extremum.cuh"
#include "pool_window.cuh"
#include "pool_strip.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) max_pool_forward(
    const Vec16* __restrict__ x, Vec16* __restrict__ y, Positions* __restrict__ index,
#if BIAS
    const float* __restrict__ bias,
#endif
    int vectors, int height, int width, int out_height, int out_width, int pad_h, int pad_w, int channel_tiles) {
  overlap_launches();
  const Place p = place_of(channel_tiles);
  const int ow = p.column * OUT_W;
  if (p.vector >= vectors || p.row >= out_height || ow >= out_width) return;
  const Vec16* image = x + (i64)blockIdx.z * height * width * vectors + p.vector;
  const int h0 = p.row * SH - pad_h, w0 = ow * SW - pad_w;
  const int first_row = h0 < 0 ? (-h0 + DH - 1) / DH : 0;

  const Vec16 outside = {{LOWEST, LOWEST, LOWEST, LOWEST}};
  Extremum best[OUT_W];
#pragma unroll
  for (int t = 0; t < OUT_W; ++t) {
    const int left = w0 + t * SW;
    begin(best[t], first_row * KW + (left < 0 ? (-left + DW - 1) / DW : 0));
  }
#pragma unroll
  for (int base = 0; base < KH; base += ROWS_AT_ONCE) {
    Vec16 v[ROWS_AT_ONCE][COLUMNS];
    load_strip(v, image, base, h0, w0, vectors, height, width, outside);
#pragma unroll
    for (int k = 0; k < ROWS_AT_ONCE; ++k)
#pragma unroll
      for (int column = 0; column < COLUMNS; ++column)
#pragma unroll
        for (int t = 0; t < OUT_W; ++t)
          if (base + k < KH && has_tap(t, column))
            take(best[t], v[k][column], (base + k) * KW + (column - t * SW) / DW);
  }
  const i64 at = (((i64)blockIdx.z * out_height + p.row) * out_width + ow) * vectors + p.vector;
#pragma unroll
  for (int t = 0; t < OUT_W; ++t) {
    if (ow + t >= out_width) break;
#if !BIAS
    store(y + at + t * vectors, best[t].value);
#endif
#if INDICES
    if (has_nan(best[t].value)) {  // rare: look once more for whose the gradient is
      for (int kh = 0; kh < KH; ++kh)
        for (int kw = 0; kw < KW; ++kw) {
          const int h = h0 + kh * DH, w = w0 + t * SW + kw * DW;
          if (h >= 0 && h < height && w >= 0 && w < width)
            take_nan(best[t], load(image + (h * width + w) * vectors), kh * KW + kw);
        }
    }
    Positions position = positions(best[t]);
#endif
#if BIAS
    float f[VEC];
    widen(best[t].value, f);
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      f[j] += bias[p.vector * VEC + j];
      if (f[j] <= 0.f) {  // not NaN
        f[j] = 0.f;
#if INDICES
        position.w[j / 4] |= 0xffu << 8 * (j % 4);
#endif
      }
    }
    store(y + at + t * vectors, narrow(f));
#endif
#if INDICES
    index[at + t * vectors] = position;
#endif
  }
}
