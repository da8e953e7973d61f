// Comparisons on the words of a 16-byte vector as they are stored: one fp32 value a word, or two fp16 or bf16 values.
//
// One instruction serves two values, and nothing is widened: a max-pool over 3 x 3 windows would otherwise be bound by the
// integer pipe, at the speed of DRAM. Needs vector.cuh (STORAGE).

// Masks have all bits of a lane set, or none. LOWEST: minus infinity in each lane; SIGNS: the sign bits; LANES: an integer below
// 65536 in each lane.
#if STORAGE == 0
#define LOWEST 0xff800000u
#define SIGNS 0x80000000u
#define LANES(value) ((unsigned int)(value))
#else
#define LOWEST (STORAGE == 1 ? 0xfc00fc00u : 0xff80ff80u)
#define SIGNS 0x80008000u
#define LANES(value) ((unsigned int)(value) * 0x00010001u)
#endif

// The larger of two; NaN where either is.
__device__ __forceinline__ unsigned int maximum(unsigned int a, unsigned int b) {
  unsigned int d;
#if STORAGE == 0
  asm("max.NaN.f32 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
#elif STORAGE == 1
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
#else
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
#endif
  return d;
}

// Mask of the lanes where a > b; false where either is NaN.
__device__ __forceinline__ unsigned int greater(unsigned int a, unsigned int b) {
#if STORAGE == 0
  return __uint_as_float(a) > __uint_as_float(b) ? 0xffffffffu : 0u;
#elif STORAGE == 1
  unsigned int d;
  asm("set.gt.u32.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
#elif __CUDA_ARCH__ >= 900
  unsigned int d;
  asm("set.gt.u32.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
#else
  const bool low = __uint_as_float(a << 16) > __uint_as_float(b << 16);
  const bool high = __uint_as_float(a & 0xffff0000u) > __uint_as_float(b & 0xffff0000u);
  return (low ? 0xffffu : 0u) | (high ? 0xffff0000u : 0u);
#endif
}

// Mask of the lanes that are NaN.
__device__ __forceinline__ unsigned int not_a_number(unsigned int a) {
#if STORAGE == 0
  return (a & 0x7fffffffu) > 0x7f800000u ? 0xffffffffu : 0u;
#else
  const unsigned int infinity = LOWEST & 0x7fffu;
  return ((a & 0x7fffu) > infinity ? 0xffffu : 0u) | ((a >> 16 & 0x7fffu) > infinity ? 0xffff0000u : 0u);
#endif
}
