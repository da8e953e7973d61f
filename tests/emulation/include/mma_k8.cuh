// Emulated twin of kernels/include/mma_k8.cuh: mma.cuh's product with zeros in the other half.

inline void mma_f16_k8(float (&d)[4], const unsigned int (&a)[2], unsigned int b) {
  const unsigned int whole[4] = {a[0], a[1], 0u, 0u}, other[2] = {b, 0u};
  mma_f16(d, whole, other);
}
inline void mma_bf16_k8(float (&d)[4], const unsigned int (&a)[2], unsigned int b) {
  const unsigned int whole[4] = {a[0], a[1], 0u, 0u}, other[2] = {b, 0u};
  mma_bf16(d, whole, other);
}
