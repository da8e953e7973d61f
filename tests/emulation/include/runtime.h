// What an emulated kernel may ask of the thing that runs it. Defined in runtime.cpp.
#pragma once

#include <cstddef>
#include <cstdint>

struct uint3 {
  unsigned x, y, z;
};

namespace emulation {

struct Thread {
  uint3 index;
  unsigned number, lane, warp;
};

extern Thread* current;                          // the thread that runs now
extern uint3 block_index, block_size, grid_size;
extern uint64_t blocks_run;                      // so far, this one included

// Waits until every thread of the block is at the barrier of this source line. Returns how many came with `predicate`.
int barrier(int line, bool predicate = false);

// Waits until all lanes of `mask` that have not returned are here with the same function, then calls it once: mine[i] is
// what lane i passed, on that lane's stack, for the lanes of `present`.
using Together = void (*)(void* const* mine, unsigned present);
void collective(Together together, unsigned mask, void* mine);

unsigned live_lanes();  // of this warp
void* dynamic_shared();
void pause();                   // lets other threads run
void spin();                    // one turn of what may be a waiting loop: pauses now and then, fails in the end
uint64_t random();
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// cp.async: done at once or as late as the waits allow, at random, since the hardware promises neither.
void copy_async(void* to, const void* from, int bytes, int valid);  // the rest of `bytes` is filled with zeros
void commit_copies();
void wait_copies(int groups_left);

// The barrier of a cluster in its two halves. A block whose threads all wait for the second half lets the others run.
void cluster_arrive();
void cluster_wait();
const void* in_block_of_cluster(const void* at, int rank);  // the same place in that block's shared memory

// Waits until reached(at, wanted), with other blocks of a cooperative launch running meanwhile.
void wait_for_grid(bool (*reached)(const void* at, unsigned wanted), const void* at, unsigned wanted);

// Waits until reached(at, wanted), which other threads of the block bring about.
using Reached = bool (*)(const void* at, unsigned wanted);
void wait_until(Reached reached, const void* at, unsigned wanted);
void wait_for_part(int id, int threads);  // for so many of the block, at barrier `id` of 16

// For a kernel whose accesses are looked at (checker.h); else they do nothing. What hardware does for a thread counts as the thread's.
void acts(unsigned lane);                           // inside `together`: what follows is this lane's
void ordered(unsigned lanes);                       // inside `together`: these know what each other did until now
void arrived(const void* object);                   // who passes there later knows what this thread knows now
void passed(const void* object);
void synchronises(const void* object, size_t bytes);  // a barrier: to be touched in any order
enum class Doing { read, write, atomic };
void accessed(const void* at, size_t bytes, Doing doing);  // of code that the compiler does not report
struct As {  // while it lives, this thread does what is done
  explicit As(unsigned thread);
  ~As();
  Thread* before;
};

// What a launch does, for one thread.
using Entry = void (*)(void* const* arguments);

}  // namespace emulation
