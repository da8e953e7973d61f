// Emulated twin of kernels/include/vector.cuh.

typedef long long i64;

#if STORAGE == 0
#define VEC 4
#else
#define VEC 8
#endif

struct __align__(16) Vec16 { unsigned int w[4]; };

inline void widen(const Vec16& v, float (&f)[VEC]) {
  for (int i = 0; i < VEC; ++i) {
#if STORAGE == 0
    f[i] = emulation::bits<float>(v.w[i]);
#elif STORAGE == 1
    f[i] = emulation::from_f16(v.w[i / 2] >> 16 * (i % 2) & 0xffffu);
#else
    f[i] = emulation::from_bf16(v.w[i / 2] >> 16 * (i % 2) & 0xffffu);
#endif
  }
}

inline Vec16 narrow(const float (&f)[VEC]) {
  Vec16 v = {};
  for (int i = 0; i < VEC; ++i) {
#if STORAGE == 0
    v.w[i] = emulation::bits<unsigned>(f[i]);
#elif STORAGE == 1
    v.w[i / 2] |= emulation::to_f16(f[i]) << 16 * (i % 2);
#else
    v.w[i / 2] |= emulation::to_bf16(f[i]) << 16 * (i % 2);
#endif
  }
  return v;
}

inline Vec16 load(const Vec16* p) { return *p; }
inline Vec16 load_last(const Vec16* p) { return *p; }
inline void store(Vec16* p, const Vec16& v) { *p = v; }
