// Emulated twin of kernels/include/mixed.cuh.

#include "wide_store.cuh"

#if OUT == 0
#define OUT_WORDS VEC
#else
#define OUT_WORDS (VEC / 2)
#endif

struct __align__(OUT_WORDS == 2 ? 8 : 16) OutVec { unsigned int w[OUT_WORDS]; };

inline void widen_out(const OutVec& v, float (&f)[VEC]) {
  for (int i = 0; i < VEC; ++i) {
#if OUT == 0
    f[i] = emulation::bits<float>(v.w[i]);
#elif OUT == 1
    f[i] = emulation::from_f16(v.w[i / 2] >> 16 * (i % 2) & 0xffffu);
#else
    f[i] = emulation::from_bf16(v.w[i / 2] >> 16 * (i % 2) & 0xffffu);
#endif
  }
}

inline OutVec narrow_out(const float (&f)[VEC]) {
  OutVec v = {};
  for (int i = 0; i < VEC; ++i) {
#if OUT == 0
    v.w[i] = emulation::bits<unsigned>(f[i]);
#elif OUT == 1
    v.w[i / 2] |= emulation::to_f16(f[i]) << 16 * (i % 2);
#else
    v.w[i / 2] |= emulation::to_bf16(f[i]) << 16 * (i % 2);
#endif
  }
  return v;
}

inline OutVec load_out(const OutVec* p) { return *p; }
inline void store_out(OutVec* p, const float (&f)[VEC], bool paired) {
#if OUT == 0 && VEC == 8
  store_wide((float*)p, f, paired);
#else
  *p = narrow_out(f);
#endif
}
