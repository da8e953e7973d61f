// Emulated twin of kernels/include/channels.cuh.

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

inline Chunk load(const char* base, int count, int bytes) { return *(const Chunk*)(base + (i64)count * bytes); }
inline void store(char* base, int count, int bytes, const Chunk& v) { *(Chunk*)(base + (i64)count * bytes) = v; }

inline Chunk zero_chunk() {
  Chunk v;
  for (int i = 0; i < WORDS; ++i) v.w[i] = 0u;
  return v;
}

inline void widen(const Chunk& v, float (&f)[CH]) {
  for (int i = 0; i < CH; ++i) {
#if STORAGE == 0
    f[i] = emulation::bits<float>(v.w[i]);
#elif STORAGE == 1
    f[i] = emulation::from_f16(v.w[i / 2] >> 16 * (i % 2) & 0xffffu);
#else
    f[i] = emulation::from_bf16(v.w[i / 2] >> 16 * (i % 2) & 0xffffu);
#endif
  }
}

inline Chunk narrow(const float (&f)[CH]) {
  Chunk v = zero_chunk();
  for (int i = 0; i < CH; ++i) {
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

inline float widen_weight(Weight v) {
#if WEIGHT_STORAGE == 0
  return v;
#elif WEIGHT_STORAGE == 1
  return emulation::from_f16(v);
#else
  return emulation::from_bf16(v);
#endif
}

inline Weight narrow_weight(float f) {
#if WEIGHT_STORAGE == 0
  return f;
#elif WEIGHT_STORAGE == 1
  return (Weight)emulation::to_f16(f);
#else
  return (Weight)emulation::to_bf16(f);
#endif
}
