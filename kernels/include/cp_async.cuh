// Copies from global to shared memory that pass no register and are waited for in groups (cp.async). sm_80.
//
// Both addresses are multiples of the size. With `valid` false nothing is read and zeros are written: borders and tails
// need no branch. A thread that has waited sees its own copies; other threads see them after a barrier that follows.

__device__ __forceinline__ void cp_async16(void* to, const void* from, bool valid = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"  // past L1
               :: "r"((unsigned int)__cvta_generic_to_shared(to)), "l"(from), "r"(valid ? 16 : 0) : "memory");
}

__device__ __forceinline__ void cp_async8(void* to, const void* from, bool valid = true) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;"
               :: "r"((unsigned int)__cvta_generic_to_shared(to)), "l"(from), "r"(valid ? 8 : 0) : "memory");
}

__device__ __forceinline__ void cp_async4(void* to, const void* from, bool valid = true) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
               :: "r"((unsigned int)__cvta_generic_to_shared(to)), "l"(from), "r"(valid ? 4 : 0) : "memory");
}

// Ends a group: all copies of this thread since the last one. A group may be empty.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `groups` of this thread's last groups are still under way.
template <int groups>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" :: "n"(groups) : "memory");
}
