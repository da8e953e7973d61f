// What the elements of one group receive from the max-pooling windows around it. Needs extremum.cuh and pool_window.cuh.

#ifndef GROUP_W
#define GROUP_W 1  // groups side by side that a thread takes: windows between them are read once
#endif
// Phase rows of a group at a time: all where their accumulators fit, else one.
#define PHASE_ROWS (SH * SW * GROUP_W <= 4 ? SH : 1)

// sum[i][j][c]: of element (qh * SH + r + i - pad_h, qw * SW + j - pad_w). dy and index: at window (0, 0) of this thread's
// image and channel vector.
__device__ __forceinline__ void gather_max(
    float (&sum)[PHASE_ROWS][GROUP_W * SW][VEC], const Vec16* dy, const Positions* index, int r, int qh, int qw,
    int vectors, int out_height, int out_width) {
#pragma unroll
  for (int i = 0; i < PHASE_ROWS; ++i)
#pragma unroll
    for (int j = 0; j < GROUP_W * SW; ++j)
#pragma unroll
      for (int c = 0; c < VEC; ++c) sum[i][j][c] = 0.f;
#pragma unroll
  for (int a = 0; a < BACK_H; ++a) {
    const int oh = qh - a;
    bool covers = false;
#pragma unroll
    for (int i = 0; i < PHASE_ROWS; ++i) covers |= tap(r + i, a, SH, DH, KH) >= 0;
    if (!covers || oh < 0 || oh >= out_height) continue;
    Vec16 v[BACK_W + GROUP_W - 1];
    Positions chosen[BACK_W + GROUP_W - 1];
#pragma unroll
    for (int b = 0; b < BACK_W + GROUP_W - 1; ++b) {
      const int ow = qw + GROUP_W - 1 - b;
      v[b] = {{0u, 0u, 0u, 0u}};
#pragma unroll
      for (int i = 0; i < VEC / 4; ++i) chosen[b].w[i] = 0xffffffffu;
      if (ow >= 0 && ow < out_width) {
        v[b] = load(dy + (oh * out_width + ow) * vectors);
        chosen[b] = index[(oh * out_width + ow) * vectors];
      }
    }
#pragma unroll
    for (int b = 0; b < BACK_W + GROUP_W - 1; ++b) {
      float g[VEC];
      widen(v[b], g);
#pragma unroll
      for (int c = 0; c < VEC; ++c) {
        const int position = position_of(chosen[b], c);
#pragma unroll
        for (int i = 0; i < PHASE_ROWS; ++i)
#pragma unroll
          for (int group = 0; group < GROUP_W; ++group)
#pragma unroll
            for (int s = 0; s < SW; ++s) {
              const int back = b - (GROUP_W - 1 - group);  // this window is ow = q - back for that group
              const int kh = tap(r + i, a, SH, DH, KH);
              const int kw = back >= 0 && back < BACK_W ? tap(s, back, SW, DW, KW) : -1;
              if (kh >= 0 && kw >= 0 && position == kh * KW + kw) sum[i][group * SW + s][c] += g[c];
            }
      }
    }
  }
}
