// The logistic function from the two approximations of the special function unit: five instructions where a division rounded
// to nearest alone takes about ten and a branch, more than a kernel at the speed of DRAM has left.
//
// ex2.approx and rcp.approx are right within 2 and 1 units in the last place of fp32, the rounded product before them within
// |z| / 2 of those units: far below what 16-bit storage rounds away, and for fp32 what __expf(-z) already had. Below z = -87 the
// result is zero. NaN passes. sm_80.
//
// Source    PTX ISA, ex2 and rcp.

__device__ __forceinline__ float sigmoid(float z) {
  float e, s;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(z * -1.4426950408889634f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s) : "f"(1.f + e));
  return s;
}
