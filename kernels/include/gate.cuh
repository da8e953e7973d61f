// The gate of squeeze-and-excite at the pre-activation z, and gradients through it, in fp32.
// GATE is set by the build: 0 sigmoid, 1 hard sigmoid (relu6(z + 3) / 6).

__device__ __forceinline__ float gate(float z) {
#if GATE == 0
  return 1.f / (1.f + __expf(-z));
#else
  return z != z ? z : fminf(fmaxf(z + 3.f, 0.f), 6.f) * (1.f / 6.f);
#endif
}

// The gradient behind the gate, as `through` of activation.cuh: where the hard sigmoid is flat zero, whatever g.
__device__ __forceinline__ float through_gate(float g, float z) {
#if GATE == 0
  const float s = gate(z);
  return g * (s * (1.f - s));
#else
  return z > -3.f && z < 3.f ? g * (1.f / 6.f) : 0.f;
#endif
}
