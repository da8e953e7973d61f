// Emulated twin of kernels/include/mbarrier.cuh.

struct __align__(8) Barrier {
  unsigned short pending, arrivals;  // of threads
  unsigned char phase, unused;
  unsigned short missing;            // bytes in units of 16
};

inline void initialise(Barrier* b, int arrivals) {
  if (reinterpret_cast<uintptr_t>(b) % 8) emulation::fail("a barrier at an address that is no multiple of 8");
  emulation::synchronises(b, sizeof *b);
  *b = {(unsigned short)arrivals, (unsigned short)arrivals, 0, 0, 0};
}

inline void emulated_end_of_phase(Barrier* b) {
  if (b->pending > 0 || b->missing > 0) return;
  b->pending = b->arrivals;
  ++b->phase;
}

inline void arrive(Barrier* b) {
  if (b->pending == 0 || b->pending > b->arrivals) emulation::fail("an arrival at a barrier that expects none");
  emulation::arrived(b);
  --b->pending;
  emulated_end_of_phase(b);
}

inline void arrive_for_bytes(Barrier* b, int bytes) {
  if (bytes % 16) emulation::fail("bulk copies of %d bytes", bytes);
  b->missing += bytes / 16;
  arrive(b);
}

inline void emulated_bytes(Barrier* b, int bytes) {
  if (b->missing < bytes / 16) emulation::fail("a bulk copy brings more bytes than its barrier expects");
  b->missing -= bytes / 16;
  emulated_end_of_phase(b);
}

// Makes what bulk copies bring to a barrier that is waited for, if any are yet to be made (tensor_map.cuh's twin).
static void (*emulated_coming)(const void* barrier) = nullptr;

inline void wait(Barrier* b, int parity) {
  emulation::wait_until(
      [](const void* at, unsigned parity) {
        if (emulated_coming) emulated_coming(at);
        return (static_cast<const Barrier*>(at)->phase & 1) != parity;
      },
      b, unsigned(parity));
  emulation::passed(b);
}

inline void order_with_hardware() {}

inline void wait_for_part(int id, int threads) { emulation::wait_for_part(id, threads); }
