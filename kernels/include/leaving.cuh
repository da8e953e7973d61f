// Stores what this launch reads no more, so that it leaves L2 before what it does read again (evict first). sm_80.

__device__ __forceinline__ void store_leaving(Vec16* p, const Vec16& v) {
  asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};"
               :: "l"(p), "r"(v.w[0]), "r"(v.w[1]), "r"(v.w[2]), "r"(v.w[3]) : "memory");
}
