// A barrier among blocks that all run at the same time: those of a cooperative launch, or of one column of its grid.
//
// `ticket` is a zeroed counter that the blocks share; its low half counts who has arrived, its high half who has left, and the
// last to leave zeroes it. At most 65535 blocks. One thread of each block calls these, in this order, and the block's own
// barriers stand before the first and behind the second: what any thread of any block wrote before is then seen by loads that
// go to L2 (__ldcg).

__device__ __forceinline__ void grid_arrive(unsigned int* ticket) {
  asm volatile("fence.acq_rel.gpu; red.relaxed.gpu.global.add.u32 [%0], 1;" :: "l"(ticket) : "memory");
}

__device__ __forceinline__ void grid_wait(unsigned int* ticket, unsigned int blocks) {
  unsigned int seen;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(ticket) : "memory");
  } while ((seen & 0xffffu) != blocks);
}

// Returns what grid_left wants, later, so that the answer need not be waited for.
__device__ __forceinline__ unsigned int grid_leave(unsigned int* ticket) { return atomicAdd(ticket, 0x10000u); }

__device__ __forceinline__ void grid_left(unsigned int* ticket, unsigned int blocks, unsigned int leave) {
  if (leave >> 16 == blocks - 1) *ticket = 0u;
}
