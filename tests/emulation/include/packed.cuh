// Emulated twin of kernels/include/packed.cuh: the same comparisons, lane by lane, as the PTX instructions define them.

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

namespace packed {
constexpr int lanes = STORAGE == 0 ? 1 : 2;

inline float value(unsigned int word, int lane) {
#if STORAGE == 0
  return emulation::bits<float>(word);
#elif STORAGE == 1
  return emulation::from_f16(word >> 16 * lane & 0xffffu);
#else
  return emulation::from_bf16(word >> 16 * lane & 0xffffu);
#endif
}

inline unsigned int lane_bits(int lane) { return lanes == 1 ? 0xffffffffu : 0xffffu << 16 * lane; }
}  // namespace packed

// max.NaN: the canonical NaN where either is NaN; +0 above -0.
inline unsigned int maximum(unsigned int a, unsigned int b) {
  unsigned int d = 0;
  for (int i = 0; i < packed::lanes; ++i) {
    const float x = packed::value(a, i), y = packed::value(b, i);
    const bool first = x > y || (x == y && !std::signbit(x));
    const unsigned int canonical = STORAGE == 0 ? 0x7fffffffu : 0x7fff7fffu;
    d |= (x != x || y != y ? canonical : first ? a : b) & packed::lane_bits(i);
  }
  return d;
}

inline unsigned int greater(unsigned int a, unsigned int b) {
  unsigned int d = 0;
  for (int i = 0; i < packed::lanes; ++i)
    if (packed::value(a, i) > packed::value(b, i)) d |= packed::lane_bits(i);
  return d;
}

inline unsigned int not_a_number(unsigned int a) {
  unsigned int d = 0;
  for (int i = 0; i < packed::lanes; ++i)
    if (packed::value(a, i) != packed::value(a, i)) d |= packed::lane_bits(i);
  return d;
}
