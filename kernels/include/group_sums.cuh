// Sums of a per-channel quantity over the channels of each group, for the groups that a channel tile touches.
//
// `lanes` threads (a power of two up to THREADS, the host's choice: as many as the block has for each of the tile's groups)
// share a group. Where they are more than its channels, several share a channel's partial sums: until the sums are joined
// nothing else of the block can go on.
// Include channel_reduce.cuh first.

struct Groups {
  int first, last;  // groups that hold a channel of this block's tile, both inclusive
};

__device__ __forceinline__ Groups groups_of(int tile, int channels, int per_group) {
  Groups g;
  const int begin = blockIdx.y * tile * VEC;
  const int end = begin + tile * VEC < channels ? begin + tile * VEC : channels;
  g.first = begin / per_group;
  g.last = (end - 1) / per_group;
  return g;
}

// For each group: a, b = sums of term(group, channel, strip, strips, a, b) over its channels and over the strips of their partial
// sums (strip, strip + strips ...), then done(group, a, b) in one thread.
template <class Term, class Done>
__device__ __forceinline__ void sum_groups(const Groups& groups, int per_group, int lanes, Term term, Done done) {
  __shared__ double across[2][THREADS / 32];
  const int lane = threadIdx.x % lanes, warp = threadIdx.x / 32;
  const int strips = lanes / per_group > 1 ? lanes / per_group : 1;
  // Every thread takes every turn: the shuffles need whole warps.
  for (int base = groups.first; base <= groups.last; base += THREADS / lanes) {
    const int group = base + threadIdx.x / lanes;
    double a = 0.0, b = 0.0;
    if (group <= groups.last)
      for (int i = lane; i < per_group * strips; i += lanes)
        term(group, group * per_group + i % per_group, i / per_group, strips, a, b);
    for (int o = (lanes < 32 ? lanes : 32) / 2; o > 0; o /= 2) {
      a += __shfl_xor_sync(0xffffffffu, a, o);
      b += __shfl_xor_sync(0xffffffffu, b, o);
    }
    if (lanes > 32) {
      if (threadIdx.x % 32 == 0) {
        across[0][warp] = a;
        across[1][warp] = b;
      }
      __syncthreads();
      if (lane == 0)
        for (int w = 1; w < lanes / 32; ++w) {
          a += across[0][warp + w];
          b += across[1][warp + w];
        }
      __syncthreads();  // before the next turn writes
    }
    if (group <= groups.last && lane == 0) done(group, a, b);
  }
}
