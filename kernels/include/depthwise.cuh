// What the depthwise kernels share: the tile a block owns, the strip of pixels a thread walks down, the weights of a tile.
//
// K taps a side, STRIDE 1 or 2, CH channels a thread, STRIP pixels a row of its strip, THREADS a block: set by the build.
//
// A block covers `tile` neighbouring channel vectors (tx) and THREADS / tile strips at a time (ty): neighbouring threads read
// neighbouring channels of one pixel. With STRIDE 1 a dilation d splits the image into d x d interleaved lattices, each an
// undilated convolution of its own, so the kernels only know a step between neighbours; with STRIDE 2 there is no dilation.

struct Tile {
  int tx, ty, strips_per_pass, vector;
  bool active;
};

__device__ __forceinline__ Tile tile_of(int tile, int vectors) {
  Tile t;
  t.tx = threadIdx.x % tile;
  t.ty = threadIdx.x / tile;
  t.strips_per_pass = THREADS / tile;
  t.vector = blockIdx.y * tile + t.tx;
  t.active = t.ty < t.strips_per_pass && t.vector < vectors;
  return t;
}

struct Strip {
  int n, row_phase, column_phase, segment, column;  // column: first of the strip, counted on its lattice
};

__device__ __forceinline__ Strip strip_of(i64 item, int strips, int dilation, int segments) {
  Strip s;
  s.column = (int)(item % strips) * STRIP;
  item /= strips;
  s.column_phase = (int)(item % dilation);
  item /= dilation;
  s.row_phase = (int)(item % dilation);
  item /= dilation;
  s.segment = (int)(item % segments);
  s.n = (int)(item / segments);
  return s;
}

__device__ __forceinline__ int ceil_of(int a, int b) { return a <= 0 ? 0 : (a + b - 1) / b; }

// Taps of a channel vector in shared memory: [K][ROW], a row padded to 16 bytes, and vectors an odd number of 16-byte units
// apart: a quarter warp then reads 8 x 16 bytes from 32 different banks.
#define ROW ((K * CH + 3) / 4 * 4)
#define TAPS_OF_VECTOR (K * ROW + (K * ROW / 4 % 2 == 0 ? 4 : 0))

// weight: [C, K, K] as the parameter lies in memory. A tile's weights are one contiguous piece of it.
__device__ __forceinline__ void stage_taps(float* taps, const Weight* weight, int tile, int vectors, bool flip) {
  const int first = blockIdx.y * tile;
  const int count = (vectors - first < tile ? vectors - first : tile) * CH * K * K;
  const Weight* from = weight + (i64)first * CH * K * K;
  for (int o = threadIdx.x; o < count; o += THREADS) {
    const int c = o / (K * K), at = flip ? K * K - 1 - o % (K * K) : o % (K * K);
    taps[c / CH * TAPS_OF_VECTOR + at / K * ROW + at % K * CH + c % CH] = widen_weight(from[o]);
  }
}

// One row of taps: K x CH values.
__device__ __forceinline__ void tap_row(const float* taps, int r, float (&w)[ROW]) {
#pragma unroll
  for (int i = 0; i < ROW / 4; ++i) {
    const float4 v = ((const float4*)(taps + r * ROW))[i];
    w[4 * i] = v.x;
    w[4 * i + 1] = v.y;
    w[4 * i + 2] = v.z;
    w[4 * i + 3] = v.w;
  }
}
