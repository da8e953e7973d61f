// Emulated twin of kernels/include/leaving.cuh.

inline void store_leaving(Vec16* p, const Vec16& v) { *p = v; }
