// Emulated twin of kernels/include/sigmoid.cuh: what flushes to zero does, the approximations are exact.

inline float sigmoid(float z) {
  const float s = 1.f / (1.f + exp2f(z * -1.4426950408889634f));
  return s < 1.17549435e-38f ? 0.f : s;
}
