// Emulated twin of kernels/include/slots.cuh.

typedef char* Slot;
#define SLOTS_APART (16 * THREADS)  // bytes from a slot of a thread to its next one

inline void go_on(Slot& slot) { slot += SLOTS_APART; }
inline Slot first_slot(void* slots) { return static_cast<char*>(slots) + 16 * threadIdx.x; }
inline Vec16 load_slot(Slot slot) { return *reinterpret_cast<Vec16*>(slot); }
inline void store_slot(Slot slot, const Vec16& v) { *reinterpret_cast<Vec16*>(slot) = v; }
inline unsigned long long evict_first() { return 1; }
inline void copy_to(Slot slot, const Vec16* from) { emulation::copy_async(slot, from, 16, 16); }
inline void copy_to(Slot slot, const Vec16* from, unsigned long long) { emulation::copy_async(slot, from, 16, 16); }
