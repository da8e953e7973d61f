// CUDA's built-ins for one emulated thread, as plain C++. Included before every emulated kernel.
#pragma once

#include <cstddef>
#undef _GLIBCXX_USE_STD_SPEC_FUNCS  // of libstdc++: two thirds of what <cmath> reads, a third of what a small kernel takes to compile
#include <cmath>
#include <cstdio>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "runtime.h"

// ---- qualifiers. A shared variable is one object for all threads: one block runs at a time, and those of a cluster
// that run by turns have its section swapped. It is filled with NaN bits at the start of each block.
#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __shared__ static __attribute__((section("emulated_shared")))
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __grid_constant__
#define __cluster_dims__(...)
#define __grid_constant__
#define __CUDA_ARCH__ 900

extern "C" __attribute__((weak, visibility("hidden"))) char __start_emulated_shared[], __stop_emulated_shared[];

// ---- vector types
#define EMULATED_VECTORS(T, name, align2, align4)                              \
  struct name##1 { T x; };                                                     \
  struct __align__(align2) name##2 { T x, y; };                                \
  struct name##3 { T x, y, z; };                                               \
  struct __align__(align4) name##4 { T x, y, z, w; };                          \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; }                   \
  inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }           \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
#define uint3 emulated_uint3  // the runtime has its own
EMULATED_VECTORS(signed char, char, 2, 4)
EMULATED_VECTORS(unsigned char, uchar, 2, 4)
EMULATED_VECTORS(short, short, 4, 8)
EMULATED_VECTORS(unsigned short, ushort, 4, 8)
EMULATED_VECTORS(int, int, 8, 16)
EMULATED_VECTORS(unsigned int, uint, 8, 16)
EMULATED_VECTORS(long long, longlong, 16, 16)
EMULATED_VECTORS(unsigned long long, ulonglong, 16, 16)
EMULATED_VECTORS(float, float, 8, 16)
EMULATED_VECTORS(double, double, 16, 16)
#undef uint3

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};

#define threadIdx (emulation::current->index)
#define blockIdx emulation::block_index
#define blockDim emulation::block_size
#define gridDim emulation::grid_size
constexpr int warpSize = 32;

// ---- barriers and fences
#define __syncthreads() ((void)emulation::barrier(__LINE__))
#define __syncthreads_count(p) emulation::barrier(__LINE__, p)
#define __syncthreads_or(p) (emulation::barrier(__LINE__, p) > 0)
#define __syncthreads_and(p) (emulation::barrier(__LINE__, !(p)) == 0)
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
inline void __nanosleep(unsigned) { emulation::spin(), emulation::pause(); }
inline void __trap() { emulation::fail("__trap()"); }

inline void __syncwarp(unsigned mask = 0xffffffffu) {
  emulation::collective([](void* const*, unsigned present) { emulation::ordered(present); }, mask, nullptr);
}
inline unsigned __activemask() { return emulation::live_lanes(); }

// ---- warp operations
namespace emulation {

template <class T>
T unknown() {  // what a read of an absent lane gives: NaN bits
  T value;
  memset(&value, 0xFF, sizeof value);
  return value;
}

template <class T>
struct Shuffle {
  T value;
  int from;  // lane
};

template <class T>
T shuffle(unsigned mask, T value, int from) {
  Shuffle<T> mine{value, from};
  collective(
      [](void* const* all, unsigned present) {
        T values[32];
        for (int i = 0; i < 32; ++i)
          if (present >> i & 1u) values[i] = static_cast<Shuffle<T>*>(all[i])->value;
        for (int i = 0; i < 32; ++i) {
          if (!(present >> i & 1u)) continue;
          auto& lane = *static_cast<Shuffle<T>*>(all[i]);
          lane.value = present >> lane.from & 1u ? values[lane.from] : unknown<T>();
        }
      },
      mask, &mine);
  return mine.value;
}

template <class T, class Op>
T reduce(unsigned mask, T value) {
  collective(
      [](void* const* all, unsigned present) {
        T total{};
        bool first = true;
        for (int i = 0; i < 32; ++i) {
          if (!(present >> i & 1u)) continue;
          const T v = *static_cast<T*>(all[i]);
          total = first ? v : Op()(total, v);
          first = false;
        }
        for (int i = 0; i < 32; ++i)
          if (present >> i & 1u) *static_cast<T*>(all[i]) = total;
      },
      mask, &value);
  return value;
}

struct Add { template <class T> T operator()(T a, T b) const { return a + b; } };
struct Min { template <class T> T operator()(T a, T b) const { return b < a ? b : a; } };
struct Max { template <class T> T operator()(T a, T b) const { return a < b ? b : a; } };
struct And { template <class T> T operator()(T a, T b) const { return a & b; } };
struct Or { template <class T> T operator()(T a, T b) const { return a | b; } };
struct Xor { template <class T> T operator()(T a, T b) const { return a ^ b; } };

}  // namespace emulation

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  const int lane = emulation::current->lane;
  return emulation::shuffle(mask, value, lane / width * width + (source & (width - 1)));
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int lane = emulation::current->lane, from = lane - (int)delta;
  return emulation::shuffle(mask, value, from < lane / width * width ? lane : from);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int lane = emulation::current->lane, from = lane + (int)delta;
  return emulation::shuffle(mask, value, from >= lane / width * width + width ? lane : from);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
  const int lane = emulation::current->lane, from = lane ^ lanes;
  return emulation::shuffle(mask, value, from >= lane / width * width + width ? lane : from);
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned v) { return emulation::reduce<unsigned, emulation::Add>(mask, v); }
inline int __reduce_add_sync(unsigned mask, int v) { return emulation::reduce<int, emulation::Add>(mask, v); }
inline unsigned __reduce_min_sync(unsigned mask, unsigned v) { return emulation::reduce<unsigned, emulation::Min>(mask, v); }
inline int __reduce_min_sync(unsigned mask, int v) { return emulation::reduce<int, emulation::Min>(mask, v); }
inline unsigned __reduce_max_sync(unsigned mask, unsigned v) { return emulation::reduce<unsigned, emulation::Max>(mask, v); }
inline int __reduce_max_sync(unsigned mask, int v) { return emulation::reduce<int, emulation::Max>(mask, v); }
inline unsigned __reduce_and_sync(unsigned mask, unsigned v) { return emulation::reduce<unsigned, emulation::And>(mask, v); }
inline unsigned __reduce_or_sync(unsigned mask, unsigned v) { return emulation::reduce<unsigned, emulation::Or>(mask, v); }
inline unsigned __reduce_xor_sync(unsigned mask, unsigned v) { return emulation::reduce<unsigned, emulation::Xor>(mask, v); }
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return __reduce_or_sync(mask, predicate ? 1u << emulation::current->lane : 0u);
}
inline int __any_sync(unsigned mask, int predicate) { return __reduce_or_sync(mask, predicate ? 1u : 0u) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __reduce_or_sync(mask, predicate ? 0u : 1u) == 0; }
template <class T>
unsigned __match_any_sync(unsigned mask, T value) {
  unsigned same = 0;
  for (int i = 0; i < 32; ++i) {
    const T other = emulation::shuffle(mask, value, i);
    if ((mask >> i & 1u) && memcmp(&other, &value, sizeof value) == 0) same |= 1u << i;
  }
  return same;
}

// ---- atomics: a thread is only ever interrupted where it waits
#define EMULATED_UNREPORTED __attribute__((no_sanitize("thread")))
#define EMULATED_ATOMIC(name, expression)                                                            \
  template <class T>                                                                                 \
  EMULATED_UNREPORTED T name(T* at, std::common_type_t<T> value) {                                   \
    emulation::accessed(at, sizeof(T), emulation::Doing::atomic);                                    \
    const T old = *at;                                                                               \
    *at = (expression);                                                                              \
    emulation::spin();                                                                               \
    return old;                                                                                      \
  }                                                                                                  \
  template <class T>                                                                                 \
  T name##_block(T* at, std::common_type_t<T> value) { return name(at, value); }
EMULATED_ATOMIC(atomicAdd, T(old + value))
EMULATED_ATOMIC(atomicSub, T(old - value))
EMULATED_ATOMIC(atomicExch, value)
EMULATED_ATOMIC(atomicMin, value < old ? value : old)
EMULATED_ATOMIC(atomicMax, old < value ? value : old)
EMULATED_ATOMIC(atomicAnd, T(old & value))
EMULATED_ATOMIC(atomicOr, T(old | value))
EMULATED_ATOMIC(atomicXor, T(old ^ value))
EMULATED_ATOMIC(atomicInc, old >= value ? T(0) : T(old + 1))
EMULATED_ATOMIC(atomicDec, old == 0 || old > value ? value : T(old - 1))
template <class T>
EMULATED_UNREPORTED T atomicCAS(T* at, std::common_type_t<T> compare, std::common_type_t<T> value) {
  emulation::accessed(at, sizeof(T), emulation::Doing::atomic);
  const T old = *at;
  if (old == compare) *at = value;
  emulation::spin();
  return old;
}

// ---- loads and stores with a cache hint
template <class T> T __ldg(const T* p) { return *p; }
template <class T> T __ldca(const T* p) { return *p; }
template <class T> T __ldcg(const T* p) { return *p; }
template <class T> T __ldcs(const T* p) { return *p; }
template <class T> T __ldlu(const T* p) { return *p; }
template <class T> T __ldcv(const T* p) { return *p; }
template <class T> void __stwb(T* p, T v) { *p = v; }
template <class T> void __stcg(T* p, T v) { *p = v; }
template <class T> void __stcs(T* p, T v) { *p = v; }
template <class T> void __stwt(T* p, T v) { *p = v; }
inline size_t __cvta_generic_to_shared(const void* p) { return reinterpret_cast<size_t>(p); }

// ---- bits
namespace emulation {
template <class To, class From>
To bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "of one size");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
}  // namespace emulation
inline int __float_as_int(float v) { return emulation::bits<int>(v); }
inline unsigned __float_as_uint(float v) { return emulation::bits<unsigned>(v); }
inline float __int_as_float(int v) { return emulation::bits<float>(v); }
inline float __uint_as_float(unsigned v) { return emulation::bits<float>(v); }
inline long long __double_as_longlong(double v) { return emulation::bits<long long>(v); }
inline double __longlong_as_double(long long v) { return emulation::bits<double>(v); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
inline int __clz(int v) { return v ? __builtin_clz(v) : 32; }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline unsigned __brev(unsigned v) {
  unsigned r = 0;
  for (int i = 0; i < 32; ++i) r |= (v >> i & 1u) << (31 - i);
  return r;
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned s) {
  const uint64_t both = uint64_t(b) << 32 | a;
  unsigned r = 0;
  for (int i = 0; i < 4; ++i) {
    unsigned byte = both >> (s >> 4 * i & 7) * 8 & 0xff;
    if (s >> 4 * i & 8) byte = byte & 0x80 ? 0xff : 0;
    r |= byte << 8 * i;
  }
  return r;
}
inline unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned n) { return n & 31 ? hi << (n & 31) | lo >> (32 - (n & 31)) : hi; }
inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned n) { return n & 31 ? lo >> (n & 31) | hi << (32 - (n & 31)) : lo; }
inline unsigned __umulhi(unsigned a, unsigned b) { return uint64_t(a) * b >> 32; }
inline int __mulhi(int a, int b) { return int64_t(a) * b >> 32; }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) { return (unsigned __int128)a * b >> 64; }

// ---- arithmetic. The approximations of the GPU's fast functions are not emulated: these are the exact ones.
template <class A, class B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) return std::fmin(T(a), T(b));
  else return T(b) < T(a) ? T(b) : T(a);
}
template <class A, class B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) return std::fmax(T(a), T(b));
  else return T(a) < T(b) ? T(b) : T(a);
}
inline float __expf(float v) { return expf(v); }
inline float __exp10f(float v) { return powf(10.f, v); }
inline float __logf(float v) { return logf(v); }
inline float __log2f(float v) { return log2f(v); }
inline float __powf(float a, float b) { return powf(a, b); }
inline float __sinf(float v) { return sinf(v); }
inline float __cosf(float v) { return cosf(v); }
inline float __tanf(float v) { return tanf(v); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float v) { return 1.f / v; }
inline float __fsqrt_rn(float v) { return sqrtf(v); }
inline float __frsqrt_rn(float v) { return 1.f / sqrtf(v); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __saturatef(float v) { return v != v ? 0.f : fminf(fmaxf(v, 0.f), 1.f); }
inline float rsqrtf(float v) { return 1.f / sqrtf(v); }
inline double rsqrt(double v) { return 1.0 / std::sqrt(v); }
inline float normcdff(float v) { return 0.5f * erfcf(-v * 0.70710678118654752f); }
inline int __float2int_rn(float v) { return (int)rintf(v); }
inline int __float2int_rz(float v) { return (int)v; }
inline int __float2int_rd(float v) { return (int)floorf(v); }
inline int __float2int_ru(float v) { return (int)ceilf(v); }
inline unsigned __float2uint_rn(float v) { return (unsigned)rintf(v); }
inline unsigned __float2uint_rz(float v) { return (unsigned)v; }
inline float __int2float_rn(int v) { return (float)v; }
inline float __uint2float_rn(unsigned v) { return (float)v; }

// ---- 16-bit floats, as the conversions of the PTX ISA: round to nearest even, NaN becomes 0x7fff
namespace emulation {

inline float from_f16(unsigned h) {
  const unsigned sign = (h & 0x8000u) << 16, exponent = h >> 10 & 31u, mantissa = h & 0x3ffu;
  if (exponent == 31) return bits<float>(sign | 0x7f800000u | mantissa << 13);
  if (exponent == 0) return (sign ? -1.f : 1.f) * std::ldexp(float(mantissa), -24);
  return bits<float>(sign | (exponent + 112) << 23 | mantissa << 13);
}

inline unsigned to_f16(float f) {
  if (f != f) return 0x7fffu;
  const unsigned sign = bits<unsigned>(f) >> 16 & 0x8000u;
  const float size = std::fabs(f);
  if (size >= 65520.f) return sign | 0x7c00u;
  if (size < 6.103515625e-5f) return sign | unsigned(std::nearbyint(std::ldexp(size, 24)));
  const unsigned b = bits<unsigned>(size);
  return sign | ((b + 0xfffu + (b >> 13 & 1u)) >> 13) - (112u << 10);
}

inline float from_bf16(unsigned h) { return bits<float>(h << 16); }

inline unsigned to_bf16(float f) {
  if (f != f) return 0x7fffu;
  const unsigned b = bits<unsigned>(f);
  return (b + 0x7fffu + (b >> 16 & 1u)) >> 16;
}

}  // namespace emulation

// ---- the way in: EMULATED(entry) gives the launcher an entry and the types of its parameters
namespace emulation {

template <class T>
struct Code {  // "p8": pointer, "c8": pointer to what the kernel does not write; else numpy's kind and size
  static constexpr char kind = std::is_pointer_v<T>
                                   ? (std::is_const_v<std::remove_pointer_t<T>> ? 'c' : 'p')
                               : std::is_same_v<T, bool>          ? 'b'
                               : std::is_floating_point_v<T>      ? 'f'
                               : std::is_integral_v<T>            ? (std::is_signed_v<T> ? 'i' : 'u')
                                                                  : 'V';
};

template <class... P>
const char* parameters(void (*)(P...)) {
  static char text[sizeof...(P) * 8 + 1];
  char* at = text;
  ((at += sprintf(at, "%c%zu,", Code<P>::kind, sizeof(P))), ...);
  return text;
}

template <class... P, size_t... I>
EMULATED_UNREPORTED void call(void (*kernel)(P...), void* const* arguments, std::index_sequence<I...>) {
  kernel(*static_cast<std::remove_const_t<P>*>(arguments[I])...);
}
template <class... P>
EMULATED_UNREPORTED void call(void (*kernel)(P...), void* const* arguments) {
  call(kernel, arguments, std::index_sequence_for<P...>{});
}

}  // namespace emulation

#define EMULATED(entry)                                                                                              \
  extern "C" void emulated_##entry(void* const* arguments) { emulation::call(entry, arguments); }                    \
  extern "C" const char* parameters_of_##entry() { return emulation::parameters(entry); }
#define EMULATED_SHARED()                                                   \
  extern "C" char* emulated_shared_begin() { return __start_emulated_shared; } \
  extern "C" char* emulated_shared_end() { return __stop_emulated_shared; }
