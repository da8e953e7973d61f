// Pixels of bf16 images as Winograd's F(4x4, 3x3) multiplies them: of each tile of 4 x 4 results 6 x 6 pixels, as 36 frequencies, fp16.
//
//   v[f,tile,i] = scale[tile] * (B^T d B)[f],   d = x[n, 4 ti - PAD .. 4 ti + 5 - PAD, 4 tj - PAD .. 4 tj + 5 - PAD, i], zero outside the image
//
// Shapes    x: [N, H, W, IN] bf16; v: [36, tiles, IN] fp16, tiles by image, row and column; scales: [tiles] fp32, 1 / scale.
// Replaces  with winograd_filter.cu, torch.bmm and winograd_output.cu aten::convolution in bf16, and its gradient of the input.
// Bytes     x once, 2.25 times as much of v. [128,28,28,512]: 103 MB and 231.
// Flops     about 11 a value of v.
// Bound     DRAM bandwidth: 0.079 ms there at 4.24 TB/s.
// Grid      a block of all channels, two a thread, for WALK tiles side by side. Their pixels come into shared memory four columns at a time, two
//           such groups ahead of the tile that is made; neighbours share two columns, which stay in registers.
// Numerics  fp32, each value rounded once to fp16. The scale brings the tile's largest magnitude to below 2^PIXELS_BELOW (include/winograd.cuh).
//           Two runs are bit-equal.
// Limits    PAD 0 to 2; IN a multiple of 64, 2 * THREADS; x begins at a multiple of 16 bytes; N * tiles * IN below 2^31; sm_80.

#define WEIGHT_STORAGE 0
#define TRANSPOSED 0
#define STORAGE 2

#include "vector.cuh"
#include "cp_async.cuh"
#include "half.cuh"
#include "overlap.cuh"
#include "winograd.cuh"

#define UNITS (THREADS / 4)  // of 16 bytes of a pixel
#define GROUP (24 * UNITS)   // six rows of four columns
#define GROUPS 3

// Six pixels above each other, transformed, of this thread's two channels; returns the larger of `most` and their largest magnitude.
__device__ __forceinline__ float column_of(const Vec16* group, int column, float most, float (&t)[6][2]) {
  unsigned int pairs[6];
#pragma unroll
  for (int r = 0; r < 6; ++r) pairs[r] = ((const unsigned int*)(group + (4 * r + column) * UNITS))[threadIdx.x];
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    float d[6], v[6];
#pragma unroll
    for (int r = 0; r < 6; ++r) {
      d[r] = __uint_as_float(k ? pairs[r] & 0xffff0000u : pairs[r] << 16);
      most = fmaxf(most, fabsf(d[r]));
    }
    pixel_transform(d, v);
#pragma unroll
    for (int r = 0; r < 6; ++r) t[r][k] = v[r];
  }
  return most;
}

extern "C" __global__ void __launch_bounds__(THREADS, LEAST_BLOCKS) winograd_input(
    const Vec16* __restrict__ x, unsigned int* __restrict__ v, float* __restrict__ scales, int height, int width, int tiles_h, int tiles_w,
    int segments, i64 tiles) {
  overlap_launches();
  extern __shared__ __align__(16) Vec16 ring[];
  __shared__ unsigned int found[THREADS / 32];
  const int segment = blockIdx.x % segments, ti = blockIdx.x / segments % tiles_h, n = blockIdx.x / segments / tiles_h;
  const int first = segment * WALK, last = first + WALK < tiles_w ? first + WALK : tiles_w, h = 4 * ti - PAD;
  const int column = threadIdx.x / UNITS, unit = threadIdx.x % UNITS;  // of a group, as this thread copies it

  // Group g has the columns from 4 g - PAD on. A tile needs its own and two columns of the next.
  const auto fetch = [&](int g) {
    const int w = 4 * g - PAD + column;
    const bool inside = g < last || (g == last && column < 2);
    Vec16* to = ring + (g - first) % GROUPS * GROUP + column * UNITS + unit;
#pragma unroll
    for (int r = 0; r < 6; ++r) {
      const bool valid = inside && w >= 0 && w < width && h + r >= 0 && h + r < height;
      cp_async16(to + 4 * r * UNITS, valid ? x + (((i64)n * height + h + r) * width + w) * UNITS + unit : x, valid);
    }
    cp_async_commit();
  };
  fetch(first);
  fetch(first + 1);
  float t[6][6][2];  // by column
  float shared_most = 0.f;  // of the two columns that the next tile has too
  for (int tj = first; tj < last; ++tj) {
    fetch(tj + 2);
    cp_async_wait<1>();
    __syncthreads();
    const Vec16* own = ring + (tj - first) % GROUPS * GROUP;
    const Vec16* next = ring + (tj + 1 - first) % GROUPS * GROUP;
    float most = 0.f;
    if (tj == first) {
#pragma unroll
      for (int c = 0; c < 2; ++c) most = column_of(own, c, most, t[c]);
    } else {
      most = shared_most;
#pragma unroll
      for (int c = 0; c < 2; ++c)
#pragma unroll
        for (int r = 0; r < 6; ++r)
#pragma unroll
          for (int k = 0; k < 2; ++k) t[c][r][k] = t[4 + c][r][k];
    }
#pragma unroll
    for (int c = 2; c < 4; ++c) most = column_of(own, c, most, t[c]);
    shared_most = 0.f;
#pragma unroll
    for (int c = 0; c < 2; ++c) shared_most = column_of(next, c, shared_most, t[4 + c]);
    most = fmaxf(most, shared_most);
    const unsigned int all = __reduce_max_sync(0xffffffffu, __float_as_uint(most));  // of magnitudes bits are ordered as values
    if (threadIdx.x % 32 == 0) found[threadIdx.x / 32] = all;
    __syncthreads();  // and all have read the group that is copied next
    unsigned int largest = 0;
#pragma unroll
    for (int w = 0; w < THREADS / 32; ++w) largest = found[w] > largest ? found[w] : largest;
    const float scale = scale_for(__uint_as_float(largest), PIXELS_BELOW);
    const i64 tile = ((i64)n * tiles_h + ti) * tiles_w + tj;
    if (threadIdx.x == 0) scales[tile] = 1.f / scale;
#pragma unroll
    for (int r = 0; r < 6; ++r) {
      float low[6], high[6], d[6];
#pragma unroll
      for (int c = 0; c < 6; ++c) d[c] = t[c][r][0];
      pixel_transform(d, low);
#pragma unroll
      for (int c = 0; c < 6; ++c) d[c] = t[c][r][1];
      pixel_transform(d, high);
#pragma unroll
      for (int c = 0; c < 6; ++c) v[((i64)(6 * r + c) * tiles + tile) * THREADS + threadIdx.x] = narrow_f16x2(low[c] * scale, high[c] * scale);
    }
  }
  cp_async_wait<0>();
}
