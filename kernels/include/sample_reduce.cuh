// Sums per sample and channel over the rows (pixels) of a block: COUNT statistics of VEC channels a thread, in a fixed order.
//
// Block and grid as in channel_reduce.cuh, with the sample as the grid's third dimension:
// grid (splits of the sample's rows, channel tiles, samples). A block writes its own row of partial sums and nobody waits: the kernel
// that needs the sums adds the few splits itself. Include vector.cuh and channel_reduce.cuh first.

// The rows [first, end) of a sample that split `split` of `splits` covers.
struct Rows {
  int first, end;
};

__device__ __forceinline__ Rows rows_of(int split, int splits, int rows) {
  const int chunk = (rows + splits - 1) / splits;
  Rows r;
  r.first = split * chunk;
  r.end = r.first + chunk < rows ? r.first + chunk : rows;
  return r;
}

// Writes out[statistic * channels + channel] for the channels of this block's tile. `shared`: COUNT * VEC * THREADS floats.
template <int COUNT>
__device__ __forceinline__ void reduce_sample(
    const Tile& t, int tile, int vectors, const float (&sum)[COUNT][VEC], float* out, float* shared) {
  const int width = tile * VEC, channels = vectors * VEC, first = blockIdx.y * width;
  if (t.ty < t.rows_per_pass) {
#pragma unroll
    for (int s = 0; s < COUNT; ++s)
#pragma unroll
      for (int j = 0; j < VEC; ++j) shared[((t.ty * COUNT + s) * VEC + j) * tile + t.tx] = sum[s][j];
  }
  __syncthreads();
  for (int o = threadIdx.x; o < COUNT * width; o += THREADS) {
    float total = 0.f;
#pragma unroll 8
    for (int r = 0; r < t.rows_per_pass; ++r) total += shared[r * COUNT * width + o];
    const int channel = first + o % tile * VEC + o % width / tile;
    if (channel < channels) out[o / width * channels + channel] = total;
  }
}
