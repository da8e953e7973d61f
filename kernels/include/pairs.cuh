// Pairs of 16-bit values in a register, and stores of 4 to 16 bytes under a predicate. STORAGE is set by the build: 1 fp16,
// 2 bf16. All need sm_80.

// Of 4, 8 or 16 bytes, to global memory, where `wanted`: a predicated store, where a branch would cost more.
template <int words>
struct __align__(4 * words) Words {
  unsigned int w[words];
};

__device__ __forceinline__ void store_if(bool wanted, char* to, const Words<1>& v) {
  asm volatile("{ .reg .pred p; setp.ne.s32 p, %0, 0; @p st.global.u32 [%1], %2; }"
               :: "r"((int)wanted), "l"(to), "r"(v.w[0]) : "memory");
}
__device__ __forceinline__ void store_if(bool wanted, char* to, const Words<2>& v) {
  asm volatile("{ .reg .pred p; setp.ne.s32 p, %0, 0; @p st.global.v2.u32 [%1], {%2, %3}; }"
               :: "r"((int)wanted), "l"(to), "r"(v.w[0]), "r"(v.w[1]) : "memory");
}
__device__ __forceinline__ void store_if(bool wanted, char* to, const Words<4>& v) {
  asm volatile("{ .reg .pred p; setp.ne.s32 p, %0, 0; @p st.global.v4.u32 [%1], {%2, %3, %4, %5}; }"
               :: "r"((int)wanted), "l"(to), "r"(v.w[0]), "r"(v.w[1]), "r"(v.w[2]), "r"(v.w[3]) : "memory");
}

// Two values in one register, rounded.
__device__ __forceinline__ unsigned int pack(float low, float high) {
  unsigned int d;
#if STORAGE == 1
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
#else
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
#endif
  return d;
}

// Two values times zero, and what is added: as it was, but NaN from the first value that is not finite on.
__device__ __forceinline__ unsigned int add_nothing_of(unsigned int values, unsigned int to) {
  unsigned int d;
#if STORAGE == 1
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(values), "r"(0u), "r"(to));
#else
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(values), "r"(0u), "r"(to));
#endif
  return d;
}
