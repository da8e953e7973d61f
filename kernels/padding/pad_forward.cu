// Padding of NHWC images with their own values: reflected, replicated or from the other side. Forward.
//
//   y[n,oh,ow,c] = x[n, inside(oh - top), inside(ow - left), c]      by include/border.cuh
//
// Shapes    x: [N, H, W, C]; y: [N, OH, OW, C], fp16, bf16 or fp32; C a multiple of VEC (8, or 4 for fp32).
// Replaces  aten::reflection_pad2d, replication_pad2d, both with a copy to NCHW before and, for the next convolution, one to NHWC behind;
//           and the slices that circular padding copies.
// Bytes     x once, y once. [4,256,64,64] by 1 in bf16: 8.4 + 8.9 MB.
// Bound     DRAM bandwidth, L2's where x was written just now.
// Grid      (column tiles x channel tiles, strips of ROWS output rows, images), block (channel vectors, columns, strips), as upsampling's.
// Numerics  copies bits.
// Limits    H*W*C/VEC and OH*OW*C/VEC < 2^31; N <= 65535.

#include "vector.cuh"
#include "overlap.cuh"
#include "border.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) pad_forward(
    const Vec16* __restrict__ x, Vec16* __restrict__ y, int vectors, int height, int width, int out_height,
    int out_width, int top, int left, int channel_tiles) {
  overlap_launches();
  const int vector = blockIdx.x % channel_tiles * blockDim.x + threadIdx.x;
  const int ow = blockIdx.x / channel_tiles * blockDim.y + threadIdx.y;
  const int first = (blockIdx.y * blockDim.z + threadIdx.z) * ROWS;
  if (vector >= vectors || ow >= out_width) return;
  const Vec16* column = x + ((i64)blockIdx.z * height * width + inside(ow - left, width)) * vectors + vector;
  Vec16* out = y + ((i64)blockIdx.z * out_height * out_width + ow) * vectors + vector;
  Vec16 v[ROWS];
#pragma unroll
  for (int k = 0; k < ROWS; ++k)
    if (first + k < out_height) v[k] = load(column + inside(first + k - top, height) * width * vectors);
#pragma unroll
  for (int k = 0; k < ROWS; ++k)
    if (first + k < out_height) store(out + (first + k) * out_width * vectors, v[k]);
}
