// Emulated twin of kernels/include/tensor_map.cuh. The map holds what the driver's would be made of (emulation/device.py). Boxes are copied as
// they are asked for to half of the barriers, and stored so by half of the warpgroups, and by the others when they are waited for, since the
// hardware promises neither.

struct TensorMap {
  int channels, groups, columns, rows, images;  // of the tensor, 16-bit values; channels of a group
  int box_channels, box_columns, box_rows;
  int step, first_column, first_row;            // which of its pixels are the map's
  int unused[21];

  // Where 8 channels are, of the map's pixels, in 16-bit values; -1 outside.
  long long at(int channel, int group, int column, int row, int image) const {
    const int c = first_column + column * step, r = first_row + row * step;
    if (column < 0 || c >= columns || row < 0 || r >= rows || image >= images || group >= groups || channel >= channels) return -1;
    return ((((long long)image * rows + r) * columns + c) * groups + group) * channels + channel;
  }
  int swapped(int pixel, int unit) const { return box_channels == 64 ? unit ^ (pixel & 7) : unit ^ (pixel >> 1 & 3); }
};

inline void emulated_box(
    const TensorMap& map, char* box, char* tensor, bool store, int channel, int group, int column, int row, int image) {
  const int line = map.box_channels * 2;
  if ((box - static_cast<char*>(emulation::dynamic_shared())) % 1024) emulation::fail("a box copied to where swapped lines do not begin");
  for (int p = 0; p < map.box_columns * map.box_rows; ++p)
    for (int u = 0; u < line / 16; ++u) {
      const long long at = map.at(channel + u * 8, group, column + p % map.box_columns, row + p / map.box_columns, image);
      char* unit = box + p * line + map.swapped(p, u) * 16;
      if (at >= 0 && store)
        memcpy(tensor + at * 2, unit, 16);
      else if (at >= 0)
        memcpy(unit, tensor + at * 2, 16);
      else if (!store)
        memset(unit, 0, 16);
    }
}

struct EmulatedCopy {
  const TensorMap* map;
  char *box, *tensor;
  Barrier* full;
  int channel, group, column, row, image;
  unsigned thread;  // that asked for it

  void make() const {
    const emulation::As whoever_asked(thread);
    emulated_box(*map, box, tensor, false, channel, group, column, row, image);
    emulation::arrived(full);
    emulated_bytes(full, map->box_columns * map->box_rows * map->box_channels * 2);
  }
};

static EmulatedCopy emulated_copies[256];  // of a block, not yet made
static int emulated_copy_count = 0;
static unsigned long long emulated_copying = 0;  // whose they are

inline void emulated_bring(const void* barrier) {
  if (emulated_copying != emulation::blocks_run) return;
  int left = 0;
  for (int i = 0; i < emulated_copy_count; ++i)
    if (emulated_copies[i].full == barrier)
      emulated_copies[i].make();
    else
      emulated_copies[left++] = emulated_copies[i];
  emulated_copy_count = left;
}

inline void copy_box(
    void* to, const TensorMap& map, const void* from, Barrier* full, int channel, int group, int column, int row, int image) {
  if (emulated_copying != emulation::blocks_run) emulated_copy_count = 0;
  emulated_copying = emulation::blocks_run;
  emulated_coming = emulated_bring;
  char* tensor = static_cast<char*>(const_cast<void*>(from));
  const EmulatedCopy mine{&map, static_cast<char*>(to), tensor, full, channel, group, column, row, image,
                          emulation::current->number};
  if (reinterpret_cast<uintptr_t>(full) / sizeof(Barrier) % 2 == 0)
    mine.make();
  else if (emulated_copy_count == 256)
    emulation::fail("more than 256 copies of boxes that nobody waits for");
  else
    emulated_copies[emulated_copy_count++] = mine;
}

struct EmulatedStore {
  const TensorMap* map;
  char *to, *box;
  int channel, group, column, row, image;

  void make() const { emulated_box(*map, box, to, true, channel, group, column, row, image); }
};

static EmulatedStore emulated_stores[1024][8];                        // by thread, not yet made
static int emulated_asked[1024], emulated_groups[1024][8], emulated_group_count[1024];  // and how many each closed group has
static unsigned long long emulated_storing[1024];                     // whose they are

inline void emulated_begin_stores(unsigned thread) {
  if (emulated_storing[thread] == emulation::blocks_run) return;
  emulated_storing[thread] = emulation::blocks_run;
  emulated_asked[thread] = emulated_group_count[thread] = 0;
}

inline void store_box(const TensorMap& map, void* to, const void* box, int channel, int group, int column, int row, int image) {
  const unsigned thread = emulation::current->number;
  emulated_begin_stores(thread);
  const EmulatedStore mine{&map, static_cast<char*>(to), static_cast<char*>(const_cast<void*>(box)), channel, group, column, row, image};
  if ((thread / 128 + emulation::block_index.x) % 2)
    mine.make();
  else if (emulated_asked[thread] == 8)
    emulation::fail("more than 8 stores of boxes without a wait");
  else
    emulated_stores[thread][emulated_asked[thread]++] = mine;
}

inline void stores_close() {
  const unsigned thread = emulation::current->number;
  emulated_begin_stores(thread);
  int before = 0;
  for (int g = 0; g < emulated_group_count[thread]; ++g) before += emulated_groups[thread][g];
  emulated_groups[thread][emulated_group_count[thread]++] = emulated_asked[thread] - before;
}

template <int groups>
void stores_wait() {
  const unsigned thread = emulation::current->number;
  emulated_begin_stores(thread);
  while (emulated_group_count[thread] > groups) {
    const int made = emulated_groups[thread][0];
    for (int i = 0; i < made; ++i) emulated_stores[thread][i].make();
    for (int i = made; i < emulated_asked[thread]; ++i) emulated_stores[thread][i - made] = emulated_stores[thread][i];
    emulated_asked[thread] -= made;
    for (int g = 1; g < emulated_group_count[thread]; ++g) emulated_groups[thread][g - 1] = emulated_groups[thread][g];
    --emulated_group_count[thread];
  }
}
