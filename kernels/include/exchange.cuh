// Words that every block of a cooperative launch writes for others which wait for them: no barrier, no counter and no fence on the way.
//
// A word that has not come yet holds ABSENT. The words lie in memory of this stream alone that outlives its launches, in two halves,
// used by turns: a launch writes and reads one, which the launch before has left absent, and makes absent again what that one has
// written to the other. The last block to leave notes that, so that nothing needs to be known of the launch before but what stands there.
//
// memory: EXCHANGE_STATE words (blocks that have left, launches until now, words used of either half), zeroed, and 2 * half words of
// ABSENT, all by whoever allocates it; `half` is the same for all launches, and no less than `words`, what this launch writes.

#define EXCHANGE_STATE 4
#define ABSENT 0x7fedcba9u  // a NaN that no arithmetic makes

struct Exchange {
  unsigned int* memory;
  int half;
  unsigned int launches;
};

// Begins it: what it loads is not waited for.
__device__ __forceinline__ Exchange open_exchange(unsigned int* memory, int half) {
  Exchange e = {memory, half, 0u};
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(e.launches) : "l"(memory + 1) : "memory");
  return e;
}

// This launch's words.
__device__ __forceinline__ float* exchanged(const Exchange& e) {
  return (float*)(e.memory + EXCHANGE_STATE + (e.launches & 1u) * e.half);
}

// Words of the launch before, which stand in the other half.
__device__ __forceinline__ unsigned int exchanged_before(const Exchange& e) {
  unsigned int used[2];
  asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];" : "=r"(used[0]), "=r"(used[1]) : "l"(e.memory + 2) : "memory");
  return e.launches & 1u ? used[0] : used[1];
}

// Makes those absent, all threads of the launch together.
__device__ __forceinline__ void clear_before(const Exchange& e, unsigned int words) {
  unsigned int* const other = e.memory + EXCHANGE_STATE + (~e.launches & 1u) * e.half;
  for (unsigned int i = (blockIdx.y * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x; i < words;
       i += gridDim.x * gridDim.y * blockDim.x)
    other[i] = ABSENT;
}

// A value that happens to be ABSENT goes as another NaN.
__device__ __forceinline__ unsigned int present(float value) {
  const unsigned int bits = __float_as_uint(value);
  return bits == ABSENT ? 0x7fffffffu : bits;
}

__device__ __forceinline__ void send(float* at, float value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" :: "l"(at), "r"(present(value)) : "memory");
}

__device__ __forceinline__ void send(float* at, const float2& v) {
  asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};" :: "l"(at), "r"(present(v.x)), "r"(present(v.y)) : "memory");
}

__device__ __forceinline__ void send(float4* at, const float4& v) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};"
               :: "l"(at), "r"(present(v.x)), "r"(present(v.y)), "r"(present(v.z)), "r"(present(v.w)) : "memory");
}

// Four words each at `at`, `at` + stride, ..., `count` of them or N, as soon as all have come.
template <int N>
__device__ __forceinline__ void receive(const float4* at, int stride, int count, float4 (&v)[N]) {
  bool absent;
  do {
    absent = false;
#pragma unroll
    for (int u = 0; u < N; ++u)
      if (u < count)
        asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(v[u].x), "=f"(v[u].y), "=f"(v[u].z), "=f"(v[u].w) : "l"(at + u * stride) : "memory");
#pragma unroll
    for (int u = 0; u < N; ++u)
      if (u < count)
        absent |= __float_as_uint(v[u].x) == ABSENT || __float_as_uint(v[u].y) == ABSENT || __float_as_uint(v[u].z) == ABSENT ||
                  __float_as_uint(v[u].w) == ABSENT;
  } while (absent);
}

// One thread of each block calls these two once, behind a barrier of the block behind all that its threads have read of the state.
// close_exchange wants the answer of the first, which may come late.
__device__ __forceinline__ unsigned int leave_exchange(const Exchange& e) { return atomicAdd(e.memory, 1u); }

__device__ __forceinline__ void close_exchange(const Exchange& e, unsigned int left, unsigned int words) {
  if (left != gridDim.x * gridDim.y - 1u) return;
  e.memory[0] = 0u;
  e.memory[1] = e.launches + 1u;
  e.memory[2 + (e.launches & 1u)] = words;
}
