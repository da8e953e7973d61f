// VEC values of a tensor that is stored like the others (WIDE 0) or in fp32 beside 16-bit ones (WIDE 1): the residual
// stream of a network under autocast. At vector i of a row-major tensor of such vectors.

#if WIDE
#include "wide_store.cuh"
struct Stream { Vec16 part[VEC / 4]; };
#else
struct Stream { Vec16 part[1]; };
#endif

__device__ __forceinline__ Stream load_stream(const Vec16* p, i64 i) {
  Stream s;
  const int parts = sizeof(s.part) / sizeof(s.part[0]);
#pragma unroll
  for (int k = 0; k < parts; ++k) s.part[k] = load(p + i * parts + k);
  return s;
}

__device__ __forceinline__ void widen_stream(const Stream& s, float (&f)[VEC]) {
#if WIDE
#pragma unroll
  for (int j = 0; j < VEC; ++j) f[j] = __uint_as_float(s.part[j / 4].w[j % 4]);
#else
  widen(s.part[0], f);
#endif
}

// `paired`: see wide_store.cuh.
__device__ __forceinline__ void store_stream(Vec16* p, i64 i, const float (&f)[VEC], bool paired) {
#if WIDE
  store_wide((float*)p + i * VEC, f, paired);
#else
  store(p + i, narrow(f));
#endif
}
