// The activations of activation.cuh, with SiLU's sigmoid by sigmoid.cuh and evaluated once.

#include "activation.cuh"
#include "sigmoid.cuh"

__device__ __forceinline__ float activate_approx(float z, float slope) {
#if ACT == 4
  return z * sigmoid(z);
#else
  return activate(z, slope);
#endif
}

__device__ __forceinline__ float slope_approx(float z, float slope) {
#if ACT == 4
  const float s = sigmoid(z);
  return s + z * s * (1.f - s);
#else
  return slope_at(z, slope);
#endif
}
