// Emulated twin of kernels/include/grid_barrier.cuh. A cooperative launch runs its blocks by turns; in another one nobody comes.

inline void grid_arrive(unsigned int* ticket) { *ticket += 1u; }

inline void grid_wait(unsigned int* ticket, unsigned int blocks) {
  emulation::wait_for_grid([](const void* at, unsigned wanted) { return (*static_cast<const unsigned*>(at) & 0xffffu) == wanted; },
                           ticket, blocks);
}

inline unsigned int grid_leave(unsigned int* ticket) { return atomicAdd(ticket, 0x10000u); }

inline void grid_left(unsigned int* ticket, unsigned int blocks, unsigned int leave) {
  if (leave >> 16 == blocks - 1) *ticket = 0u;
}
