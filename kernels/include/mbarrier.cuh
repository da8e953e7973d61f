// Barriers in shared memory that some threads of a block, or bulk copies, arrive at and others wait for (mbarrier), and barriers of a part
// of a block (bar.sync). sm_90.
//
// A Barrier's phases are counted: wait(b, parity) returns once the phase of that parity has ended, so a new barrier lets those pass
// that wait for parity 1. One thread initialises it, before a __syncthreads that all pass.

struct __align__(8) Barrier { unsigned long long state; };

__device__ __forceinline__ void initialise(Barrier* b, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"((unsigned int)__cvta_generic_to_shared(b)), "r"(arrivals) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void arrive(Barrier* b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"((unsigned int)__cvta_generic_to_shared(b)) : "memory");
}

// Arrives, and the phase does not end before so many bytes have come by bulk copies (tensor_map.cuh).
__device__ __forceinline__ void arrive_for_bytes(Barrier* b, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :: "r"((unsigned int)__cvta_generic_to_shared(b)), "r"(bytes) : "memory");
}

__device__ __forceinline__ void wait(Barrier* b, int parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}"
      :: "r"((unsigned int)__cvta_generic_to_shared(b)), "r"(parity) : "memory");
}

// Orders what this thread has read and written of shared memory with what tensor cores and bulk copies do there from now on, behind
// a barrier. Plain accesses and theirs are not ordered by that alone.
__device__ __forceinline__ void order_with_hardware() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Waits for `threads` threads of the block, whole warps, at barrier `id`, 1 to 15.
__device__ __forceinline__ void wait_for_part(int id, int threads) {
  asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory");
}
