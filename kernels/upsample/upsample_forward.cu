// Upsampling (bilinear or nearest) of NHWC images, written straight into a channel slice of a wider buffer. Forward.
//
//   bilinear  y[oh,ow] = (1-a) ((1-b) x[h,w] + b x[h,w+1]) + a ((1-b) x[h+1,w] + b x[h+1,w+1])      nearest  y[oh,ow] = x[h,w]
//   with h, a from oh and w, b from ow by include/resample.cuh
//
// Shapes    x: [N, H, W, C]; y: [N, OH, OW, >= C], pixels y_vectors * VEC apart (the channels of the concatenation), fp16, bf16
//           or fp32; C, the slice's first channel and the pixel stride are multiples of VEC (8, or 4 for fp32).
// Replaces  aten::upsample_bilinear2d, upsample_nearest2d, _upsample_nearest_exact2d, and the half of aten::cat that copies the
//           result. Under autocast aten widens x, y and the whole concatenation to fp32, only for the next convolution to round
//           them: here y is rounded at once.
// Bytes     x once, y once. UNet-64's last level in bf16, [32,64,128,128] x2: 67 + 268 MB.
// Bound     DRAM bandwidth: 0.079 ms there at 4.24 TB/s.
// Grid      (column tiles x channel tiles, strips of ROWS output rows, images), block (channel vectors, columns, strips). A thread
//           walks down its strip and keeps the two source rows, interpolated along w already: at x2 one load of two pixels
//           serves two outputs, which halves the instructions; else those would be the bound.
// Numerics  fp32, rounded once; nearest copies bits.
// Limits    H*W*C/VEC and OH*OW*y_vectors < 2^31; N <= 65535.
//
// concat_copy: the other inputs of the concatenation, each copied once into its slice. Bytes: one read, one write.

#include "vector.cuh"
#include "overlap.cuh"
#include "resample.cuh"

#ifndef ROWS
#define ROWS 4
#endif
#ifndef PIXELS
#define PIXELS 4  // 16-byte loads in flight a thread of the copy
#endif

__device__ __forceinline__ void interpolate_row(
    float (&f)[VEC], const Vec16* left, int right, float weight, int h, int row_vectors) {
  float g[VEC];
  const Vec16* at = left + h * row_vectors;
  const Vec16 a = load(at), b = load(at + right);
  widen(a, f);
  widen(b, g);
#pragma unroll
  for (int c = 0; c < VEC; ++c) f[c] = (1.f - weight) * f[c] + weight * g[c];
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) upsample_forward(
    const Vec16* __restrict__ x, Vec16* __restrict__ y, int vectors, int y_vectors, int height, int width,
    int out_height, int out_width, float scale_h, float scale_w, int channel_tiles) {
  overlap_launches();
  const int vector = blockIdx.x % channel_tiles * blockDim.x + threadIdx.x;
  const int ow = blockIdx.x / channel_tiles * blockDim.y + threadIdx.y;
  const int first = (blockIdx.y * blockDim.z + threadIdx.z) * ROWS;
  if (vector >= vectors || ow >= out_width || first >= out_height) return;
  const Source sw = source_of(ow, scale_w, width);
  const Vec16* left = x + ((i64)blockIdx.z * height * width + sw.index) * vectors + vector;
  const int row_vectors = width * vectors;
  Vec16* out = y + (((i64)blockIdx.z * out_height + first) * out_width + ow) * y_vectors + vector;
  const int out_row = out_width * y_vectors;
  int have = -2;
#if BILINEAR
  const int right = sw.index < width - 1 ? vectors : 0;
  float upper[VEC], lower[VEC];
#else
  Vec16 value = {{0u, 0u, 0u, 0u}};
#endif
#pragma unroll
  for (int k = 0; k < ROWS; ++k) {
    if (first + k >= out_height) break;
    const Source sh = source_of(first + k, scale_h, height);
#if BILINEAR
    if (sh.index != have) {
      if (sh.index == have + 1) {
#pragma unroll
        for (int c = 0; c < VEC; ++c) upper[c] = lower[c];
      } else {
        interpolate_row(upper, left, right, sw.weight, sh.index, row_vectors);
      }
      interpolate_row(lower, left, right, sw.weight, sh.index < height - 1 ? sh.index + 1 : sh.index, row_vectors);
      have = sh.index;
    }
    float f[VEC];
#pragma unroll
    for (int c = 0; c < VEC; ++c) f[c] = (1.f - sh.weight) * upper[c] + sh.weight * lower[c];
    store(out + k * out_row, narrow(f));
#else
    if (sh.index != have) value = load(left + sh.index * row_vectors);
    have = sh.index;
    store(out + k * out_row, value);
#endif
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) concat_copy(
    const Vec16* __restrict__ x, Vec16* __restrict__ y, int vectors, int y_vectors, i64 pixels, int channel_tiles) {
  overlap_launches();
  const int vector = blockIdx.x % channel_tiles * blockDim.x + threadIdx.x;
  const i64 first = (i64)(blockIdx.x / channel_tiles) * PIXELS * blockDim.y + threadIdx.y;
  if (vector >= vectors) return;
  Vec16 v[PIXELS];
#pragma unroll
  for (int k = 0; k < PIXELS; ++k) {
    const i64 p = first + k * blockDim.y;
    if (p < pixels) v[k] = load(x + p * vectors + vector);
  }
#pragma unroll
  for (int k = 0; k < PIXELS; ++k) {
    const i64 p = first + k * blockDim.y;
    if (p < pixels) store(y + p * y_vectors + vector, v[k]);
  }
}
