// Emulated twin of kernels/include/approx.cuh: what flushes to zero does, the approximations are exact.

inline float exp2_approx(float v) {
  const float d = exp2f(v);
  return d < 1.17549435e-38f ? 0.f : d;
}

inline float reciprocal_approx(float v) {
  const float d = 1.f / v;
  return fabsf(d) < 1.17549435e-38f ? 0.f : d;
}
