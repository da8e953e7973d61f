// Single fp16 and bf16 values, and pairs of them in a 32-bit register as the tensor cores take them (the first in the low
// half). Rounded to nearest even. All need sm_80 (cvt.rn.bf16x2).

__device__ __forceinline__ float widen_f16(unsigned short v) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v));
  return f;
}

__device__ __forceinline__ float widen_bf16(unsigned short v) { return __uint_as_float((unsigned int)v << 16); }

__device__ __forceinline__ unsigned int narrow_f16x2(float low, float high) {
  unsigned int pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ unsigned int narrow_bf16x2(float low, float high) {
  unsigned int pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
