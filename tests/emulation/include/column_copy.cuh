// Emulated twin of kernels/include/column_copy.cuh.

typedef Chunk* SharedAddress;

inline SharedAddress shared_address(const Chunk* at) { return (Chunk*)at; }

inline SharedAddress ahead(SharedAddress at, int chunks) { return at + chunks; }

inline void copy_chunk(SharedAddress to, int chunks, const char* from, int count, int bytes, bool valid) {
  emulation::copy_async(to + chunks, from + (i64)count * bytes, sizeof(Chunk), valid ? sizeof(Chunk) : 0);
}
