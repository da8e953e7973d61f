// Sums of a per-channel quantity over the channels of each group, for the groups that a channel tile touches.
//
// `lanes` threads (a power of two up to 32, the host's choice: about as many as a group has channels) share a group.
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

// For each group: a, b = sums of term(group, channel, a, b) over its channels, then done(group, a, b) in one thread.
template <class Term, class Done>
__device__ __forceinline__ void sum_groups(const Groups& groups, int per_group, int lanes, Term term, Done done) {
  const int lane = threadIdx.x % lanes;
  // Every thread takes every turn: the shuffles need whole warps.
  for (int base = groups.first; base <= groups.last; base += THREADS / lanes) {
    const int group = base + threadIdx.x / lanes;
    double a = 0.0, b = 0.0;
    if (group <= groups.last)
      for (int i = lane; i < per_group; i += lanes) term(group, group * per_group + i, a, b);
    for (int o = lanes / 2; o > 0; o /= 2) {
      a += __shfl_xor_sync(0xffffffffu, a, o);
      b += __shfl_xor_sync(0xffffffffu, b, o);
    }
    if (group <= groups.last && lane == 0) done(group, a, b);
  }
}
