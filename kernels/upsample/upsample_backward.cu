// Upsampling (bilinear or nearest), backward: every input pixel gathers from the outputs that it went into.
//
//   dx[h,w] = sum over oh, ow of weight(oh, h) weight(ow, w) dy[oh,ow]           weights by include/resample.cuh
//
// Shapes    dy: [N, OH, OW, >= C], pixels dy_vectors * VEC apart (a channel slice of the concatenation's gradient, read in
//           place); dx: [N, H, W, C]. Every element is written.
// Replaces  aten::upsample_bilinear2d_backward (atomic adds into zeroed memory), upsample_nearest2d_backward,
//           _upsample_nearest_exact2d_backward, and the copy of the slice that they ask for.
// Bytes     dy once, dx once. UNet-64's last level in bf16, [32,64,128,128] x2: 268 + 67 MB.
// Bound     DRAM bandwidth: 0.079 ms there at 4.24 TB/s.
// Grid      as upsample_forward.cu over input pixels; a thread walks down the outputs of ROWS input rows, adds up each output row
//           along w (at most TAPS outputs went into a column: set by the build from the sizes) and adds it to the one or two
//           input rows it belongs to. At x2 eighteen output rows of four loads serve eight rows.
// Numerics  fp32 sums in a fixed order, rounded once; deterministic, no atomics.
// Limits    as upsample_forward.cu; TAPS <= 16.

#include "vector.cuh"
#include "overlap.cuh"
#include "resample.cuh"

#ifndef ROWS
#define ROWS 8
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1) upsample_backward(
    const Vec16* __restrict__ dy, Vec16* __restrict__ dx, int vectors, int dy_vectors, int height, int width,
    int out_height, int out_width, float scale_h, float scale_w, float inverse_h, float inverse_w, int channel_tiles) {
  overlap_launches();
  const int vector = blockIdx.x % channel_tiles * blockDim.x + threadIdx.x;
  const int w = blockIdx.x / channel_tiles * blockDim.y + threadIdx.y;
  const int first = (blockIdx.y * blockDim.z + threadIdx.z) * ROWS;
  if (vector >= vectors || w >= width || first >= height) return;

  int left = first_output(w - BILINEAR, scale_w, inverse_w, width, out_width);
#if BILINEAR
  for (; left < out_width; ++left) {  // outputs that lie on column w - 1 itself took nothing from w
    const Source s = source_of(left, scale_w, width);
    if (s.index >= w || s.weight != 0.f) break;
  }
#endif
  float weight[TAPS];
  int offset[TAPS], taps = 0;  // outputs left .. left + taps - 1 took something from column w
#pragma unroll
  for (int t = 0; t < TAPS; ++t) {
    const Source s = source_of(left + t, scale_w, width);
    const bool covers = left + t < out_width && s.index <= w;
    weight[t] = !covers ? 0.f : s.index == w ? 1.f - s.weight : s.weight;
    if (covers) taps = t + 1;
    offset[t] = (taps > 0 ? taps - 1 : 0) * dy_vectors;  // past the last: that one once more, with weight 0, and no branch
  }
  const Vec16* from = dy + ((i64)blockIdx.z * out_height * out_width + left) * dy_vectors + vector;
  Vec16* to = dx + ((i64)blockIdx.z * height * width + w) * vectors + vector;
  const int last = first + ROWS < height ? first + ROWS - 1 : height - 1;
  float upper[VEC], lower[VEC];  // gradients of rows h and h + 1 so far
#pragma unroll
  for (int c = 0; c < VEC; ++c) upper[c] = lower[c] = 0.f;
  int h = first;
  int oh = first_output(first - BILINEAR, scale_h, inverse_h, height, out_height);
  const Vec16* line = from + oh * out_width * dy_vectors;
  const int pitch = out_width * dy_vectors;
#pragma unroll 1
  for (; oh < out_height; ++oh, line += pitch) {
    const Source s = source_of(oh, scale_h, height);
    if (s.index > last) break;
    float row[VEC];
#pragma unroll
    for (int c = 0; c < VEC; ++c) row[c] = 0.f;
    if (taps > 0) {
      Vec16 v[TAPS];
#pragma unroll
      for (int t = 0; t < TAPS; ++t) v[t] = load(line + offset[t]);
#pragma unroll
      for (int t = 0; t < TAPS; ++t) {
        float f[VEC];
        widen(v[t], f);
#pragma unroll
        for (int c = 0; c < VEC; ++c) row[c] += weight[t] * f[c];
      }
    }
#pragma unroll 1
    for (; h < s.index; ++h) {  // row h is complete
      store(to + h * width * vectors, narrow(upper));
#pragma unroll
      for (int c = 0; c < VEC; ++c) {
        upper[c] = lower[c];
        lower[c] = 0.f;
      }
    }
    const bool above = s.index < h;  // belongs to the strip with its second row alone
#pragma unroll
    for (int c = 0; c < VEC; ++c) {
      upper[c] += (above ? s.weight : 1.f - s.weight) * row[c];
      if (!above) lower[c] += s.weight * row[c];
    }
  }
#pragma unroll 1
  for (; h <= last; ++h) {
    store(to + h * width * vectors, narrow(upper));
#pragma unroll
    for (int c = 0; c < VEC; ++c) {
      upper[c] = lower[c];
      lower[c] = 0.f;
    }
  }
}
