// Max-pooling, backward: every element gathers from the windows that cover it and chose it.
//
//   dx[n,h,w,c] = sum over windows (oh, ow) that cover (h, w) at tap (kh, kw) of dy[n,oh,ow,c] where index = kh*KW + kw
//
// Shapes    dy: [N, OH, OW, C] as the forward's y; index: [N, OH, OW, C] bytes; dx: [N, H, W, C]. Every element is written.
// Replaces  aten::max_pool2d_with_indices_backward.
// Bytes     dy and index once, dx once. ResNet's stem in bf16: 103 + 51 + 411 MB.
// Bound     DRAM bandwidth: 0.133 ms there at 4.24 TB/s. About 430 instructions for a group of 2 x 2 elements at k3 s2 (sm_90,
//           nvdisasm), 90 M warp instructions there: 0.097 ms if all four schedulers issue.
// Grid      include/pool_window.cuh over groups of SH x (GROUP_W * SW) elements: each window near a group is read once for it.
// Numerics  fp32 sums in a fixed order, rounded once; deterministic, no atomics.
// Limits    as the forward; SW * GROUP_W accumulators of VEC fp32 a phase row must fit in registers (strides up to 4).

#include "vector.cuh"
#include "overlap.cuh"
#include "packed.cuh"
#include "extremum.cuh"
#include "pool_window.cuh"
#include "gather_max.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) max_pool_backward(
    const Vec16* __restrict__ dy, const Positions* __restrict__ index, Vec16* __restrict__ dx,
    int vectors, int height, int width, int out_height, int out_width, int pad_h, int pad_w, int channel_tiles) {
  overlap_launches();
  const Place p = place_of(channel_tiles);
  if (p.vector >= vectors) return;
  const int qh = p.row + pad_h / SH, qw = p.column * GROUP_W + pad_w / SW;
  const int h0 = qh * SH - pad_h, w0 = qw * SW - pad_w;
  if (h0 >= height || w0 >= width) return;
  const i64 windows = (i64)blockIdx.z * out_height * out_width * vectors + p.vector;
  Vec16* image = dx + (i64)blockIdx.z * height * width * vectors + p.vector;
#pragma unroll
  for (int r = 0; r < SH; r += PHASE_ROWS) {
    float sum[PHASE_ROWS][GROUP_W * SW][VEC];
    gather_max(sum, dy + windows, index + windows, r, qh, qw, vectors, out_height, out_width);
#pragma unroll
    for (int i = 0; i < PHASE_ROWS; ++i)
#pragma unroll
      for (int j = 0; j < GROUP_W * SW; ++j) {
        const int h = h0 + r + i, w = w0 + j;
        if (h >= 0 && h < height && w >= 0 && w < width) store(image + (h * width + w) * vectors, narrow(sum[i][j]));
      }
  }
}
