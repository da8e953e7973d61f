// Where padding by an image's own values takes them from, along one axis. MODE is set by the build: 0 reflect, 1 replicate, 2 circular.

// The element that output `at - before` (counted from the image's first element) is a copy of. Padding is no wider than aten allows.
__device__ __forceinline__ int inside(int at, int size) {
#if MODE == 0
  return at < 0 ? -at : (at >= size ? 2 * (size - 1) - at : at);
#elif MODE == 1
  return at < 0 ? 0 : (at >= size ? size - 1 : at);
#else
  return at < 0 ? at + size : (at >= size ? at - size : at);
#endif
}

// Calls `take` with each output, counted from the first one, that is a copy of element i: i + before first.
template <class Take>
__device__ __forceinline__ void each_copy(int i, int size, int before, int out_size, Take take) {
  take(i + before);
#if MODE == 0
  if (i >= 1 && i <= before) take(before - i);
  const int mirrored = 2 * (size - 1) - i + before;
  if (i <= size - 2 && mirrored < out_size) take(mirrored);
#elif MODE == 1
  if (i == 0)
    for (int o = 0; o < before; ++o) take(o);
  if (i == size - 1)
    for (int o = size + before; o < out_size; ++o) take(o);
#else
  if (i + before + size < out_size) take(i + before + size);
  if (i + before - size >= 0) take(i + before - size);
#endif
}
