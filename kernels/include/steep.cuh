// Activations whose slope is 1 or one other value, 0 or LeakyReLU's: a bit an element tells which. Include gelu.cuh first (ACT).

// Whether it is 1 at z. NaN passes, as in PyTorch.
__device__ __forceinline__ bool steep(float z) { return ACT == 3 ? z > 0.f : lives(z); }

// A gradient behind the activation, from that bit.
__device__ __forceinline__ float through_bit(float g, unsigned int bit, float slope) {
  return bit ? g : (ACT == 3 ? g * slope : 0.f);
}
