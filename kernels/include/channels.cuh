// CH neighbouring channels of one pixel as one load of 4 to 16 bytes, and single weights, widened to fp32 in registers.
//
// STORAGE (activations) and WEIGHT_STORAGE (parameters) are set by the build: 0 fp32, 1 fp16, 2 bf16. CH is 2 or 4. All
// need sm_80 (cvt.rn.bf16x2).

typedef long long i64;

#if STORAGE == 0
#define WORDS CH
#else
#define WORDS (CH / 2)
#endif

struct __align__(4 * WORDS) Chunk {
  unsigned int w[WORDS];
};

#if WEIGHT_STORAGE == 0
typedef float Weight;
#else
typedef unsigned short Weight;
#endif

// The chunk at base + count * bytes, in global memory; read-only for the whole launch when loaded. The address is one
// instruction: left to itself the compiler keeps 64-bit multiples of `bytes` and adds them in two.
__device__ __forceinline__ Chunk load(const char* base, int count, int bytes) {
  Chunk v;
#if WORDS == 1
  asm volatile("{ .reg .b64 p; mad.wide.s32 p, %1, %2, %3; ld.global.nc.u32 %0, [p]; }"
               : "=r"(v.w[0]) : "r"(count), "r"(bytes), "l"(base));
#elif WORDS == 2
  asm volatile("{ .reg .b64 p; mad.wide.s32 p, %2, %3, %4; ld.global.nc.v2.u32 {%0, %1}, [p]; }"
               : "=r"(v.w[0]), "=r"(v.w[1]) : "r"(count), "r"(bytes), "l"(base));
#else
  asm volatile("{ .reg .b64 p; mad.wide.s32 p, %4, %5, %6; ld.global.nc.v4.u32 {%0, %1, %2, %3}, [p]; }"
               : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3]) : "r"(count), "r"(bytes), "l"(base));
#endif
  return v;
}

__device__ __forceinline__ void store(char* base, int count, int bytes, const Chunk& v) {
#if WORDS == 1
  asm volatile("{ .reg .b64 p; mad.wide.s32 p, %0, %1, %2; st.global.u32 [p], %3; }"
               :: "r"(count), "r"(bytes), "l"(base), "r"(v.w[0]));
#elif WORDS == 2
  asm volatile("{ .reg .b64 p; mad.wide.s32 p, %0, %1, %2; st.global.v2.u32 [p], {%3, %4}; }"
               :: "r"(count), "r"(bytes), "l"(base), "r"(v.w[0]), "r"(v.w[1]));
#else
  asm volatile("{ .reg .b64 p; mad.wide.s32 p, %0, %1, %2; st.global.v4.u32 [p], {%3, %4, %5, %6}; }"
               :: "r"(count), "r"(bytes), "l"(base), "r"(v.w[0]), "r"(v.w[1]), "r"(v.w[2]), "r"(v.w[3]));
#endif
}

__device__ __forceinline__ Chunk zero_chunk() {
  Chunk v;
#pragma unroll
  for (int i = 0; i < WORDS; ++i) v.w[i] = 0u;
  return v;
}

__device__ __forceinline__ void widen(const Chunk& v, float (&f)[CH]) {
#pragma unroll
  for (int i = 0; i < WORDS; ++i) {
#if STORAGE == 0
    f[i] = __uint_as_float(v.w[i]);
#elif STORAGE == 1
    asm("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, %2; cvt.f32.f16 %0, lo; cvt.f32.f16 %1, hi; }"
        : "=f"(f[2 * i]), "=f"(f[2 * i + 1]) : "r"(v.w[i]));
#else
    f[2 * i] = __uint_as_float(v.w[i] << 16);
    f[2 * i + 1] = __uint_as_float(v.w[i] & 0xffff0000u);
#endif
  }
}

__device__ __forceinline__ Chunk narrow(const float (&f)[CH]) {
  Chunk v;
#pragma unroll
  for (int i = 0; i < WORDS; ++i) {
#if STORAGE == 0
    v.w[i] = __float_as_uint(f[i]);
#elif STORAGE == 1
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v.w[i]) : "f"(f[2 * i + 1]), "f"(f[2 * i]));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v.w[i]) : "f"(f[2 * i + 1]), "f"(f[2 * i]));
#endif
  }
  return v;
}

__device__ __forceinline__ float widen_weight(Weight v) {
#if WEIGHT_STORAGE == 0
  return v;
#elif WEIGHT_STORAGE == 1
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v));
  return f;
#else
  return __uint_as_float((unsigned int)v << 16);
#endif
}

__device__ __forceinline__ Weight narrow_weight(float f) {
#if WEIGHT_STORAGE == 0
  return f;
#elif WEIGHT_STORAGE == 1
  Weight v;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(v) : "f"(f));
  return v;
#else
  Weight v;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(v) : "f"(f));
  return v;
#endif
}
