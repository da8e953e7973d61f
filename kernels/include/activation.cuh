// Activations of the pre-activation z, and gradients through them, in fp32.
// ACT is set by the build: 0 none, 1 ReLU, 2 ReLU6, 3 LeakyReLU (slope), 4 SiLU, 5 Hardswish, 6 GELU (erf form).

__device__ __forceinline__ float activate(float z, float slope) {
#if ACT == 0
  return z;
#elif ACT == 1
  return z > 0.f ? z : (z != z ? z : 0.f);  // NaN passes, as in PyTorch
#elif ACT == 2
  return z != z ? z : fminf(fmaxf(z, 0.f), 6.f);
#elif ACT == 3
  return z > 0.f ? z : z * slope;
#elif ACT == 4
  return z / (1.f + __expf(-z));
#elif ACT == 5
  return z * fminf(fmaxf(z + 3.f, 0.f), 6.f) * (1.f / 6.f);
#else
  return 0.5f * z * (1.f + erff(z * 0.70710678118654752f));
#endif
}

// Whether a gradient comes through at z at all: not where ReLU, ReLU6 and Hardswish are flat at 0 or 6. NaN passes, as in PyTorch.
__device__ __forceinline__ bool lives(float z) {
#if ACT == 1
  return !(z <= 0.f);
#elif ACT == 2
  return !(z <= 0.f || z >= 6.f);
#elif ACT == 5
  return !(z <= -3.f);
#else
  return true;
#endif
}

// The gradient behind the activation: g above it times the derivative at z. Where none comes through it is zero whatever g, as in
// PyTorch: a product of 0 and Inf would be NaN.
__device__ __forceinline__ float through(float g, float z, float slope) {
#if ACT == 0
  return g;
#elif ACT == 1
  return lives(z) ? g : 0.f;
#elif ACT == 2
  return fminf(z, 6.f - z) <= 0.f ? 0.f : g;  // `lives` in one comparison: with two, the backward on the whole grid spills
#elif ACT == 3
  return z > 0.f ? g : g * slope;
#elif ACT == 4
  float s = 1.f / (1.f + __expf(-z));
  return g * (s * (1.f + z * (1.f - s)));
#elif ACT == 5
  return lives(z) ? g * (z < 3.f ? z * (1.f / 3.f) + 0.5f : 1.f) : 0.f;
#else
  float cdf = 0.5f * (1.f + erff(z * 0.70710678118654752f));
  return g * (cdf + z * 0.39894228040143268f * __expf(-0.5f * z * z));
#endif
}
