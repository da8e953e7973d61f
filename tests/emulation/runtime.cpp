// Runs emulated kernels: clusters of blocks (of one, mostly) one after another, the threads of a block as fibers, both in a
// random order. The blocks of a cluster run by turns, each until its threads wait for the others' or have returned. So do
// all blocks of a cooperative launch, as if they were one cluster.
//
// A thread runs until it waits (barrier, warp operation) or returns. Then the next one does; when none can run, the
// waits are resolved, or the launch fails with what holds it. Between two barriers of the block it may also be warp by warp, each as
// far as it comes: what it reads of the others they have not written yet, unless a barrier saw to it. Every memory fault inside a
// kernel ends the launch, not the process: a kernel has no destructors, so its fibers can be dropped where they stand.

#include "runtime.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <csetjmp>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <vector>

#include <link.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

namespace emulation {

Thread* current;
uint3 block_index, block_size, grid_size;
uint64_t blocks_run;

namespace {

enum class State { ready, at_barrier, at_warp, at_cluster, at_grid, at_condition, returned };

struct Copy {
  void* to;
  const void* from;
  int bytes, valid, group;
  bool made;  // the rest of it is that it is waited for
};

struct Fiber : Thread {
  State state;
  int line;            // of the barrier
  bool predicate;
  int count;
  Together together;
  unsigned mask;
  void* mine;
  int arrivals, waits; // at the cluster's barrier
  Reached reached;     // and what it is asked for, of at_condition
  const void* at;
  unsigned wanted;
  int group;           // of cp.async copies, the open one
  std::vector<Copy> copies;
  bool started = false;
  ucontext_t first;
  jmp_buf resume;
};

struct Part {
  int arrived;
  unsigned rounds;
};

// One block of the cluster, or of the cooperative launch, that runs. Made once; a stack's first page cannot be touched.
struct Block {
  Fiber* fibers = nullptr;  // kMostThreads of them
  char* stacks = nullptr;
  uint3 index;
  char* dynamic;
  Part parts[16];            // barriers of a part of the threads
  std::vector<char> shared;  // the static section, while another block has its place
  enum { waiting, running, done } state;
};

constexpr unsigned kMostBlocks = 16;  // of a cooperative launch; of a cluster 8, without asking for more
constexpr size_t kStack = 256 << 10;
constexpr unsigned kMostThreads = 1024;
constexpr size_t kGuard = 1 << 20;  // bytes around a buffer that nobody may touch
constexpr long kMostSpins = 20'000'000;

Block blocks[kMostBlocks];
unsigned cluster;     // blocks of one; all of a cooperative launch
bool cooperative;
bool advanced;        // a block has begun, ended or passed the grid's barrier since the last round of turns
unsigned here;        // the one whose turn it is
Fiber* fibers;        // its threads
char *shared_begin, *shared_end;
unsigned threads;
jmp_buf scheduler;
sigjmp_buf escape;
volatile sig_atomic_t inside;
char* message;
size_t message_size;
void *fault_address, *fault_code;
Entry entry;
void* const* arguments;
char* dynamic;
uint64_t state_of_random;
long spins;

Fiber* self() { return static_cast<Fiber*>(current); }

#include "checker.h"

void loop() {
  for (;;) {
    entry(arguments);
    self()->state = State::returned;
    if (!_setjmp(self()->resume)) _longjmp(scheduler, 1);
  }
}

void run(Fiber* fiber) {
  current = fiber;
  if (_setjmp(scheduler)) return;
  if (fiber->started) _longjmp(fiber->resume, 1);
  fiber->started = true;
  setcontext(&fiber->first);
}

void wait(State state) {
  Fiber* fiber = self();
  fiber->state = state;
  if (!_setjmp(fiber->resume)) _longjmp(scheduler, 1);
}

// A system call that found no room: what goes on would read and write where nothing is, and end the process without a word.
[[noreturn]] void no_room(const char* what, size_t bytes) {
  fprintf(stderr, "emulation: no room for %s of %zu bytes: %s (a process may have vm.max_map_count mappings)\n", what, bytes,
          strerror(errno));
  abort();
}

char* mapped(size_t bytes, int rights, const char* what) {
  void* at = mmap(nullptr, bytes, rights, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) no_room(what, bytes);
  return static_cast<char*>(at);
}

void protect(char* at, size_t bytes, int rights, const char* what) {
  if (mprotect(at, bytes, rights)) no_room(what, bytes);
}

void make_fibers(Block& block) {
  const size_t page = sysconf(_SC_PAGESIZE);
  block.fibers = new Fiber[kMostThreads];
  block.stacks = mapped(kStack * kMostThreads, PROT_READ | PROT_WRITE, "the stacks of a block");
  for (unsigned i = 0; i < kMostThreads; ++i) protect(block.stacks + i * kStack, page, PROT_NONE, "a stack's guard");
}

// Gives a block the globals and the static shared section.
void turn_to(unsigned next) {
  if (next != here) {
    memcpy(blocks[here].shared.data(), shared_begin, shared_end - shared_begin);
    memcpy(shared_begin, blocks[next].shared.data(), shared_end - shared_begin);
  }
  here = next;
  fibers = blocks[next].fibers;
  block_index = blocks[next].index;
  dynamic = blocks[next].dynamic;
}

void shuffle(std::vector<unsigned>& v) {
  for (size_t i = v.size(); i > 1; --i) std::swap(v[i - 1], v[random() % i]);
}

const char* place(const Fiber& f, char (&text)[64]) {
  switch (f.state) {
    case State::at_barrier: snprintf(text, sizeof text, "waits at the barrier of line %d", f.line); break;
    case State::at_warp: snprintf(text, sizeof text, "waits in a warp operation with mask 0x%08x", f.mask); break;
    case State::at_cluster: snprintf(text, sizeof text, "waits at the cluster's barrier"); break;
    case State::at_grid: snprintf(text, sizeof text, "waits at the grid's barrier"); break;
    case State::at_condition: snprintf(text, sizeof text, "waits for a part of the block"); break;
    case State::returned: snprintf(text, sizeof text, "has returned"); break;
    default: snprintf(text, sizeof text, "can run");
  }
  return text;
}

[[noreturn]] void fail_stuck(const Fiber& a, const Fiber& b, const char* what) {
  char first[64], second[64];
  current = nullptr;
  fail("%s in block (%u, %u, %u): thread %u %s, thread %u %s", what, block_index.x, block_index.y, block_index.z, a.number,
       place(a, first), b.number, place(b, second));
}

// Releases the warp operations of threads [first, behind), whole warps, whose lanes are all there. True when there were any.
bool resolve_warps(unsigned first, unsigned behind) {
  bool any = false;
  for (unsigned base = first; base < behind; base += 32) {
    const unsigned lanes = threads - base < 32 ? threads - base : 32;
    unsigned live = 0;
    for (unsigned i = 0; i < lanes; ++i)
      if (fibers[base + i].state != State::returned) live |= 1u << i;
    for (unsigned i = 0; i < lanes; ++i) {
      Fiber& leader = fibers[base + i];
      if (leader.state != State::at_warp) continue;
      if (!(leader.mask >> i & 1u)) fail_stuck(leader, leader, "a lane outside its own mask");
      const unsigned needed = leader.mask & live;
      void* mine[32] = {};
      unsigned present = 0;
      for (unsigned k = 0; k < lanes; ++k) {
        Fiber& f = fibers[base + k];
        if (!(needed >> k & 1u) || f.state != State::at_warp) continue;
        if (f.mask != leader.mask || f.together != leader.together) continue;
        present |= 1u << k;
        mine[k] = f.mine;
      }
      if (present != needed) continue;
      current = &leader;
      leader.together(mine, present);
      for (unsigned k = 0; k < lanes; ++k)
        if (present >> k & 1u) fibers[base + k].state = State::ready;
      any = true;
    }
  }
  return any;
}

// Whether threads of the block wait for other blocks.
bool any_outside() {
  for (unsigned i = 0; i < threads; ++i)
    if (fibers[i].state == State::at_cluster || fibers[i].state == State::at_grid) return true;
  return false;
}

// Lets the block's threads that wait for the grid look again.
void wake() {
  for (unsigned i = 0; i < threads; ++i)
    if (fibers[i].state == State::at_grid) fibers[i].state = State::ready;
}

// Lets the block's threads go on that waited for something that is so by now.
void resolve_conditions() {
  for (unsigned i = 0; i < threads; ++i)
    if (Fiber& f = fibers[i]; f.state == State::at_condition) {
      current = &f;
      if (f.reached(f.at, f.wanted)) f.state = State::ready;
    }
}

// Lets the threads go on for whom all others of the cluster have arrived. True when there were any.
bool resolve_cluster() {
  int arrived = INT_MAX;
  for (unsigned b = 0; b < cluster; ++b)
    for (unsigned i = 0; i < threads; ++i)
      if (const Fiber& f = blocks[b].fibers[i]; f.state != State::returned) arrived = std::min(arrived, f.arrivals);
  bool any = false;
  for (unsigned b = 0; b < cluster; ++b) {
    for (unsigned i = 0; i < threads; ++i) {
      Fiber& f = blocks[b].fibers[i];
      if (f.state != State::at_cluster || f.waits >= arrived) continue;
      ++f.waits;
      f.state = State::ready;
      any = true;
    }
  }
  return any;
}

[[noreturn]] void fail_cluster() {
  for (unsigned b = 0; b < cluster; ++b) {
    if (blocks[b].state != Block::running) continue;
    turn_to(b);
    const Fiber* behind = nullptr;
    for (unsigned i = 0; i < threads; ++i)
      if (fibers[i].state != State::returned && (!behind || fibers[i].arrivals < behind->arrivals)) behind = &fibers[i];
    for (unsigned i = 0; i < threads; ++i) {
      if (fibers[i].state == State::at_cluster) fail_stuck(fibers[i], *behind, "the cluster's barrier");
      if (fibers[i].state == State::at_grid) fail_stuck(fibers[i], fibers[i], "blocks that never come to the grid's barrier");
    }
  }
  fail("no block of a cluster can go on");
}

// Releases the block's barrier when all threads are at the same one. False when all have returned; else fails.
bool resolve_barrier() {
  const Fiber* waiting = nullptr;
  const Fiber* returned = nullptr;
  int count = 0;
  for (unsigned i = 0; i < threads; ++i) {
    const Fiber& f = fibers[i];
    if (f.state == State::returned) {
      returned = &f;
      continue;
    }
    if (f.state == State::at_condition) fail_stuck(f, f, "threads wait for others that never come");
    if (f.state == State::at_warp) {
      const Fiber* absent = &f;  // the first lane of its mask that is somewhere else
      const unsigned base = i / 32 * 32;
      for (unsigned k = base; k < base + 32 && k < threads; ++k)
        if ((f.mask >> (k - base) & 1u) && (fibers[k].state != State::at_warp || fibers[k].mask != f.mask ||
                                            fibers[k].together != f.together))
          absent = &fibers[k];
      fail_stuck(f, *absent, "lanes of a warp wait for each other");
    }
    if (waiting && f.line != waiting->line) fail_stuck(*waiting, f, "divergent barrier");
    waiting = &f;
    count += f.predicate;
  }
  if (!waiting) return false;
  if (returned) fail_stuck(*waiting, *returned, "divergent barrier");
  order_block(tracks[here]);
  for (unsigned i = 0; i < threads; ++i) {
    fibers[i].state = State::ready;
    fibers[i].count = count;
  }
  return true;
}

void begin(Block& block) {
  ++blocks_run;
  Track& track = tracks[&block - blocks];
  begin_track(track);
  order_block(track);
  std::fill(std::begin(block.parts), std::end(block.parts), Part{});
  for (unsigned i = 0; i < threads; ++i) {
    Fiber& f = block.fibers[i];
    f.index = {i % block_size.x, i / block_size.x % block_size.y, i / (block_size.x * block_size.y)};
    f.number = i;
    f.lane = i % 32;
    f.warp = i / 32;
    f.state = State::ready;
    f.arrivals = f.waits = 0;
    f.group = 0;
    f.copies.clear();
    if (!f.started) {
      getcontext(&f.first);
      const size_t page = sysconf(_SC_PAGESIZE);
      f.first.uc_stack.ss_sp = block.stacks + i * kStack + page;
      f.first.uc_stack.ss_size = kStack - page;
      f.first.uc_link = nullptr;
      makecontext(&f.first, loop, 0);
    }
  }
}

// Runs the ready threads of a warp until they wait for other warps or have returned.
void run_warp(unsigned base) {
  std::vector<unsigned> order;
  const unsigned behind = std::min(base + 32, threads);
  do {
    order.clear();
    for (unsigned i = base; i < behind; ++i)
      if (fibers[i].state == State::ready) order.push_back(i);
    shuffle(order);
    for (unsigned i : order) run(&fibers[i]);
  } while (resolve_warps(base, behind));
}

// Runs the block whose turn it is until all its threads have returned, or none can go on before the cluster does.
void run_block() {
  std::vector<unsigned> order;
  advanced |= blocks[here].state == Block::waiting;
  blocks[here].state = Block::running;
  wake();
  for (;;) {
    order.clear();
    resolve_conditions();
    for (unsigned i = 0; i < threads; ++i)
      if (fibers[i].state == State::ready) order.push_back(i);
    if (order.empty()) {
      if (resolve_warps(0, threads)) continue;
      if (any_outside()) return;
      if (resolve_barrier()) continue;
      blocks[here].state = Block::done;
      advanced = true;
      return;
    }
    if (threads > 32 && random() % 2) {
      order.clear();
      for (unsigned base = 0; base < threads; base += 32) order.push_back(base);
      shuffle(order);
      for (unsigned base : order) run_warp(base);
      continue;
    }
    shuffle(order);
    for (unsigned i : order) run(&fibers[i]);
  }
}

// Runs the blocks first, first + 1, ... that are neighbours along x.
void run_cluster(unsigned first, size_t dynamic_bytes) {
  std::vector<unsigned> order;
  for (unsigned b = 0; b < cluster; ++b) {
    const unsigned i = first + b;
    Block& block = blocks[b];
    block.index = {i % grid_size.x, i / grid_size.x % grid_size.y, i / (grid_size.x * grid_size.y)};
    block.state = Block::waiting;
    if (cluster > 1) block.shared.assign(shared_end - shared_begin, char(0xFF));
    memset(block.dynamic, 0xFF, dynamic_bytes);
    begin(block);
  }
  memset(shared_begin, 0xFF, shared_end - shared_begin);
  here = 0;
  spins = 0;
  for (;;) {
    order.clear();
    for (unsigned b = 0; b < cluster; ++b)
      if (blocks[b].state != Block::done) order.push_back(b);
    if (order.empty()) return;
    shuffle(order);
    advanced = false;
    for (unsigned b : order) {
      turn_to(b);
      run_block();
    }
    if (!resolve_cluster() && !advanced)
      for (unsigned b : order)
        if (blocks[b].state != Block::done) fail_cluster();
  }
}

void on_fault(int signal, siginfo_t* info, void* context) {
  if (!inside) {  // not ours: as if we had never been here
    std::signal(signal, SIG_DFL);
    return;
  }
  fault_address = signal == SIGSEGV || signal == SIGBUS ? info->si_addr : nullptr;
#if defined(__x86_64__)
  fault_code = reinterpret_cast<void*>(static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP]);
#elif defined(__aarch64__)
  fault_code = reinterpret_cast<void*>(static_cast<ucontext_t*>(context)->uc_mcontext.pc);
#endif
  siglongjmp(escape, signal);
}

}  // namespace

uint64_t random() {
  uint64_t& s = state_of_random;
  s ^= s << 13, s ^= s >> 7, s ^= s << 17;
  return s >> 11;
}

void fail(const char* format, ...) {
  va_list list;
  va_start(list, format);
  int used = vsnprintf(message, message_size, format, list);
  va_end(list);
  if (current && used >= 0 && static_cast<size_t>(used) < message_size)
    snprintf(message + used, message_size - used, " (block %u, %u, %u; thread %u)", block_index.x, block_index.y,
             block_index.z, current->number);
  siglongjmp(escape, -1);
}

int barrier(int line, bool predicate) {
  self()->line = line;
  self()->predicate = predicate;
  wait(State::at_barrier);
  return self()->count;
}

void collective(Together together, unsigned mask, void* mine) {
  Fiber* fiber = self();
  fiber->together = together;
  fiber->mask = mask;
  fiber->mine = mine;
  wait(State::at_warp);
}

unsigned live_lanes() {
  unsigned live = 0;
  for (unsigned i = current->warp * 32; i < threads && i < current->warp * 32 + 32; ++i)
    if (fibers[i].state != State::returned) live |= 1u << i % 32;
  return live;
}

void* dynamic_shared() { return dynamic; }

void acts(unsigned lane) { current = &fibers[current->number / 32 * 32 + lane]; }

void ordered(unsigned lanes) { order_lanes(tracks[here], current->number / 32 * 32, lanes); }

void arrived(const void* object) { arrive_at(object); }

void passed(const void* object) { leave(object); }

void synchronises(const void* object, size_t bytes) { mark(object, bytes, &Cell::synchronises, true); }

void accessed(const void* at, size_t bytes, Doing doing) {
  look(at, bytes, true, static_cast<Access>(doing), __builtin_return_address(0));
}

As::As(unsigned thread) : before(current) { current = &fibers[thread]; }
As::~As() { current = before; }

void cluster_arrive() {
  arrive_at(&tracks[here]);
  if (self()->arrivals++ != self()->waits) fail("a thread arrives at the cluster's barrier again without having waited");
}

void cluster_wait() {
  if (self()->arrivals == self()->waits) fail("a thread waits at the cluster's barrier without having arrived");
  wait(State::at_cluster);
  leave(&tracks[here]);
}

const void* in_block_of_cluster(const void* at, int rank) {
  if (rank < 0 || unsigned(rank) >= cluster) fail("a cluster of %u has no block %d", cluster, rank);
  Block& block = blocks[rank];
  const char* p = static_cast<const char*>(at);
  if (block.state == Block::waiting) fail("shared memory of block %d of the cluster is read before that has begun", rank);
  if (block.state == Block::done) fail("shared memory of block %d of the cluster is read after that has returned", rank);
  if (unsigned(rank) == here) return p;
  if (p >= shared_begin && p < shared_end) return block.shared.data() + (p - shared_begin);
  return block.dynamic + (p - dynamic);
}

void wait_for_grid(bool (*reached)(const void* at, unsigned wanted), const void* at, unsigned wanted) {
  if (!cooperative) fail("waits for the other blocks of a launch that is not cooperative");
  while (!reached(at, wanted)) wait(State::at_grid);
  advanced = true;
}

void wait_until(Reached reached, const void* at, unsigned wanted) {
  Fiber* fiber = self();
  if (reached(at, wanted)) return;
  fiber->reached = reached;
  fiber->at = at;
  fiber->wanted = wanted;
  wait(State::at_condition);
}

void wait_for_part(int id, int count) {
  Part& part = blocks[here].parts[id];
  arrive_at(&part);
  if (++part.arrived == count) {
    part.arrived = 0;
    ++part.rounds;
  } else {
    wait_until([](const void* at, unsigned round) { return static_cast<const Part*>(at)->rounds != round; }, &part, part.rounds);
  }
  leave(&part);
}

void pause() { wait(State::ready); }

void spin() {
  if (++spins > kMostSpins) fail("%ld atomic operations in one block: it waits for something that does not come", spins);
  if (spins % 4096 == 0) pause();
}

void copy_async(void* to, const void* from, int bytes, int valid) {
  if (reinterpret_cast<uintptr_t>(to) % bytes || (valid && reinterpret_cast<uintptr_t>(from) % bytes))
    fail("cp.async of %d bytes between addresses that are no multiples of it", bytes);
  const void* code = __builtin_return_address(0);
  look(from, valid, false, Access::read, code);
  look(to, bytes, true, Access::write, code);  // not behind another copy that is under way
  mark(to, bytes, &Cell::copying, true);
  const bool made = random() & 1;
  if (made) {
    memcpy(to, from, valid);
    memset(static_cast<char*>(to) + valid, 0, bytes - valid);
  }
  self()->copies.push_back({to, from, bytes, valid, self()->group, made});
}

void commit_copies() { ++self()->group; }

void wait_copies(int groups_left) {
  Fiber* fiber = self();
  std::vector<Copy> later;
  for (const Copy& c : fiber->copies) {
    if (c.group < fiber->group - groups_left) {
      if (!c.made) {
        memcpy(c.to, c.from, c.valid);
        memset(static_cast<char*>(c.to) + c.valid, 0, c.bytes - c.valid);
      }
      mark(c.to, c.bytes, &Cell::copying, false);
      look(c.to, c.bytes, true, Access::copy, __builtin_return_address(0));
    } else {
      later.push_back(c);
    }
  }
  fiber->copies.swap(later);
}

// The copy of one buffer that a kernel works on: its end (rounded up to 16 bytes) is the end of a page, nothing can be
// touched around its pages, and what is left of its first page and behind its end holds a pattern that is NaN in fp32,
// fp16 and bf16.
struct Region {
  char *map, *pages, *data;
  size_t map_bytes, page_bytes, bytes;
};

struct Launch {
  Entry entry;
  void* const* arguments;
  unsigned grid[3], block[3], cluster, cooperative;
  size_t dynamic_bytes;
  char *shared_begin, *shared_end;
  uint64_t seed;
  char* message;
  size_t message_size;
  void *fault_address, *fault_code;  // out
  unsigned fault_block[3], fault_thread;  // out
  // Where `checked`: every access is looked at (include/checker.h).
  const Span* spans;
  const unsigned char* own_static;
  unsigned span_count, checked;
};

namespace {

char pattern(const char* at) { return reinterpret_cast<uintptr_t>(at) & 1 ? char(0xFF) : char(0xC5); }

// The library that this is in: its tables may be read, and what its twins of hardware keep.
void find_image(const char* code, const char*& image_begin, const char*& image_end) {
  struct Found { const char *code, *begin, *end; } wanted{code, nullptr, nullptr};
  const auto found = [](dl_phdr_info* info, size_t, void* into) {
    Found& wanted = *static_cast<Found*>(into);
    const char *begin = nullptr, *end = nullptr;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
      if (info->dlpi_phdr[i].p_type != PT_LOAD) continue;
      const char* at = reinterpret_cast<const char*>(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
      begin = begin ? std::min(begin, at) : at;
      end = std::max(end, at + info->dlpi_phdr[i].p_memsz);
    }
    if (wanted.code < begin || wanted.code >= end) return 0;
    wanted.begin = begin;
    wanted.end = end;
    return 1;
  };
  dl_iterate_phdr(found, &wanted);
  image_begin = wanted.begin;
  image_end = wanted.end;
}

int launch(Launch& l) {
  const int signals[] = {SIGSEGV, SIGBUS, SIGILL, SIGTRAP, SIGFPE};
  struct sigaction before[5], ours = {};
  stack_t stack_before, stack = {};
  static char handler_stack[64 << 10];
  stack.ss_sp = handler_stack;
  stack.ss_size = sizeof handler_stack;
  sigaltstack(&stack, &stack_before);
  ours.sa_sigaction = on_fault;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (int i = 0; i < 5; ++i) sigaction(signals[i], &ours, &before[i]);

  const int status = sigsetjmp(escape, 1);
  if (!status) {
    inside = 1;
    std::vector<unsigned> order(size_t(grid_size.x) * grid_size.y * grid_size.z / cluster);
    for (unsigned i = 0; i < order.size(); ++i) order[i] = i;
    shuffle(order);
    for (unsigned i : order) run_cluster(i * cluster, l.dynamic_bytes);
  } else {
    for (unsigned b = 0; b < cluster; ++b)
      for (unsigned i = 0; i < kMostThreads; ++i) blocks[b].fibers[i].started = false;
  }
  inside = 0;
  for (int i = 0; i < 5; ++i) sigaction(signals[i], &before[i], nullptr);
  if (stack_before.ss_flags & SS_DISABLE) stack_before.ss_size = SIGSTKSZ;
  sigaltstack(&stack_before, nullptr);
  return status;
}

}  // namespace

extern "C" {

void emulation_allocate(size_t bytes, Region* region) {
  const size_t page = sysconf(_SC_PAGESIZE), rounded = (bytes + 15) / 16 * 16;
  Region& r = *region;
  r.bytes = bytes;
  r.page_bytes = (rounded + page - 1) / page * page;
  r.map_bytes = r.page_bytes + 2 * kGuard;
  r.map = mapped(r.map_bytes, PROT_NONE, "a tensor");
  r.pages = r.map + kGuard;
  protect(r.pages, r.page_bytes, PROT_READ | PROT_WRITE, "a tensor");
  r.data = r.pages + r.page_bytes - rounded;
  for (char* at = r.pages; at < r.pages + r.page_bytes; ++at)
    if (at < r.data || at >= r.data + bytes) *at = pattern(at);
}

// Where the bytes around the buffer were written: an offset from its begin; 0 when nowhere.
long emulation_written_outside(const Region* region) {
  const Region& r = *region;
  for (const char* at = r.data + r.bytes; at < r.pages + r.page_bytes; ++at)
    if (*at != pattern(at)) return at - r.data;
  for (const char* at = r.data; at-- > r.pages;)
    if (*at != pattern(at)) return at - r.data;
  return 0;
}

void emulation_release(Region* region) { munmap(region->map, region->map_bytes); }

// 0 when the kernel ran to its end; -1 with a message; else the number of the signal that stopped it.
int emulation_launch(Launch* l) {
  int status;
  cluster = l->cluster;
  cooperative = l->cooperative;
  Region shared[kMostBlocks];
  for (unsigned b = 0; b < cluster; ++b) {
    if (!blocks[b].fibers) make_fibers(blocks[b]);
    emulation_allocate(l->dynamic_bytes, &shared[b]);
    blocks[b].dynamic = shared[b].data;
  }
  shared_begin = l->shared_begin;
  shared_end = l->shared_end;
  entry = l->entry;
  arguments = l->arguments;
  grid_size = {l->grid[0], l->grid[1], l->grid[2]};
  block_size = {l->block[0], l->block[1], l->block[2]};
  threads = block_size.x * block_size.y * block_size.z;
  state_of_random = l->seed * 0x9E3779B97F4A7C15ull + 0x2545F4914F6CDD1Dull;
  message = l->message;
  message_size = l->message_size;
  current = nullptr;
  checking = l->checked;
  spans = l->spans;
  span_count = l->span_count;
  last_span = 0;
  own_static = l->own_static;
  dynamic_size = l->dynamic_bytes;
  at_fault = code_at_fault = nullptr;
  scheduler_stack = reinterpret_cast<const char*>(&status) + (64 << 10);
  if (checking) {
    find_image(reinterpret_cast<const char*>(entry), image_begin, image_end);
    find_image(reinterpret_cast<const char*>(&tracks), runtime_begin, runtime_end);
  }
  status = launch(*l);
  l->fault_address = status < 0 ? const_cast<void*>(at_fault) : fault_address;
  l->fault_code = status < 0 ? const_cast<void*>(code_at_fault) : fault_code;
  l->fault_thread = current ? current->number : 0;
  l->fault_block[0] = block_index.x, l->fault_block[1] = block_index.y, l->fault_block[2] = block_index.z;
  for (unsigned b = 0; b < cluster; ++b) {
    if (!status && emulation_written_outside(&shared[b])) {
      snprintf(message, message_size, "a write outside the %zu bytes of dynamic shared memory", l->dynamic_bytes);
      status = -1;
    }
    emulation_release(&shared[b]);
  }
  return status;
}

}  // extern "C"

}  // namespace emulation

// What the compiler calls before each access of a checked kernel, with the size that it has; `unaligned` where the type promises less.
extern "C" {
#define LOOKED_AT(bytes)                                                                                                               \
  void __tsan_read##bytes(void* at) { emulation::look(at, bytes, true, emulation::Access::read, __builtin_return_address(0)); }            \
  void __tsan_write##bytes(void* at) { emulation::look(at, bytes, true, emulation::Access::write, __builtin_return_address(0)); }          \
  void __tsan_unaligned_read##bytes(void* at) { emulation::look(at, bytes, false, emulation::Access::read, __builtin_return_address(0)); } \
  void __tsan_unaligned_write##bytes(void* at) { emulation::look(at, bytes, false, emulation::Access::write, __builtin_return_address(0)); }
LOOKED_AT(1)
LOOKED_AT(2)
LOOKED_AT(4)
LOOKED_AT(8)
LOOKED_AT(16)
void __tsan_read_range(void* at, size_t bytes) { emulation::look(at, bytes, false, emulation::Access::read, __builtin_return_address(0)); }
void __tsan_write_range(void* at, size_t bytes) { emulation::look(at, bytes, false, emulation::Access::write, __builtin_return_address(0)); }
void __tsan_init() {}
}
