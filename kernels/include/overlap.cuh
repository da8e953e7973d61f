// Blocks that come before the kernel ahead in the stream has ended (programmatic dependent launch): as its last blocks leave, those of
// this one take their places, and what a launch and the first blocks' start cost, about 1.3 us on an H200, is over when it ends.
//
// Every kernel of a source that includes this calls it first, in all threads: ops/sources.py has it launched so. What the kernels
// ahead wrote is seen behind it, through any cache. It does not let its own successor come before its last blocks leave:
// waiting blocks would take SMs from kernels on other streams. sm_90; elsewhere nothing.

__device__ __forceinline__ void overlap_launches() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
