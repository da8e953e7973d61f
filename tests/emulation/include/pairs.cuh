// Emulated twin of kernels/include/pairs.cuh.

template <int words>
struct __align__(4 * words) Words {
  unsigned int w[words];
};

template <int words>
inline void store_if(bool wanted, char* to, const Words<words>& v) {
  if (wanted) *(Words<words>*)to = v;
}

inline unsigned int pack(float low, float high) {
#if STORAGE == 1
  return emulation::to_f16(low) | emulation::to_f16(high) << 16;
#else
  return emulation::to_bf16(low) | emulation::to_bf16(high) << 16;
#endif
}

inline unsigned int add_nothing_of(unsigned int values, unsigned int to) {
#if STORAGE == 1
  const unsigned int exponent = 0x7c00u;
#else
  const unsigned int exponent = 0x7f80u;
#endif
  for (int half = 0; half < 32; half += 16)
    if ((values >> half & exponent) == exponent) to |= 0x7fffu << half;
  return to;
}
