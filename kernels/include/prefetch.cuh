// Asks for a cache line of global memory in L2, ahead of its loads, without a register to hold it. sm_80.

__device__ __forceinline__ void prefetch_l2(const void* line) {
  asm volatile("prefetch.global.L2 [%0];" :: "l"(line));
}
