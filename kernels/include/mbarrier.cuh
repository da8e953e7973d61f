// Barriers in shared memory that some threads of a block arrive at and others wait for (mbarrier), barriers of a part of a block
// (bar.sync), and how many registers a warpgroup has. sm_90.
//
// A Barrier's phases are counted: wait(b, parity) returns once the phase of that parity has ended, so a new barrier lets those pass
// that wait for parity 1. One thread initialises it, before a __syncthreads that all pass.

struct __align__(8) Barrier { unsigned long long state; };

__device__ __forceinline__ void initialise(Barrier* b, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"((unsigned int)__cvta_generic_to_shared(b)), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void arrive(Barrier* b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"((unsigned int)__cvta_generic_to_shared(b)) : "memory");
}

// Arrives when all cp.async copies of this thread so far are done.
__device__ __forceinline__ void arrive_behind_copies(Barrier* b) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" :: "r"((unsigned int)__cvta_generic_to_shared(b)) : "memory");
}

__device__ __forceinline__ void wait(Barrier* b, int parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}"
      :: "r"((unsigned int)__cvta_generic_to_shared(b)), "r"(parity) : "memory");
}

// Waits for `threads` threads of the block, whole warps, at barrier `id`, 1 to 15.
__device__ __forceinline__ void wait_for_part(int id, int threads) {
  asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory");
}

// All warps of a warpgroup together.
template <int registers>
__device__ __forceinline__ void give_up_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(registers)); }
template <int registers>
__device__ __forceinline__ void claim_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(registers)); }
