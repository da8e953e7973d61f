// The largest value of a pooling window and its position in it, per channel, as aten::max_pool2d finds them: of equal values
// the first counts, of several NaNs the last. Needs vector.cuh and packed.cuh.

// Positions of VEC channels, one byte each: kh * KW + kw.
struct __align__(VEC) Positions { unsigned int w[VEC / 4]; };

struct Extremum {
  Vec16 value;
  unsigned int lane[4];  // positions, in the lanes of `value`
};

__device__ __forceinline__ void begin(Extremum& e, int first) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    e.value.w[i] = LOWEST;
    e.lane[i] = LANES(first);
  }
}

__device__ __forceinline__ unsigned int choose(unsigned int mask, unsigned int a, unsigned int b) {
  return (a & mask) | (b & ~mask);
}

__device__ __forceinline__ void take(Extremum& e, const Vec16& v, int position) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    e.lane[i] = choose(greater(v.w[i], e.value.w[i]), LANES(position), e.lane[i]);
    e.value.w[i] = maximum(e.value.w[i], v.w[i]);
  }
}

// After `take` of a whole window the value is NaN where one was in it, but the position is not its.
__device__ __forceinline__ bool has_nan(const Vec16& v) {
  return (not_a_number(v.w[0]) | not_a_number(v.w[1]) | not_a_number(v.w[2]) | not_a_number(v.w[3])) != 0u;
}

__device__ __forceinline__ void take_nan(Extremum& e, const Vec16& v, int position) {
#pragma unroll
  for (int i = 0; i < 4; ++i) e.lane[i] = choose(not_a_number(v.w[i]), LANES(position), e.lane[i]);
}

__device__ __forceinline__ Positions positions(const Extremum& e) {
  Positions p;
#if STORAGE == 0
  p.w[0] = e.lane[0] | e.lane[1] << 8 | e.lane[2] << 16 | e.lane[3] << 24;
#else
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const unsigned int a = e.lane[2 * i], b = e.lane[2 * i + 1];
    p.w[i] = (a & 0xffu) | (a >> 8 & 0xff00u) | (b & 0xffu) << 16 | (b << 8 & 0xff000000u);
  }
#endif
  return p;
}

__device__ __forceinline__ int position_of(const Positions& p, int j) { return p.w[j / 4] >> 8 * (j % 4) & 0xffu; }
