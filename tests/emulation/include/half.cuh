// Emulated twin of kernels/include/half.cuh.

inline float widen_f16(unsigned short v) { return emulation::from_f16(v); }
inline float widen_bf16(unsigned short v) { return emulation::from_bf16(v); }
inline unsigned int narrow_f16x2(float low, float high) { return emulation::to_f16(low) | emulation::to_f16(high) << 16; }
inline unsigned int narrow_bf16x2(float low, float high) {
  return emulation::to_bf16(low) | emulation::to_bf16(high) << 16;
}
