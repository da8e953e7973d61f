// Padding of NHWC images with their own values. Backward: every element gathers from its copies.
//
//   dx[n,h,w,c] = sum of dy[n,oh,ow,c] over the outputs that are copies of (h, w)
//
// Shapes    dy: [N, OH, OW, C]; dx: [N, H, W, C], fp16, bf16 or fp32; C a multiple of VEC (8, or 4 for fp32).
// Replaces  aten::reflection_pad2d_backward, replication_pad2d_backward, which zero dx and add to it atomically, and their copies.
// Bytes     dy once, dx once.
// Bound     DRAM bandwidth. Elements away from the border have one copy: they are moved.
// Grid      as the forward, over elements.
// Numerics  fp32 sums in a fixed order, rounded once; deterministic, no atomics.
// Limits    as the forward.

#include "vector.cuh"
#include "overlap.cuh"
#include "border.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) pad_backward(
    const Vec16* __restrict__ dy, Vec16* __restrict__ dx, int vectors, int height, int width, int out_height,
    int out_width, int top, int left, int channel_tiles) {
  overlap_launches();
  const int vector = blockIdx.x % channel_tiles * blockDim.x + threadIdx.x;
  const int w = blockIdx.x / channel_tiles * blockDim.y + threadIdx.y;
  const int first = (blockIdx.y * blockDim.z + threadIdx.z) * ROWS;
  if (vector >= vectors || w >= width) return;
  const Vec16* image = dy + (i64)blockIdx.z * out_height * out_width * vectors + vector;
  Vec16* out = dx + ((i64)blockIdx.z * height * width + w) * vectors + vector;
  Vec16 v[ROWS];
#pragma unroll
  for (int k = 0; k < ROWS; ++k)
    if (first + k < height) v[k] = load(image + ((first + k + top) * out_width + w + left) * vectors);
#pragma unroll
  for (int k = 0; k < ROWS; ++k) {
    const int h = first + k;
    if (h >= height) break;
    float sum[VEC];
    widen(v[k], sum);
    bool more = false;
    each_copy(h, height, top, out_height, [&](int oh) {
      each_copy(w, width, left, out_width, [&](int ow) {
        if (oh == h + top && ow == w + left) return;
        float g[VEC];
        widen(load(image + (oh * out_width + ow) * vectors), g);
        more = true;
#pragma unroll
        for (int c = 0; c < VEC; ++c) sum[c] += g[c];
      });
    });
    store(out + h * width * vectors, more ? narrow(sum) : v[k]);
  }
}
