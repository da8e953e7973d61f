// 16-byte vectors of fp16, bf16 or fp32 values, widened to fp32 in registers.
//
// No CUDA header is included anywhere in kernels/: conversions are PTX, so NVRTC needs no include path and compiles in
// a fraction of a second. STORAGE is set by the build: 0 fp32, 1 fp16, 2 bf16. All need sm_80 (cvt.rn.bf16x2).

typedef long long i64;

#if STORAGE == 0
#define VEC 4
#else
#define VEC 8
#endif

struct __align__(16) Vec16 { unsigned int w[4]; };

__device__ __forceinline__ void widen(const Vec16& v, float (&f)[VEC]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
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

__device__ __forceinline__ Vec16 narrow(const float (&f)[VEC]) {
  Vec16 v;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
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

// Read once more later (keep in L2), or for the last time (evict first).
__device__ __forceinline__ Vec16 load(const Vec16* p) {
  Vec16 v;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3]) : "l"(p));
  return v;
}
__device__ __forceinline__ Vec16 load_last(const Vec16* p) {
  Vec16 v;
  asm volatile("ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3]) : "l"(p));
  return v;
}
__device__ __forceinline__ void store(Vec16* p, const Vec16& v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
               :: "l"(p), "r"(v.w[0]), "r"(v.w[1]), "r"(v.w[2]), "r"(v.w[3]) : "memory");
}
