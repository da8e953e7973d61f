// fp32 values as two fp16 parts: value * 2^e = high + low, which hold 22 bits of it; and powers of two.
//
// With |value * 2^e| below 2^15: high is it rounded to 11 bits, low the rest rounded to 11 bits more: |value * 2^e - high - low| is at most
// 2^-22 of it or, where that is less than fp16's finest step, 2^-25. Products high * high, high * low and low * high of two such numbers
// leave out at most 2^-22 of the product. Include half.cuh first.

// 2^e for e in -126 .. 127.
__device__ __forceinline__ float power_of_two(int e) { return __uint_as_float((unsigned int)(e + 127) << 23); }

// f * 2^e for e in -252 .. 254, without a detour over numbers larger than the larger of the two.
__device__ __forceinline__ float scaled(float f, int e) { return f * power_of_two(e / 2) * power_of_two(e - e / 2); }

// The magnitude of a finite value as bits that can be compared, else 0.
__device__ __forceinline__ unsigned int magnitude(float f) {
  const unsigned int bits = __float_as_uint(f) & 0x7fffffffu;
  return bits < 0x7f800000u ? bits : 0u;
}

// The power of two that brings finite values with magnitudes of at most `bits` near to 2^14.
__device__ __forceinline__ int exponent_for(unsigned int bits) {
  const int e = 14 + 127 - (int)(bits >> 23);
  return e > 126 ? 126 : e;
}

// Both parts, the high one in the lower half. What is not finite is its low part alone where LATE, so that products of it and of
// high parts remain infinite, else its high part alone.
template <bool LATE>
__device__ __forceinline__ unsigned int two_parts(float f) {
  unsigned int high = narrow_f16x2(f, 0.f) & 0xffffu;
  float rest = f - widen_f16((unsigned short)high);
  if (f - f != 0.f) {
    rest = LATE ? f : 0.f;
    if (LATE) high = 0u;
  }
  return high | narrow_f16x2(0.f, rest);
}
