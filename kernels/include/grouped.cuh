// What all kernels of grouped convolution share: the sides of a product, the weights, and how rows of x meet rows of the result.
//
// 3 x 3 taps, padding 1. Set by the build: GROUP channels a group; CG = GROUP, or 8 where two groups of 4 make one octet (8
// channels); WARPS a block; TILES of 16 pixels a warp; STRIDE; STORAGE of activations and WEIGHT_STORAGE, which is the same or fp32;
// TRANSPOSED where the weights lead from outputs to inputs. Needs vector.cuh, mma.cuh.
//
// The other side of the product is cut into chunks, an octet of a tap's pixel, (s, octet of the group), in that order.

#define THREADS (32 * WARPS)
#define OCTETS (CG / 8)
#define CHUNKS (3 * OCTETS)
#if STORAGE == 1
#define MMA mma_f16
#else
#define MMA mma_bf16
#endif

#if WEIGHT_STORAGE == 0
typedef float Weight;
#else
typedef unsigned short Weight;
#endif

// Elements between neighbours of weight[out][in][row][column]: contiguous or channels_last.
struct Strides {
  int out, in, row, column;
};

// Two neighbours as a register of a fragment.
__device__ __forceinline__ unsigned int paired(Weight a, Weight b) {
#if WEIGHT_STORAGE == 0
  const float f[VEC] = {a, b, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
  return narrow(f).w[0];
#else
  return (unsigned int)a | (unsigned int)b << 16;
#endif
}

// Sums of 16 pixels by 8 channels, rounded, into the octet at `to` of the first pixel's units.
__device__ __forceinline__ void stage_tile(unsigned int* to, const float (&d)[4], int between) {
  const int lane = threadIdx.x % 32;
  const float f[VEC] = {d[0], d[1], d[2], d[3], 0.f, 0.f, 0.f, 0.f};
  const Vec16 v = narrow(f);
  to[lane / 4 * between + lane % 4] = v.w[0];
  to[(lane / 4 + 8) * between + lane % 4] = v.w[1];
}

// What a block works on at a time: image, column and row it begins with.
struct Item {
  int image, column, segment;
};

__device__ __forceinline__ Item item_of(int item, int images, int strip, int strips, int segments) {
  Item i;
  i.segment = item % segments;
  item /= segments;
  i.column = item % strips * strip;
  i.image = item / strips * images;
  return i;
}

// A row of x meets three rows of the result (one or two with STRIDE 2), which take turns in SLOTS slots: its u-th row meets, with
// tap row r, the one in slot_of(u, r). After PHASES rows slots and taps are the same again, so that all are known when compiled.
#define SLOTS (STRIDE == 1 ? 3 : 2)
#define PHASES (SLOTS * STRIDE)

__device__ __forceinline__ constexpr bool meets(int u, int r) { return (u + 12 - r) % STRIDE == 0; }
__device__ __forceinline__ constexpr int slot_of(int u, int r) { return (u + 12 - r) / STRIDE % SLOTS; }
