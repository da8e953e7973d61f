// Grouped 3 x 3 convolution of wide groups, and with TRANSPOSED the gradient of its input, on Hopper's tensor cores.
//
//   y[n,oh,ow,o] = sum over (r, s, i) of w[o,i,r,s] * x[n, STRIDE oh - 1 + r, STRIDE ow - 1 + s, first of o's group + i]
//   TRANSPOSED:    dx[n,h,w,i] = sum over (r, s, o of i's group) of w[o,i,r,s] * dy[n, (h + 1 - r) / STRIDE, (w + 1 - s) / STRIDE, o], where
//                  that is whole
//
// Shapes    x: [N, H, W, C], y: [N, OH, OW, C], fp16 or bf16; w: [C, GROUP, 3, 3] in the same dtype or fp32, any strides. Below, x is what
//           is read and y what is made, with TRANSPOSED dy and dx.
// Replaces  aten::convolution with 48 to 64 channels a group (cuDNN slices, transposes and pads them in NHWC).
// Bytes     x once and its halo again (1.43 of it for 14 x 8 pixels a tile), y once. RegNetX's [256,432,14,14] in bf16: 43 + 43 MB.
// Flops     2 * 9 * GROUP a value of y: 18.7 G there. Of a product's 64 rows GROUP are used.
// Bound     tensor cores from GROUP 48 on with STRIDE 1: 0.032 ms there at 790 TFLOP/s of whole products; with STRIDE 2 DRAM bandwidth.
//           Weights are the rows of products and pixels the columns. A thread keeps its part of all weights in registers, 108 of 48 channels,
//           144 of 64; from shared memory they took 2048 bytes of a product's 2048 + 32 * WGMMA_N, where a product of 112 columns has
//           128 * 56 to itself.
// Grid      as many blocks as SMs, as many for each group (BESIDE 1) or two neighbours (2); each walks over tiles of WGMMA_N pixels:
//           HEIGHT rows of 8. Two warpgroups take what comes by turns, so that one's stores run beside the other's products: tiles or,
//           BESIDE 2, the two groups' of each tile, so that sectors that both have a part of are whole in L2 soon. Each has its next DEPTH
//           tiles copied with their halo (TMA), by one of its threads: a warp more would leave a thread 168 registers. A tap is the same operand
//           begun some lines later.
//           Of STRIDE 2 an operand's pixels are every other one of x, so a tile is copied as four PLANES (odd or even rows and columns),
//           each with the taps that meet it. TRANSPOSED, a tile of x makes four CLASSES of y's pixels, each from those taps.
// Numerics  fp32 sums in a fixed order, rounded once; fp32 weights are rounded to x's dtype before. Two runs are bit-equal.
// Limits    padding 1, dilation 1; GROUP a multiple of 8, at most 64; BESIDE 2 with an even number of groups; H * W * C below 2^31; sm_90a.

#define THREADS 256
#define HEIGHT (WGMMA_N / 8)
#define STEPS ((GROUP + 15) / 16)  // of a tap: 16 channels a product; what GROUP does not have of them is zeros on both sides
#define PLANES (STRIDE == 2 && !TRANSPOSED ? 4 : 1)
#define CLASSES (STRIDE == 2 && TRANSPOSED ? 4 : 1)
#define HALO (STRIDE == 1 ? 2 : 1)
#define PITCH (8 + HALO)           // pixels of a tile's row with its halo
#define PIXELS ((HEIGHT + HALO) * PITCH)
#define PLANE_BYTES ((PIXELS * 128 + 1023) / 1024 * 1024)
#define STAGED_BYTES (WGMMA_N * 128)  // of a warpgroup, twice

#include "vector.cuh"
#include "half.cuh"
#include "mbarrier.cuh"
#include "tensor_map.cuh"
#include "wgmma.cuh"
#include "overlap.cuh"

#if WEIGHT_STORAGE == 0
typedef float Weight;
#else
typedef unsigned short Weight;
#endif

__device__ __forceinline__ unsigned int narrowed(float low, float high) {
#if STORAGE == 1
  return narrow_f16x2(low, high);
#else
  return narrow_bf16x2(low, high);
#endif
}

// Two values as x has them.
__device__ __forceinline__ unsigned int paired(Weight low, Weight high) {
#if WEIGHT_STORAGE == 0
  return narrowed(low, high);
#else
  return low | (unsigned int)high << 16;
#endif
}

// How many pixels of x behind the tile's first a tap of a row (or column) stands.
__device__ constexpr int behind(int tap) {
  return STRIDE == 1 ? (TRANSPOSED ? 2 - tap : tap) : tap == (TRANSPOSED ? 0 : 2);
}

// Whether a tap meets a plane, or makes a class: the middle one of a row (or column) the even, the others the odd.
__device__ constexpr bool meets(int tap, int part) {
  return PLANES * CLASSES == 1 || (tap / 3 != 1) * 2 + (tap % 3 != 1) == part;
}

// What a warpgroup works on at a time.
struct Turn {
  int image, row, column, group;
};

template <int count>
struct Maps {
  TensorMap of[count];
};

// The unit of a line, behind the begin of a buffer.
__device__ __forceinline__ int unit_at(int line, int unit) { return line * 128 + (unit ^ (line & 7)) * 16; }

extern "C" __global__ void __launch_bounds__(THREADS, 1) grouped_wide(
    const __grid_constant__ Maps<PLANES> planes, const __grid_constant__ Maps<CLASSES> classes, const Vec16* x, const Weight* weight, Vec16* y,
    int tiles, int strips, int bands, int groups, int weight_out, int weight_in, int weight_row, int weight_column) {
  overlap_launches();
  extern __shared__ __align__(1024) unsigned char shared[];
  const int warpgroup = threadIdx.x / 128, thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  unsigned char* staged = shared + warpgroup * 2 * STAGED_BYTES;
  unsigned char* stages = shared + 4 * STAGED_BYTES + warpgroup * DEPTH * PLANES * PLANE_BYTES;
  Barrier* full = (Barrier*)(shared + 4 * STAGED_BYTES + 2 * DEPTH * PLANES * PLANE_BYTES) + warpgroup * DEPTH;
  const int slabs = groups / BESIDE, line = blockIdx.x / slabs, lines = gridDim.x / slabs;
  const int first_group = blockIdx.x % slabs * BESIDE;
  const int turns = (tiles - line + lines - 1) / lines * BESIDE;  // of this block
  auto turn_of = [&](int turn) -> Turn {
    const int index = line + turn / BESIDE * lines;
    return {index / (strips * bands), index / strips % bands * HEIGHT, index % strips * 8, first_group + turn % BESIDE};
  };

  auto copy = [&](int i) {
    if (i >= turns) return;
    const Turn turn = turn_of(i);
    const int stage = i / 2 % DEPTH;
    arrive_for_bytes(full + stage, PLANES * PIXELS * 128);
    for (int plane = 0; plane < PLANES; ++plane) {  // an odd row's or column's first neighbour is the odd one before
      const int column = turn.column - (PLANES > 1 ? plane % 2 : HALO / 2), row = turn.row - (PLANES > 1 ? plane / 2 : HALO / 2);
      copy_box(stages + (stage * PLANES + plane) * PLANE_BYTES, planes.of[plane], x, full + stage, 0, turn.group, column, row, turn.image);
    }
  };
  if (thread == 0) {
    for (int i = 0; i < DEPTH; ++i) initialise(full + i, 1);
    order_with_hardware();
    for (int i = 0; i < DEPTH; ++i) copy(warpgroup + 2 * i);
  }
  wait_for_part(1 + warpgroup, 128);  // the barriers are there

  // This lane's part of the weights: rows g and g + 8 of its warp's 16, columns 2 t and 2 t + 1 of each 8 (wgmma.cuh). Rows past the last are
  // nobody's, and are given the last one's values.
  unsigned int taps[9][STEPS][4];
  {
    const unsigned int nothing = (unsigned int)(tiles >> 31);  // zero: as a constant it would be made anew at each product
    const int along = TRANSPOSED ? weight_in : weight_out, across = TRANSPOSED ? weight_out : weight_in;
    const Weight* from = weight + (i64)(first_group + (BESIDE > 1 ? warpgroup : 0)) * GROUP * weight_out + lane % 4 * 2 * across;
#pragma unroll
    for (int tap = 0; tap < 9; ++tap) {
      const Weight* at = from + tap / 3 * weight_row + tap % 3 * weight_column;
#pragma unroll
      for (int k = 0; k < STEPS; ++k)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int row = min(warp * 16 + lane / 4 + e % 2 * 8, GROUP - 1), column = k * 16 + e / 2 * 8;
          const Weight* two = at + row * along + (column < GROUP ? column : 0) * across;
          taps[tap][k][e] = paired(two[0], two[across]) & (column < GROUP ? 0xffffffffu : nothing);
        }
      if (tap % 3 == 2) __syncwarp();  // so that no more loads than registers can hold are under way
    }
  }

  for (int i = warpgroup; i < turns; i += 2) {
    const Turn turn = turn_of(i);
#pragma unroll
    for (int made = 0; made < CLASSES; ++made) {
      float d[WGMMA_N / 2];
      const int stage = i / 2 % DEPTH;
      if (made == 0) wait(full + stage, i / 2 / DEPTH % 2);
      products_begin();
      bool sets = true;
#pragma unroll
      for (int plane = 0; plane < PLANES; ++plane) {
        const Operand pixels = operand_at<128>(stages + (stage * PLANES + plane) * PLANE_BYTES, PITCH * 128);
#pragma unroll
        for (int tap = 0; tap < 9; ++tap) {
          if (!meets(tap, plane + made)) continue;
#pragma unroll
          for (int k = 0; k < STEPS; ++k) {
            wgmma_held<0>(
                d, taps[tap][k], operand_behind(pixels, (behind(tap / 3) * PITCH + behind(tap % 3)) * 128 + k * 32), sets ? 0 : 1);
            sets = false;
          }
        }
      }
      products_close();
      products_wait<0>();
      unsigned char* box = staged + (i / 2 * CLASSES + made) % 2 * STAGED_BYTES;
      if (thread == 0) stores_wait<1>();
      wait_for_part(1 + warpgroup, 128);  // the other warps' products are made, and the box that was stored from here is read
      if (made + 1 == CLASSES && thread == 0) copy(i + 2 * DEPTH);
      if (warp * 16 < GROUP) {
#pragma unroll
        for (int j = 0; j < HEIGHT; j += 2) {
          const float* v = d + 4 * j;
          const unsigned int turned[4] = {narrowed(v[0], v[1]), narrowed(v[2], v[3]), narrowed(v[4], v[5]), narrowed(v[6], v[7])};
          stmatrix_x4_trans(box + unit_at((j + lane / 16) * 8 + lane % 8, warp * 2 + lane / 8 % 2), turned);
        }
      }
      order_with_hardware();
      wait_for_part(1 + warpgroup, 128);
      if (thread == 0) {
        store_box(classes.of[made], y, box, 0, turn.group, turn.column, turn.row, turn.image);
        stores_close();
      }
    }
  }
  if (thread == 0) stores_wait<0>();
}
