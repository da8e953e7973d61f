// Moments of a thread's CH channels, and of a block whose threads are [ty][tx], tx over `tile` channel vectors (depthwise.cuh). Needs
// channels.cuh and moments.cuh.

struct ThreadMoments {
  float sum[CH], square[CH];  // of what is stored less `shift`
  Chunk shift;                // the thread's first pixel, as it is stored
  int count;                  // pixels
};

__device__ __forceinline__ ThreadMoments no_moments() {
  ThreadMoments of;
#pragma unroll
  for (int j = 0; j < CH; ++j) of.sum[j] = of.square[j] = 0.f;
  of.shift = zero_chunk();
  of.count = 0;
  return of;
}

// Of pixels of a row those whose bit is set in `wanted`, of which the first always is.
template <int columns>
__device__ __forceinline__ void add_pixels(ThreadMoments& of, const float (&values)[columns][CH], unsigned int wanted) {
  float shift[CH];
  if (of.count == 0) {
    widen(narrow(values[0]), shift);
#pragma unroll
    for (int j = 0; j < CH; ++j) shift[j] = finite_or_zero(shift[j]);
    of.shift = narrow(shift);
  }
  widen(of.shift, shift);
#pragma unroll
  for (int v = 0; v < columns; ++v) {
    float f[CH];
    widen(narrow(values[v]), f);
    if (!(wanted >> v & 1u)) continue;
#pragma unroll
    for (int j = 0; j < CH; ++j) {
      const float d = f[j] - shift[j];
      of.sum[j] += d;
      of.square[j] += d * d;
    }
  }
  of.count += __popc(wanted);
}

// The block's, as its part [3][channels] of `moments`. All threads call it, those without pixels too. `shared`: 3 * CH * THREADS
// floats, which nobody uses any more.
__device__ __forceinline__ void leave_block_moments(
    const ThreadMoments& of, float* shared, float* moments, int tile, int strips_per_pass, int channels) {
  float shift[CH];
  widen(of.shift, shift);
#pragma unroll
  for (int j = 0; j < CH; ++j) {  // [statistic][channel of a thread][thread]: neighbouring threads write neighbouring banks
    const float mean = of.count ? of.sum[j] / (float)of.count : 0.f;
    const float m2 = of.square[j] - of.sum[j] * mean;
    shared[j * THREADS + threadIdx.x] = (float)of.count;
    shared[(CH + j) * THREADS + threadIdx.x] = of.count ? shift[j] + mean : 0.f;
    shared[(2 * CH + j) * THREADS + threadIdx.x] = m2 > 0.f ? m2 : (m2 != m2 ? m2 : 0.f);
  }
  __syncthreads();
  for (int o = threadIdx.x; o < tile * CH; o += THREADS) {
    const int tx = o % tile, j = o / tile, channel = (blockIdx.y * tile + tx) * CH + j;
    if (channel >= channels) continue;
    const float* at = shared + j * THREADS + tx;
    const float about = finite_or_zero(at[CH * THREADS]);
    double count = 0.0, sum = 0.0, square = 0.0;  // of distances from `about`
    for (int ty = 0; ty < strips_per_pass; ++ty) {
      const float* mine = at + ty * tile;
      const double n = mine[0], d = (double)mine[CH * THREADS] - (double)about;
      if (n == 0.0) continue;
      count += n;
      sum += n * d;
      square += (double)mine[2 * CH * THREADS] + n * d * d;
    }
    const double mean = count > 0.0 ? sum / count : 0.0, m2 = square - sum * mean;
    float* to = moments + (i64)blockIdx.x * 3 * channels + channel;
    to[0] = (float)count;
    to[channels] = count > 0.0 ? (float)(mean + (double)about) : 0.f;
    to[2 * channels] = m2 > 0.0 ? (float)m2 : (m2 != m2 ? (float)m2 : 0.f);
  }
}
