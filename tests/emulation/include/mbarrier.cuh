// Emulated twin of kernels/include/mbarrier.cuh.

struct __align__(8) Barrier {
  unsigned short pending, arrivals;
  unsigned int phase;
};

inline void initialise(Barrier* b, int arrivals) { *b = {(unsigned short)arrivals, (unsigned short)arrivals, 0}; }

inline void arrive(Barrier* b) {
  if (b->pending == 0 || b->pending > b->arrivals) emulation::fail("an arrival at a barrier that was not initialised");
  if (--b->pending == 0) {
    b->pending = b->arrivals;
    ++b->phase;
  }
}

inline void arrive_behind_copies(Barrier* b) {
  emulation::commit_copies();
  emulation::wait_copies(0);
  arrive(b);
}

inline void wait(Barrier* b, int parity) {
  emulation::wait_until(
      [](const void* at, unsigned parity) { return (static_cast<const Barrier*>(at)->phase & 1) != parity; }, b, unsigned(parity));
}

inline void wait_for_part(int id, int threads) { emulation::wait_for_part(id, threads); }

template <int registers>
void give_up_registers() {}
template <int registers>
void claim_registers() {}
