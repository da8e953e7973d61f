// Emulated twin of kernels/include/cp_async.cuh. A copy is done at once or when it is waited for, at random: a missing
// wait and a buffer that is filled again too early both show.

inline void cp_async16(void* to, const void* from, bool valid = true) { emulation::copy_async(to, from, 16, valid ? 16 : 0); }
inline void cp_async8(void* to, const void* from, bool valid = true) { emulation::copy_async(to, from, 8, valid ? 8 : 0); }
inline void cp_async4(void* to, const void* from, bool valid = true) { emulation::copy_async(to, from, 4, valid ? 4 : 0); }
inline void cp_async_commit() { emulation::commit_copies(); }

template <int groups>
void cp_async_wait() { emulation::wait_copies(groups); }
