// The other tensor of an operation whose result is stored in another type than its input, as autocast asks for: bf16 in,
// fp32 out, or fp32 in, bf16 out. A vector is VEC values, as many as 16 bytes of the input hold (vector.cuh), whatever
// their width here. OUT is set by the build like STORAGE: 0 fp32, 1 fp16, 2 bf16. Include vector.cuh first.

#include "wide_store.cuh"

#if OUT == 0
#define OUT_WORDS VEC
#else
#define OUT_WORDS (VEC / 2)
#endif

struct __align__(OUT_WORDS == 2 ? 8 : 16) OutVec { unsigned int w[OUT_WORDS]; };

__device__ __forceinline__ void widen_out(const OutVec& v, float (&f)[VEC]) {
#pragma unroll
  for (int i = 0; i < OUT_WORDS; ++i) {
#if OUT == 0
    f[i] = __uint_as_float(v.w[i]);
#elif OUT == 1
    asm("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, %2; cvt.f32.f16 %0, lo; cvt.f32.f16 %1, hi; }"
        : "=f"(f[2 * i]), "=f"(f[2 * i + 1]) : "r"(v.w[i]));
#else
    f[2 * i] = __uint_as_float(v.w[i] << 16);
    f[2 * i + 1] = __uint_as_float(v.w[i] & 0xffff0000u);
#endif
  }
}

__device__ __forceinline__ OutVec narrow_out(const float (&f)[VEC]) {
  OutVec v;
#pragma unroll
  for (int i = 0; i < OUT_WORDS; ++i) {
#if OUT == 0
    v.w[i] = __float_as_uint(f[i]);
#elif OUT == 1
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v.w[i]) : "f"(f[2 * i + 1]), "f"(f[2 * i]));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v.w[i]) : "f"(f[2 * i + 1]), "f"(f[2 * i]));
#endif
  }
  return v;
}

__device__ __forceinline__ OutVec load_out(const OutVec* p) {
  OutVec v;
#if VEC == 4 && OUT != 0
  asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(v.w[0]), "=r"(v.w[1]) : "l"(p));
#else
#pragma unroll
  for (int i = 0; i < OUT_WORDS; i += 4)
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.w[i]), "=r"(v.w[i + 1]), "=r"(v.w[i + 2]), "=r"(v.w[i + 3]) : "l"(p->w + i));
#endif
  return v;
}

// `paired`: see wide_store.cuh.
__device__ __forceinline__ void store_out(OutVec* p, const float (&f)[VEC], bool paired) {
#if OUT == 0 && VEC == 8
  store_wide((float*)p, f, paired);
#else
  const OutVec v = narrow_out(f);
#if VEC == 4 && OUT != 0
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" :: "l"(p), "r"(v.w[0]), "r"(v.w[1]) : "memory");
#else
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
               :: "l"(p), "r"(v.w[0]), "r"(v.w[1]), "r"(v.w[2]), "r"(v.w[3]) : "memory");
#endif
#endif
}
