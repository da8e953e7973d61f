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

__device__ __forceinline__ float through_approx(float g, float z, float slope) {
#if ACT == 4
  const float s = sigmoid(z);
  return g * (s + z * s * (1.f - s));
#else
  return through(g, z, slope);
#endif
}
