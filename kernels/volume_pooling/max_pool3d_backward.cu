// Max-pooling of NDHWC volumes, backward: every element gathers from the windows that cover it and chose it.
//
//   dx[n,d,h,w,c] = sum over windows (od, oh, ow) that cover (d, h, w) of dy[n,od,oh,ow,c] where index is this element's position
//
// Shapes    dy: [N, OD, OH, OW, C] as the forward's y; index: as many bytes; dx: [N, D, H, W, C]. Every element is written.
// Replaces  aten::max_pool3d_with_indices_backward, which zeroes dx and adds to it atomically.
// Bytes     dy and index once, dx once.
// Bound     DRAM bandwidth; at k3 s2 an element looks at 1 to 8 windows, which neighbours share in L1.
// Grid      flat, a thread an element vector.
// Numerics  fp32 sums in a fixed order, rounded once; deterministic, no atomics.
// Limits    as the forward.

#include "vector.cuh"
#include "overlap.cuh"
#include "packed.cuh"
#include "extremum.cuh"
#include "volume.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) max_pool3d_backward(
    const Vec16* __restrict__ dy, const Positions* __restrict__ index, Vec16* __restrict__ dx, unsigned int count,
    int vectors, int depth, int height, int width, int out_depth, int out_height, int out_width, int pad_d, int pad_h,
    int pad_w) {
  overlap_launches();
  const Voxel p = voxel_of(count, depth, height, width, vectors);
  if (p.n < 0) return;
  const int qd = (p.d + pad_d) / SD, qh = (p.h + pad_h) / SH, qw = (p.w + pad_w) / SW;
  float sum[VEC];
#pragma unroll
  for (int c = 0; c < VEC; ++c) sum[c] = 0.f;
#pragma unroll
  for (int a = 0; a < BACK_D; ++a) {
    const int od = qd - a, kd = p.d + pad_d - od * SD;
    if (od < 0 || od >= out_depth || kd >= KD) continue;
#pragma unroll
    for (int b = 0; b < BACK_H; ++b) {
      const int oh = qh - b, kh = p.h + pad_h - oh * SH;
      if (oh < 0 || oh >= out_height || kh >= KH) continue;
      const i64 row = at_voxel(p.n, od, oh, 0, out_depth, out_height, out_width, vectors) + p.vector;
      Vec16 v[BACK_W];
      Positions chosen[BACK_W];
#pragma unroll
      for (int e = 0; e < BACK_W; ++e) {
        const int ow = qw - e;
        v[e] = {{0u, 0u, 0u, 0u}};
#pragma unroll
        for (int i = 0; i < VEC / 4; ++i) chosen[e].w[i] = 0xffffffffu;
        if (ow >= 0 && ow < out_width) {
          v[e] = load(dy + row + (i64)ow * vectors);
          chosen[e] = index[row + (i64)ow * vectors];
        }
      }
#pragma unroll
      for (int e = 0; e < BACK_W; ++e) {
        const int kw = p.w + pad_w - (qw - e) * SW;
        const int mine = kw < KW ? (kd * KH + kh) * KW + kw : 256;
        float g[VEC];
        widen(v[e], g);
#pragma unroll
        for (int c = 0; c < VEC; ++c) sum[c] += position_of(chosen[e], c) == mine ? g[c] : 0.f;
      }
    }
  }
  store(dx + at_voxel(p.n, p.d, p.h, p.w, depth, height, width, vectors) + p.vector, narrow(sum));
}
