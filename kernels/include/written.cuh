// What this thread has written itself, for the last time: a load through the read-only cache need not see it. sm_80.

__device__ __forceinline__ Vec16 load_written(const Vec16* p) {
  Vec16 v;
  asm volatile("ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3]) : "l"(p) : "memory");
  return v;
}
