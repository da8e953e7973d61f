// What transforms have made of values that are not finite, put right: each such result is computed again from its own products alone.
//
// A transform spreads an infinity or NaN over its whole image, where a convolution has it in the results whose taps meet it.
//   PRODUCT 0: y[n,o,h,w] = sum over (i, r, s) of weight[o,i,r,s] * x[n,i,h - pad_h + r, w - pad_w + s]
//   PRODUCT 1: dx[n,i,h,w] = sum over (o, r, s) of weight[o,i,r,s] * dy[n,o,h + pad_h - r, w + pad_w - s]
//   PRODUCT 2: dweight[o,i,r,s] = sum over (n, h, w) of dy[n,o,h,w] * x[n,i,h - pad_h + r, w - pad_w + s]
//
// Shapes    contiguous fp32: x [N, I, H, W], y [N, O, OH, OW], weight [O, I, R, S]. `a` is x or dy, `b` the weight, or x of PRODUCT 2.
// Replaces  nothing: it guards the place of aten::convolution that transforms have taken.
// Bytes     the result once, where all of it is finite.
// Bound     DRAM bandwidth; with what is not finite in it, latency: each such result takes its products one by one.
// Grid      a flat pass.
// Numerics  fp32 sums in a fixed order.
// Limits    sm_80.

#include "overlap.cuh"

typedef long long i64;
#define THREADS 256

extern "C" __global__ void __launch_bounds__(THREADS) fft_conv_repair(
    float* __restrict__ result, const float* __restrict__ a, const float* __restrict__ b, i64 values, int batch, int inputs, int outputs,
    int height, int width, int out_height, int out_width, int taps_h, int taps_w, int pad_h, int pad_w) {
  overlap_launches();
  const i64 at_once = (i64)gridDim.x * THREADS;
  for (i64 i = (i64)blockIdx.x * THREADS + threadIdx.x; i < values; i += at_once) {
    const float found = result[i];
    if (found - found == 0.f) continue;
    float total = 0.f;
#if PRODUCT == 2
    const int s = (int)(i % taps_w), r = (int)(i / taps_w % taps_h), c = (int)(i / taps_w / taps_h % inputs);
    const int o = (int)(i / taps_w / taps_h / inputs);
    for (int n = 0; n < batch; ++n)
      for (int h = 0; h < out_height; ++h)
        for (int w = 0; w < out_width; ++w) {
          const int from_h = h - pad_h + r, from_w = w - pad_w + s;
          if (from_h < 0 || from_w < 0 || from_h >= height || from_w >= width) continue;
          total = fmaf(a[(((i64)n * outputs + o) * out_height + h) * out_width + w], b[(((i64)n * inputs + c) * height + from_h) * width + from_w], total);
        }
#else
#if PRODUCT == 0
    const int rows = out_height, columns = out_width, channels = outputs, others = inputs, from_rows = height, from_columns = width;
#else
    const int rows = height, columns = width, channels = inputs, others = outputs, from_rows = out_height, from_columns = out_width;
#endif
    const int w = (int)(i % columns), h = (int)(i / columns % rows), c = (int)(i / columns / rows % channels);
    const i64 n = i / columns / rows / channels;
    for (int k = 0; k < others; ++k)
      for (int r = 0; r < taps_h; ++r)
        for (int s = 0; s < taps_w; ++s) {
#if PRODUCT == 0
          const int from_h = h - pad_h + r, from_w = w - pad_w + s;
          const i64 tap = ((i64)c * inputs + k) * taps_h * taps_w + r * taps_w + s;
#else
          const int from_h = h + pad_h - r, from_w = w + pad_w - s;
          const i64 tap = ((i64)k * inputs + c) * taps_h * taps_w + r * taps_w + s;
#endif
          if (from_h < 0 || from_w < 0 || from_h >= from_rows || from_w >= from_columns) continue;
          total = fmaf(a[((n * others + k) * from_rows + from_h) * from_columns + from_w], b[tap], total);
        }
#endif
    result[i] = total;
  }
}
