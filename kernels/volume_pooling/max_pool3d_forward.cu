// Max-pooling of NDHWC volumes, forward, with positions for the backward pass.
//
//   y[n,od,oh,ow,c] = max over (kd, kh, kw) of x[n, od*SD - pad_d + kd, oh*SH - pad_h + kh, ow*SW - pad_w + kw, c]
//   position = (kd*KH + kh)*KW + kw
//
// Shapes    x: [N, D, H, W, C], y: [N, OD, OH, OW, C], fp16, bf16 or fp32, C a multiple of VEC (8, or 4 for fp32).
//           index: [N, OD, OH, OW, C] bytes, only with INDICES.
// Replaces  aten::max_pool3d_with_indices, whose index is 8 bytes an output.
// Bytes     x once, y once, 1 byte an output. A 3-D ResNet's stem in bf16, [32,64,16,56,56] k3 s2: 206 + 26 + 13 MB.
// Bound     DRAM bandwidth; neighbouring windows meet in L1 and L2.
// Grid      flat, a thread an output vector; a row of taps and more is in flight together.
// Numerics  exact. NaN wins, as in PyTorch; of equal values the first counts, of several NaNs the last.
// Limits    KD*KH*KW < 255; fewer than 2^31 vectors.

#include "vector.cuh"
#include "overlap.cuh"
#include "packed.cuh"
#include "extremum.cuh"
#include "volume.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) max_pool3d_forward(
    const Vec16* __restrict__ x, Vec16* __restrict__ y, Positions* __restrict__ index, unsigned int count, int vectors,
    int depth, int height, int width, int out_depth, int out_height, int out_width, int pad_d, int pad_h, int pad_w) {
  overlap_launches();
  const Voxel p = voxel_of(count, out_depth, out_height, out_width, vectors);
  if (p.n < 0) return;
  const int d0 = p.d * SD - pad_d, h0 = p.h * SH - pad_h, w0 = p.w * SW - pad_w;
  const Vec16* volume = x + at_voxel(p.n, 0, 0, 0, depth, height, width, vectors) + p.vector;
  Extremum best;
  begin(best, ((d0 < 0 ? -d0 : 0) * KH + (h0 < 0 ? -h0 : 0)) * KW + (w0 < 0 ? -w0 : 0));
#pragma unroll
  for (int kd = 0; kd < KD; ++kd) {
    const int d = d0 + kd;
    if (d < 0 || d >= depth) continue;
#pragma unroll
    for (int kh = 0; kh < KH; ++kh) {
      const int h = h0 + kh;
      if (h < 0 || h >= height) continue;
      const Vec16* row = volume + ((i64)d * height + h) * width * vectors;
      Vec16 v[KW];
#pragma unroll
      for (int kw = 0; kw < KW; ++kw) {
        v[kw] = {{LOWEST, LOWEST, LOWEST, LOWEST}};
        if (w0 + kw >= 0 && w0 + kw < width) v[kw] = load(row + (w0 + kw) * vectors);
      }
#pragma unroll
      for (int kw = 0; kw < KW; ++kw) take(best, v[kw], (kd * KH + kh) * KW + kw);
    }
  }
  const i64 at = at_voxel(p.n, p.d, p.h, p.w, out_depth, out_height, out_width, vectors) + p.vector;
  store(y + at, best.value);
#if INDICES
  if (has_nan(best.value)) {  // rare: look once more for whose the gradient is
    for (int kd = 0; kd < KD; ++kd)
      for (int kh = 0; kh < KH; ++kh)
        for (int kw = 0; kw < KW; ++kw) {
          const int d = d0 + kd, h = h0 + kh, w = w0 + kw;
          if (d >= 0 && d < depth && h >= 0 && h < height && w >= 0 && w < width)
            take_nan(best, load(volume + (((i64)d * height + h) * width + w) * vectors), (kd * KH + kh) * KW + kw);
        }
  }
  index[at] = positions(best);
#endif
}
