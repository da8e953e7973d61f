// Looks at every read and write of an emulated kernel, as the compiler reports them (-fsanitize=thread, whose runtime this is). Part of
// runtime.cpp, inside its namespaces: it knows the blocks that run and their fibers.
//
// An access must lie in bytes of a tensor that the launch was given, in a shared array of the entry, in the launch's dynamic shared memory, on a
// stack, or in a table of the source; and at a multiple of its size. In shared memory two accesses of a byte, one of them a write, must have an
// order: threads know what others did before the last barrier of the block, lanes before a __syncwarp, threads that waited at an mbarrier or at a
// barrier of a part of the block what those did that arrived there. A shuffle orders nothing. A byte that a cp.async goes to is nobody's until
// that has been waited for.
//
// Of the readers of a byte the last one and the last other one are known: a write too early is missed behind a third reader. Races of global
// memory and between blocks of a cluster are not looked for, nor a missing fence between plain writes and what tensor cores and bulk copies read.

struct Span {  // of a tensor's storage
  const char* begin;
  size_t bytes;
  const unsigned char* given;  // 1 where a byte belongs to a tensor that was passed
};

struct Cell {  // a byte of shared memory; a clock of 0: never
  uint32_t written, read[2];
  uint16_t writer, reader[2];
  bool atomic, copying, synchronises;
  const void* code;  // of the write
};

using Clocks = std::vector<uint32_t>;  // by thread

struct Track {              // of one block that runs
  std::vector<Cell> cells;  // of the static section, then of dynamic shared memory
  Clocks clock, base;       // what a thread is at; what all know of it
  std::vector<std::array<uint32_t, 32>> lanes;   // what a thread knows of its warp
  std::vector<std::shared_ptr<Clocks>> further;  // and of the block beyond that
  std::map<const void*, Clocks> objects;         // what those knew who arrived there
  std::vector<size_t> marked;                    // cells of cp.async copies and of barriers
};

bool checking;
const Span* spans;
unsigned span_count, last_span;
const unsigned char* own_static;  // 1 where a byte of the static section is of an array of the entry
size_t dynamic_size;
const char *image_begin, *image_end, *runtime_begin, *runtime_end, *scheduler_stack;
const void* at_fault;  // the address and the code of what was refused
const void* code_at_fault;
Track tracks[kMostBlocks];

// What the launcher makes a text of.
[[noreturn]] void refuse(const char* what, const void* at, const void* code) {
  at_fault = at;
  code_at_fault = code;
  fail("%s", what);
}

void begin_track(Track& k) {
  if (!checking) return;
  if (k.clock.empty()) {
    k.clock.assign(kMostThreads, 0);
    k.lanes.resize(kMostThreads);
    k.further.resize(kMostThreads);
  }
  k.cells.resize(shared_end - shared_begin + dynamic_size);
  for (size_t at : k.marked)
    if (at < k.cells.size()) k.cells[at].copying = k.cells[at].synchronises = false;
  k.marked.clear();
  k.objects.clear();
}

// All threads of the block know of each other's past.
void order_block(Track& k) {
  if (!checking) return;
  k.base = k.clock;
  for (unsigned t = 0; t < threads; ++t) {
    ++k.clock[t];
    k.further[t].reset();
  }
}

void order_lanes(Track& k, unsigned first, unsigned present) {
  if (!checking) return;
  std::array<uint32_t, 32> joint{};
  std::shared_ptr<Clocks> further, *one = nullptr;
  bool alike = true;
  for (unsigned i = 0; i < 32; ++i) {
    if (!(present >> i & 1u)) continue;
    for (unsigned j = 0; j < 32; ++j) joint[j] = std::max(joint[j], k.lanes[first + i][j]);
    alike &= !one || *one == k.further[first + i];
    one = &k.further[first + i];
  }
  if (!alike) {
    further = std::make_shared<Clocks>(kMostThreads, 0);
    for (unsigned i = 0; i < 32; ++i)
      if (present >> i & 1u && k.further[first + i])
        for (unsigned u = 0; u < threads; ++u) (*further)[u] = std::max((*further)[u], (*k.further[first + i])[u]);
  }
  for (unsigned i = 0; i < 32; ++i)
    if (present >> i & 1u) joint[i] = std::max(joint[i], k.clock[first + i]++);
  for (unsigned i = 0; i < 32; ++i) {
    if (!(present >> i & 1u)) continue;
    k.lanes[first + i] = joint;
    if (!alike) k.further[first + i] = further;
  }
}

uint32_t known(const Track& k, unsigned t, unsigned u) {
  uint32_t found = t == u ? k.clock[t] : k.base[u];
  if (t / 32 == u / 32) found = std::max(found, k.lanes[t][u % 32]);
  if (k.further[t]) found = std::max(found, (*k.further[t])[u]);
  return found;
}

void arrive_at(const void* object) {
  if (!checking) return;
  Track& k = tracks[here];
  const unsigned t = current->number;
  Clocks& all = k.objects[object];
  all.resize(kMostThreads);
  for (unsigned u = 0; u < threads; ++u) all[u] = std::max(all[u], known(k, t, u));
  ++k.clock[t];
}

void leave(const void* object) {
  if (!checking) return;
  Track& k = tracks[here];
  const auto found = k.objects.find(object);
  if (found == k.objects.end()) return;
  auto mine = std::make_shared<Clocks>(found->second);
  if (const auto& before = k.further[current->number])
    for (unsigned u = 0; u < threads; ++u) (*mine)[u] = std::max((*mine)[u], (*before)[u]);
  k.further[current->number] = mine;
}

enum class Access { read, write, atomic, copy };

void touch_shared(size_t first, size_t bytes, Access access, const void* at, const void* code) {
  Track& k = tracks[here];
  const unsigned t = current->number;
  const bool writes = access != Access::read;
  uint32_t before = 0;  // the last that was found to be known: neighbours mostly have the same
  uint16_t whose = 0;
  const auto behind = [&](uint32_t clock, uint16_t thread) {
    if (clock == before && thread == whose) return true;
    if (clock > known(k, t, thread)) return false;
    before = clock, whose = thread;
    return true;
  };
  for (size_t i = first; i < first + bytes; ++i) {
    Cell& c = k.cells[i];
    if (c.synchronises) continue;
    if (c.copying && access != Access::copy) refuse("touches shared memory that a cp.async goes to, which was not waited for", at, code);
    const bool both = access == Access::atomic && c.atomic;
    if (!behind(c.written, c.writer) && !both)
      refuse(writes ? "writes shared memory without a barrier behind another thread's write" :
                      "reads shared memory without a barrier behind another thread's write", at, code);
    if (!writes) {
      if (c.reader[0] != t) c.reader[1] = c.reader[0], c.read[1] = c.read[0];
      c.reader[0] = t, c.read[0] = k.clock[t];
      continue;
    }
    for (int r = 0; r < 2; ++r)
      if (!behind(c.read[r], c.reader[r])) refuse("writes shared memory without a barrier behind another thread's read", at, code);
    c.writer = t, c.written = k.clock[t], c.atomic = access == Access::atomic, c.code = code;
    c.read[0] = c.read[1] = 0;
  }
}

// Where in the tracked cells of the block whose turn it is an address lies; -1 elsewhere.
ptrdiff_t cell_of(const char* at) {
  if (at >= shared_begin && at < shared_end) return at - shared_begin;
  const ptrdiff_t far = at - dynamic;
  return far >= 0 && far < ptrdiff_t(dynamic_size) ? (shared_end - shared_begin) + far : -1;
}

bool elsewhere(const char* at) {  // where nobody's order is looked at
  const char* frame = static_cast<const char*>(__builtin_frame_address(0));
  if (frame < scheduler_stack && frame > scheduler_stack - (8 << 20) && at >= frame && at < scheduler_stack) return true;
  for (unsigned b = 0; b < cluster; ++b) {
    const Block& block = blocks[b];
    if (at >= reinterpret_cast<const char*>(block.fibers) && at < reinterpret_cast<const char*>(block.fibers + kMostThreads)) return true;
    if (at >= block.stacks && at < block.stacks + kStack * kMostThreads) return true;
    if (b == here) continue;
    if (at >= block.dynamic && at < block.dynamic + dynamic_size) return true;
    if (at >= block.shared.data() && at < block.shared.data() + block.shared.size()) return true;
  }
  return (at >= image_begin && at < image_end) || (at >= runtime_begin && at < runtime_end);
}

void look(const void* address, size_t bytes, bool aligned, Access access, const void* code) {
  if (!checking || !inside || !current || !bytes) return;
  const char* at = static_cast<const char*>(address);
  const bool writes = access != Access::read;
  if (aligned && reinterpret_cast<uintptr_t>(at) % bytes) refuse("reads or writes at an address that is no multiple of the access", at, code);
  const ptrdiff_t cell = cell_of(at);
  if (cell >= 0) {
    const ptrdiff_t section = shared_end - shared_begin;
    const ptrdiff_t end = cell < section ? section : section + dynamic_size;
    if (cell + ptrdiff_t(bytes) > end) refuse("leaves shared memory", at, code);
    for (size_t i = 0; cell < section && i < bytes; ++i)
      if (!own_static[cell + i]) refuse(writes ? "writes between two shared arrays" : "reads between two shared arrays", at, code);
    return touch_shared(cell, bytes, access, at, code);
  }
  for (unsigned n = 0; n < span_count; ++n) {
    const unsigned s = (last_span + n) % span_count;
    const Span& span = spans[s];
    if (at < span.begin || at >= span.begin + span.bytes) continue;
    last_span = s;
    for (size_t i = 0; i < bytes; ++i)
      if (at + i >= span.begin + span.bytes || !span.given[at + i - span.begin]) refuse(writes ? "writes" : "reads", at + i, code);
    return;
  }
  if (elsewhere(at)) return;
  if (at >= dynamic - kGuard && at < dynamic + dynamic_size + kGuard) refuse("leaves the launch's dynamic shared memory", at, code);
  refuse(writes ? "writes" : "reads", at, code);
}

void mark(const void* address, size_t bytes, bool Cell::*what, bool value) {
  const ptrdiff_t cell = cell_of(static_cast<const char*>(address));
  if (!checking || cell < 0) return;
  Track& k = tracks[here];
  for (size_t i = cell; i < cell + bytes && i < k.cells.size(); ++i) {
    k.cells[i].*what = value;
    k.marked.push_back(i);
  }
}
