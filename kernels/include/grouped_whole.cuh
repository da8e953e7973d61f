// Grouped convolution by warps that have whole groups: a block is BESIDE neighbouring groups by ACROSS times TILES * 16 pixels of a row,
// `strip` columns of `images` images side by side, and walks down the rows. Include grouped.cuh and mma_k8.cuh first.
//
// What a warp reads from shared memory once, a tile's fragment, goes to all of the group's octets and to three rows: a block that
// gives each octet to a warp of its own reads it OCTETS times, which takes shared memory as long as the products take the tensor
// cores. Rows come and go by all of the block's threads, BESIDE groups of a pixel at a time: by a group of 24 channels, 48 bytes,
// half of the sectors would be asked for twice and written in halves.
//
// A pixel takes PIXEL units of 16 bytes, an odd number: the 8 pixels of an ldmatrix matrix then lie in 32 different banks. A step of
// 16 is two chunks; an odd last one is a product of depth 8.

#define SLAB (BESIDE * OCTETS)  // octets of a pixel that a block has
#define PIXEL (SLAB | 1)
#define ROW_PIXELS (ACROSS * TILES * 16)
#define PAIRS (CHUNKS / 2)
#define ODD (CHUNKS % 2)
#define MATRICES (CHUNKS * OCTETS)  // of 8 x 8 weights, (chunk, octet of the result)
#define TAP_UNITS (BESIDE * MATRICES * 8)
#if STORAGE == 1
#define MMA_K8 mma_f16_k8
#else
#define MMA_K8 mma_bf16_k8
#endif

typedef float Sums[TILES][OCTETS][4];  // a warp's of a row

__device__ __forceinline__ void clear(Sums& sum) {
#pragma unroll
  for (int i = 0; i < TILES * OCTETS * 4; ++i) sum[i / (OCTETS * 4)][i / 4 % OCTETS][i % 4] = 0.f;
}

__device__ __forceinline__ void move(Sums& to, const Sums& from) {
#pragma unroll
  for (int i = 0; i < TILES * OCTETS * 4; ++i)
    to[i / (OCTETS * 4)][i / 4 % OCTETS][i % 4] = from[i / (OCTETS * 4)][i / 4 % OCTETS][i % 4];
}

// Where this thread's k-th vector of a row of pixels lies: its pixel, its octet of the slab, and its unit in shared memory.
struct Place {
  int pixel, octet, unit;
};

__device__ __forceinline__ Place place_of(int k) {
  const int v = k * THREADS + threadIdx.x;
  return {v / SLAB, v % SLAB, v / SLAB * PIXEL + v % SLAB};
}

// The weights of all three tap rows as halves of fragments, by way of `space`, TAP_UNITS of the block. Warps of a group share its loads.
// They pass as they lie in channels_last, rounded, a tap row at a time: [out][column][in], an odd number of units an out. For the
// gradient of stride 1 taps are turned about.
__device__ __forceinline__ void load_taps(
    unsigned int (&taps)[3][MATRICES], Vec16* space, const Weight* weight, const Strides& at, int group, int octets) {
  struct __align__(4 * sizeof(Weight)) Four { Weight w[4]; };
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = warp / BESIDE * 32 + lane;
  const int fours = CG * 3 * CG / 4, each = (fours + 32 * ACROSS - 1) / (32 * ACROSS);
  const bool turned = TRANSPOSED && STRIDE == 1, any = group * OCTETS < octets;
  const bool dense = at.in == 1 && at.column == CG && at.out % 4 == 0 && at.row % 4 == 0 &&
                     (unsigned long long)weight % sizeof(Four) == 0;
  space += warp % BESIDE * MATRICES * 8;
  Four held[3][each];
#pragma unroll
  for (int r = 0; r < 3; ++r)
#pragma unroll
    for (int k = 0; k < each; ++k) {
      const int e = first + k * 32 * ACROSS, out = e / (3 * CG / 4), column = e / (CG / 4) % 3, in = e % (CG / 4) * 4;
      const Weight* from = weight + (group * GROUP + out) * at.out + (turned ? 2 - r : r) * at.row + column * at.column + in * at.in;
      if (!any || e >= fours) continue;
      if (dense) {
        held[r][k] = *(const Four*)from;
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) held[r][k].w[i] = from[i * at.in];
      }
    }
#pragma unroll
  for (int r = 0; r < 3; ++r) {
#pragma unroll
    for (int k = 0; k < each; ++k) {
      const int e = first + k * 32 * ACROSS;
      unsigned int* words = (unsigned int*)space + 2 * e;
      if (!any || e >= fours) continue;
      words[0] = paired(held[r][k].w[0], held[r][k].w[1]);
      words[1] = paired(held[r][k].w[2], held[r][k].w[3]);
    }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < MATRICES; m += 4) {
      const int mine = min(m + lane / 8, MATRICES - 1);  // this lane's matrix: chunk and octet of the result
      const int s = turned ? 2 - mine / OCTETS / OCTETS : mine / OCTETS / OCTETS, c = mine / OCTETS % OCTETS, n = mine % OCTETS;
      unsigned int four[4];
      if (TRANSPOSED) {
        ldmatrix_x4_trans(four, space + (c * 8 + lane % 8) * CHUNKS + s * OCTETS + n);
      } else {
        ldmatrix_x4(four, space + (n * 8 + lane % 8) * CHUNKS + s * OCTETS + c);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (m + i < MATRICES) taps[r][m + i] = four[i];
    }
    __syncthreads();
  }
}

// A warp's sums, rounded, to the units of their pixels: of `parity` out of `parities` columns.
template <int parities>
__device__ __forceinline__ void stage_sums(Vec16* staged, const Sums& sum, int parity) {
  const int warp = threadIdx.x / 32, first = warp / BESIDE * TILES * 16;
#pragma unroll
  for (int i = 0; i < TILES; ++i)
#pragma unroll
    for (int n = 0; n < OCTETS; ++n)
      stage_tile(
          (unsigned int*)(staged + ((first + i * 16) * parities + parity) * PIXEL + warp % BESIDE * OCTETS + n), sum[i][n],
          4 * parities * PIXEL);
}
