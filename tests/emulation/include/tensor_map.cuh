// Emulated twin of kernels/include/tensor_map.cuh. The map holds what the driver's would be made of (emulation/device.py).

struct TensorMap {
  int channels, columns, rows, images;     // of the tensor, 16-bit values
  int box_channels, box_columns, box_rows;
  int unused[25];
};

inline void copy_box(
    void* to, const TensorMap& map, const void* from, Barrier* full, int channel, int column, int row, int image) {
  const int line = map.box_channels * 2, units = line / 16;
  const int offset = int(static_cast<char*>(to) - static_cast<char*>(emulation::dynamic_shared()));
  if (offset % 1024) emulation::fail("a box copied to where swapped lines do not begin");
  for (int p = 0; p < map.box_columns * map.box_rows; ++p) {
    const int c = column + p % map.box_columns, r = row + p / map.box_columns;
    for (int u = 0; u < units; ++u) {
      const int first = channel + u * 8;
      const bool inside = c >= 0 && c < map.columns && r >= 0 && r < map.rows && image < map.images && first < map.channels;
      const int swapped = line == 128 ? u ^ (p & 7) : u ^ (p >> 1 & 3);
      char* at = static_cast<char*>(to) + p * line + swapped * 16;
      const long long pixel = ((long long)image * map.rows + r) * map.columns + c;
      if (inside)
        memcpy(at, static_cast<const unsigned short*>(from) + pixel * map.channels + first, 16);
      else
        memset(at, 0, 16);
    }
  }
  emulated_bytes(full, map.box_columns * map.box_rows * line);
}
