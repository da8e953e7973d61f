// The activations of activation_approx.cuh with ACT 7, GELU's tanh form, and with GELU's erf form (ACT 6) at the speed of DRAM
// where values are stored in 16 bits: 12 instructions, 2 of them the special function unit's, where erff takes about 30, more
// than there is time for at 4.2 TB/s (32 an element that is read and written in 16 bits).
//
// Phi(-a) = 0.5 erfc(a / sqrt 2) = exp(-a^2 / 2) t P(t), t = 1 / (1 + 0.35 a), P of degree 4: the form of Abramowitz and Stegun
// 7.1.26, with coefficients fitted anew to the smallest largest relative error, weighted: 5.5e-6 up to a = 2, 2.2e-5 at 4, 1.1e-4
// at 6, 2.2e-3 at 14, where Phi leaves fp32's range. Rounding to fp16 and bf16 is 2.4e-4 and 2e-3, and below -5.5 fp16 rounds
// the product to zero; 0.5 (1 + erf) in fp32, PyTorch's, is off by more than that below -4.
//
// Include vector.cuh first (STORAGE).

#include "activation_approx.cuh"
#include "approx.cuh"

// Phi(z) and exp(-z^2 / 2), of which its derivative is 1 / sqrt(2 pi). NaN passes; infinities give 0 and 1.
__device__ __forceinline__ float normal_cdf(float z, float& e) {
  e = exp2_approx(z * -0.72134752044448170f * z);
  const float t = reciprocal_approx(0.35f * fabsf(z) + 1.f);
  const float p =
      (((-0.09858998810653428f * t + 0.2786137557307364f) * t + 0.015025533977371868f) * t + 0.16826405124907018f) * t +
      0.13668910330087852f;
  const float tail = p * t * e;
  return z > 0.f ? 1.f - tail : tail;
}

// GELU's tanh form is z sigmoid(2 u) with u = sqrt(2 / pi) (z + 0.044715 z^3).
#define TANH_LINEAR 1.5957691216057308f
#define TANH_CUBIC 0.071354816272600248f

__device__ __forceinline__ float activate_streaming(float z, float slope) {
#if ACT == 6 && STORAGE != 0
  float e;
  return z * normal_cdf(z, e);
#elif ACT == 7
  return z * sigmoid(z * (TANH_CUBIC * (z * z) + TANH_LINEAR));
#else
  return activate_approx(z, slope);
#endif
}

__device__ __forceinline__ float through_streaming(float g, float z, float slope) {
#if ACT == 6 && STORAGE != 0
  float e;
  const float cdf = normal_cdf(z, e);
  return g * (z * 0.39894228040143268f * e + cdf);
#elif ACT == 7
  const float square = z * z;
  const float s = sigmoid(z * (TANH_CUBIC * square + TANH_LINEAR));
  return g * (s + z * s * (1.f - s) * (3.f * TANH_CUBIC * square + TANH_LINEAR));
#else
  return through_approx(g, z, slope);
#endif
}
