// The special function unit's two approximations, one instruction each. What flushes to zero does. sm_80.
//
// Source    PTX ISA, ex2 and rcp: right within 2 and 1 units in the last place of fp32.

__device__ __forceinline__ float exp2_approx(float v) {
  float d;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(v));
  return d;
}

__device__ __forceinline__ float reciprocal_approx(float v) {
  float d;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(v));
  return d;
}
