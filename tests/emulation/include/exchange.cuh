// Emulated twin of kernels/include/exchange.cuh. A cooperative launch runs its blocks by turns; in another one nobody comes.

#define EXCHANGE_STATE 4
#define ABSENT 0x7fedcba9u  // a NaN that no arithmetic makes

struct Exchange {
  unsigned int* memory;
  int half;
  unsigned int launches;
};

// Begins it: what it loads is not waited for.
inline Exchange open_exchange(unsigned int* memory, int half) {
  Exchange e = {memory, half, 0u};
  e.launches = memory[1];
  return e;
}

// This launch's words.
inline float* exchanged(const Exchange& e) {
  return (float*)(e.memory + EXCHANGE_STATE + (e.launches & 1u) * e.half);
}

// Words of the launch before, which stand in the other half.
inline unsigned int exchanged_before(const Exchange& e) {
  unsigned int used[2];
  used[0] = e.memory[2];
  used[1] = e.memory[3];
  return e.launches & 1u ? used[0] : used[1];
}

// Makes those absent, all threads of the launch together.
inline void clear_before(const Exchange& e, unsigned int words) {
  unsigned int* const other = e.memory + EXCHANGE_STATE + (~e.launches & 1u) * e.half;
  for (unsigned int i = (blockIdx.y * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x; i < words;
       i += gridDim.x * gridDim.y * blockDim.x)
    other[i] = ABSENT;
}

// A value that happens to be ABSENT goes as another NaN.
inline unsigned int present(float value) {
  const unsigned int bits = __float_as_uint(value);
  return bits == ABSENT ? 0x7fffffffu : bits;
}

inline void send(float* at, float value) { *reinterpret_cast<unsigned*>(at) = present(value); }

inline void send(float* at, const float2& v) {
  send(at, v.x);
  send(at + 1, v.y);
}

inline void send(float4* at, const float4& v) {
  send(&at->x, v.x);
  send(&at->y, v.y);
  send(&at->z, v.z);
  send(&at->w, v.w);
}

// Four words each at `at`, `at` + stride, ..., `count` of them or N, as soon as all have come.
template <int N>
void receive(const float4* at, int stride, int count, float4 (&v)[N]) {
  for (int u = 0; u < N && u < count; ++u) {
    for (int word = 0; word < 4; ++word)
      emulation::wait_for_grid([](const void* at, unsigned wanted) { return *static_cast<const unsigned*>(at) != wanted; },
                               reinterpret_cast<const unsigned*>(at + u * stride) + word, ABSENT);
    v[u] = at[u * stride];
  }
}

// One thread of each block calls these two once, behind a barrier of the block behind all that its threads have read of the state.
// close_exchange wants the answer of the first, which may come late.
inline unsigned int leave_exchange(const Exchange& e) { return atomicAdd(e.memory, 1u); }

inline void close_exchange(const Exchange& e, unsigned int left, unsigned int words) {
  if (left != gridDim.x * gridDim.y - 1u) return;
  e.memory[0] = 0u;
  e.memory[1] = e.launches + 1u;
  e.memory[2 + (e.launches & 1u)] = words;
}
