// What aten::avg_pool2d divides a window's sum by. DIVISOR: 0 the window's area, padding included (count_include_pad);
// 1 the elements of it that are inside; 2 a constant (divisor_override). A window that ceil_mode lets stick out past the
// padding counts only up to its end. Needs pool_window.cuh.

__device__ __forceinline__ float inverse_divisor(
    int oh, int ow, int height, int width, int pad_h, int pad_w, float constant) {
#if DIVISOR == 2
  return constant;
#else
  const int top = oh * SH - pad_h, left = ow * SW - pad_w;
  const int limit_h = DIVISOR == 0 ? height + pad_h : height, limit_w = DIVISOR == 0 ? width + pad_w : width;
  const int bottom = top + KH < limit_h ? top + KH : limit_h, right = left + KW < limit_w ? left + KW : limit_w;
  const int from_h = DIVISOR == 0 || top > 0 ? top : 0, from_w = DIVISOR == 0 || left > 0 ? left : 0;
  return 1.f / (float)((bottom - from_h) * (right - from_w));
#endif
}
