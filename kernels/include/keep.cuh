// For a launch that keeps some of a tensor on chip and reads the rest twice: what each access leaves in L2. sm_80.

// A copy to shared memory of 16 bytes that are kept: the first to leave L2, where the rest is to be found again.
__device__ __forceinline__ void keep(void* to, const void* from) {
  asm volatile("{ .reg .b64 policy; createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
               "  cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, policy; }"
               :: "r"((unsigned int)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}

// What this thread has written itself, for the last time: a load through the read-only cache need not see it.
__device__ __forceinline__ Vec16 load_written(const Vec16* p) {
  Vec16 v;
  asm volatile("ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3]) : "l"(p) : "memory");
  return v;
}
