// Copies of single pixels' chunks from global to shared memory that pass no register (cp.async), with their addresses. sm_80.
//
// Chunk is that of channels.cuh. cp_async.cuh commits and waits. A constant distance in shared memory costs no instruction, one of
// pixels in global memory one; from generic pointers the compiler makes two to four.

typedef unsigned int SharedAddress;

__device__ __forceinline__ SharedAddress shared_address(const Chunk* at) {
  return (SharedAddress)__cvta_generic_to_shared(at);
}

__device__ __forceinline__ SharedAddress ahead(SharedAddress at, int chunks) { return at + chunks * (int)sizeof(Chunk); }

// The chunk at from + count * bytes to the one `chunks` behind `to`; with `valid` false nothing is read and zeros are written.
__device__ __forceinline__ void copy_chunk(SharedAddress to, int chunks, const char* from, int count, int bytes, bool valid) {
#if WORDS == 1
  asm volatile("{ .reg .b64 p; mad.wide.s32 p, %1, %2, %3; cp.async.ca.shared.global [%0], [p], 4, %4; }"
#elif WORDS == 2
  asm volatile("{ .reg .b64 p; mad.wide.s32 p, %1, %2, %3; cp.async.ca.shared.global [%0], [p], 8, %4; }"
#else
  asm volatile("{ .reg .b64 p; mad.wide.s32 p, %1, %2, %3; cp.async.cg.shared.global [%0], [p], 16, %4; }"
#endif
               :: "r"(ahead(to, chunks)), "r"(count), "r"(bytes), "l"(from), "r"(valid ? (int)sizeof(Chunk) : 0) : "memory");
}
