// Emulated twin of kernels/include/written.cuh.

inline Vec16 load_written(const Vec16* p) { return *p; }
