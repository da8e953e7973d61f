// Emulated twin of kernels/include/slots.cuh.

typedef Vec16* Slot;
#define SLOTS_APART THREADS

inline void go_on(Slot& slot, int slots = 1) { slot += slots * SLOTS_APART; }
inline Slot first_slot(void* slots) { return static_cast<Vec16*>(slots) + threadIdx.x; }
inline Vec16 load_slot(Slot slot) { return *slot; }
inline void store_slot(Slot slot, const Vec16& v) { *slot = v; }
inline unsigned long long evict_first() { return 1; }
inline void copy_to(Slot slot, const Vec16* from) { emulation::copy_async(slot, from, 16, 16); }
inline void copy_to(Slot slot, const Vec16* from, unsigned long long) { emulation::copy_async(slot, from, 16, 16); }
