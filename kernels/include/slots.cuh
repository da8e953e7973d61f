// A thread's own slots of 16 bytes in dynamic shared memory, by their addresses there, and copies into them that pass no register. sm_80.
//
// As pointers, each access of them computes the block's window into its cluster's shared memory anew: some 50 cycles a row.
// Include vector.cuh and cp_async.cuh first.

typedef unsigned int Slot;
#define SLOTS_APART (16 * THREADS)  // bytes from a slot of a thread to its next one

// The slot behind. Not as a sum of the first one and what all threads have alike: of a copy with a policy to such an address NVRTC 13
// makes an illegal instruction.
__device__ __forceinline__ void go_on(Slot& slot) {
  slot += SLOTS_APART;
  asm volatile("" : "+r"(slot));
}

__device__ __forceinline__ Slot first_slot(void* slots) {
  Slot slot = (Slot)__cvta_generic_to_shared(slots) + 16 * threadIdx.x;
  asm volatile("" : "+r"(slot));  // kept in a register
  return slot;
}

__device__ __forceinline__ Vec16 load_slot(Slot slot) {
  Vec16 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3]) : "r"(slot));
  return v;
}

__device__ __forceinline__ void store_slot(Slot slot, const Vec16& v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" :: "r"(slot), "r"(v.w[0]), "r"(v.w[1]), "r"(v.w[2]), "r"(v.w[3]) : "memory");
}

// Of what is read once: the first to leave L2.
__device__ __forceinline__ unsigned long long evict_first() {
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// A copy to a slot, in the thread's current copy group (cp_async.cuh); and one that leaves L2 to others.
__device__ __forceinline__ void copy_to(Slot slot, const Vec16* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(slot), "l"(from) : "memory");
}

__device__ __forceinline__ void copy_to(Slot slot, const Vec16* from, unsigned long long policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" :: "r"(slot), "l"(from), "l"(policy) : "memory");
}
