// The taps of OUT_W neighbouring windows, loaded once for all of them. Needs vector.cuh and pool_window.cuh.

#ifndef OUT_W
#define OUT_W 1
#endif
#ifndef AT_ONCE
#define AT_ONCE 16  // 16-byte loads in flight a thread, when the windows have as many taps
#endif

#define COLUMNS ((OUT_W - 1) * SW + (KW - 1) * DW + 1)
#define ROWS_AT_ONCE (KH * COLUMNS <= AT_ONCE ? KH : AT_ONCE / COLUMNS > 0 ? AT_ONCE / COLUMNS : 1)

// Whether window t has a tap on this column of the strip; its kw is then (column - t * SW) / DW.
__device__ __forceinline__ constexpr bool has_tap(int t, int column) {
  return column >= t * SW && (column - t * SW) % DW == 0 && (column - t * SW) / DW < KW;
}

__device__ __forceinline__ constexpr bool used(int column) {
  for (int t = 0; t < OUT_W; ++t)
    if (has_tap(t, column)) return true;
  return false;
}

// v[k][column]: row base + k of the windows' taps whose first tap is (h0, w0); `outside` where that is no pixel. Strips that lie
// whole inside the image, nearly all, need neither tests nor fills: half of the instructions.
__device__ __forceinline__ void load_strip(
    Vec16 (&v)[ROWS_AT_ONCE][COLUMNS], const Vec16* image, int base, int h0, int w0, int vectors, int height, int width,
    const Vec16& outside) {
  if (h0 >= 0 && w0 >= 0 && h0 + (KH - 1) * DH < height && w0 + COLUMNS <= width) {
#pragma unroll
    for (int k = 0; k < ROWS_AT_ONCE; ++k) {
      const Vec16* row = image + ((h0 + (base + k) * DH) * width + w0) * vectors;
#pragma unroll
      for (int column = 0; column < COLUMNS; ++column)
        if (base + k < KH && used(column)) v[k][column] = load(row + column * vectors);
    }
    return;
  }
#pragma unroll
  for (int k = 0; k < ROWS_AT_ONCE; ++k) {
    const int h = h0 + (base + k) * DH;
#pragma unroll
    for (int column = 0; column < COLUMNS; ++column) {
      const int w = w0 + column;
      v[k][column] = outside;
      if (base + k < KH && used(column) && h >= 0 && h < height && w >= 0 && w < width)
        v[k][column] = load(image + (h * width + w) * vectors);
    }
  }
}
