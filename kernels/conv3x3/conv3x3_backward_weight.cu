// Gradient of the weight of a 3 x 3 convolution, dense or of wide groups, on Hopper's tensor cores: partial sums of each block, then their sum.
//
//   dweight[o,i,r,s] = sum over (n, h, w) of dy[n,h,w,o] * x[n, STRIDE h - 1 + r, STRIDE w - 1 + s, i]
//
// Shapes    x: [N, H, W, groups * I], dy: [N, OH, OW, groups * O], fp16 or bf16; dweight: [groups * O, I, 3, 3] in the same dtype or fp32,
//           any strides; i and o are of one group. partial: [gridDim.x][4 * QUARTERS] fp32.
// Replaces  aten::convolution_backward of the weight (cuDNN's implicit product, with its zeroed workspace and its own last sum).
// Bytes     x and dy once for each block of 64 of the other's channels, with the halo of what is windowed. [128,64,32,32] to 64 in bf16:
//           34 MB, and 19.5 MB of partial sums that stay in L2.
// Flops     18 * I * O a pixel: 9.7 G there. Of groups of 48 channels three quarters of the rows and of the columns are used.
// Bound     tensor cores: 0.012 ms there at 800 TFLOP/s. Then power: at 56x56 and up they are busy for 0.96 and more of the clocks.
//           Shared memory: a product of 64 x 3 COLUMNS x 16 reads 2048 bytes of the one and 96 * COLUMNS of the other; with 64 columns that
//           is 8 KB in 96 clocks, where 128 bytes a clock can be had.
// Grid      jobs x lines of blocks. A job has 64 channels of the one tensor, taken as it is (the rows of products), and COLUMNS of the
//           other, through the window of the taps (the columns), of one group; a line every so many tiles of ROWS rows by WIDE strips of 8
//           pixels, which a thread has copied into STAGES stages. Three warpgroups have a row of taps each: one product takes its three
//           taps, since the columns behind a pixel's are the next pixel's. What is windowed is x or, with X_WINDOWED 0, dy, whose taps are
//           turned. Of STRIDE 2 x is copied as four planes (odd or even rows and columns), and each tap has a product of its own.
// Numerics  fp32 sums in registers over all of a block's tiles, then over the blocks in a fixed order, rounded once. Two runs are
//           bit-equal.
// Limits    padding 1, dilation 1. Channels in multiples of 64 (the one) and COLUMNS, 32 or 64 (the other), or of 8 below that; groups and
//           STRIDE 2 with at most 64 of the one, COLUMNS of the other and X_WINDOWED; ROWS even or WIDE 2, with STRIDE 2 both as WIDE 1;
//           H * W * groups * max(I, O) below 2^31; sm_90a.

#define HALO (STRIDE == 1 ? 2 : 1)
#define PLANES (STRIDE == 1 ? 1 : 4)
#define PITCH (8 * WIDE + HALO)  // pixels of a tile's row with its halo
#define WINDOW_PIXELS ((ROWS + HALO) * PITCH)
#define PIXELS (ROWS * 8 * WIDE)
#define LINE (COLUMNS * 2)    // bytes of a windowed pixel
#define ROUND_UP(bytes) (((bytes) + 1023) / 1024 * 1024)
#define WINDOW_BYTES ROUND_UP(WINDOW_PIXELS * LINE)
#define STAGE_BYTES (PLANES * WINDOW_BYTES + PIXELS * 128)
#define WARPGROUPS 3
#define THREADS (128 * WARPGROUPS + 32)
#define BANDS ((PLAIN + 63) / 64)
#define PRODUCTS (STRIDE == 1 ? 1 : 3)  // of a warpgroup, each with sums of its own: WGMMA_N is 3 * COLUMNS or COLUMNS
#define EIGHTS (3 * COLUMNS / 8)
#define QUARTERS (WARPGROUPS * EIGHTS * 128)  // of a block's partial sums: four values each
#define SUM_THREADS 256
#define SUM_LANES 32                      // quarters that a block of the last sum makes
#define SUM_PARTS (SUM_THREADS / SUM_LANES)

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

__device__ __forceinline__ Weight as_stored(float v) {
#if WEIGHT_STORAGE == 0
  return v;
#elif WEIGHT_STORAGE == 1
  return (unsigned short)narrow_f16x2(v, 0.f);
#else
  return (unsigned short)narrow_bf16x2(v, 0.f);
#endif
}

struct Windows {
  TensorMap of[PLANES];
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) conv3x3_backward_weight(
    const __grid_constant__ TensorMap plain_boxes, const __grid_constant__ Windows windows, const Vec16* __restrict__ plain,
    const Vec16* __restrict__ windowed, float4* __restrict__ partial, int tiles, int strips, int bands, int groups, int jobs) {
  overlap_launches();
  extern __shared__ __align__(1024) unsigned char shared[];
  Barrier* full = (Barrier*)(shared + STAGES * STAGE_BYTES);
  Barrier* empty = full + STAGES;
  const int tap_row = threadIdx.x / 128, thread = threadIdx.x % 128;
  if (threadIdx.x == 0)
    for (int i = 0; i < STAGES; ++i) {
      initialise(full + i, 1);
      initialise(empty + i, WARPGROUPS * 128);
    }
  __syncthreads();
  const int job = blockIdx.x % jobs, line = blockIdx.x / jobs, lines = gridDim.x / jobs;
  const int group = job % groups, band = job / groups % BANDS, first = job / groups / BANDS * COLUMNS;
  const int mine = (tiles - line + lines - 1) / lines;  // tiles of this block

  if (tap_row == WARPGROUPS) {
    if (thread > 0) return;
    int stage = 0, parity = 1;
    for (int i = 0; i < mine; ++i) {
      const int index = line + i * lines, column = index % strips * 8 * WIDE, row = index / strips % bands * ROWS;
      const int image = index / (strips * bands);
      unsigned char* to = shared + stage * STAGE_BYTES;
      wait(empty + stage, parity);
      arrive_for_bytes(full + stage, PLANES * WINDOW_PIXELS * LINE + PIXELS * 128);
      for (int plane = 0; plane < PLANES; ++plane) {  // an odd row's or column's first neighbour is the odd one before
        const int window_column = column - (STRIDE == 1 ? 1 : plane % 2), window_row = row - (STRIDE == 1 ? 1 : plane / 2);
        copy_box(to + plane * WINDOW_BYTES, windows.of[plane], windowed, full + stage, first, group, window_column, window_row, image);
      }
      copy_box(to + PLANES * WINDOW_BYTES, plain_boxes, plain, full + stage, band * 64, group, column, row, image);
      if (++stage == STAGES) {
        stage = 0;
        parity ^= 1;
      }
    }
    return;
  }

  float d[PRODUCTS][WGMMA_N / 2];
#pragma unroll
  for (int p = 0; p < PRODUCTS; ++p)
#pragma unroll
    for (int i = 0; i < WGMMA_N / 2; ++i) d[p][i] = 0.f;
  int stage = 0, before = 0, parity = 0;
  for (int i = 0; i < mine; ++i) {
    wait(full + stage, parity);
    products_begin();
    const unsigned char* tile = shared + stage * STAGE_BYTES;
    const Operand rows = operand_at<128>(tile + PLANES * WINDOW_BYTES, 1024);
#pragma unroll
    for (int p = 0; p < PRODUCTS; ++p) {
#if STRIDE == 1
      const unsigned char* window = tile + tap_row * PITCH * LINE;
#else  // the middle tap meets the even plane, the others the odd one
      const int plane = (tap_row != 1) * 2 + (p != 1);
      const unsigned char* window = tile + plane * WINDOW_BYTES + ((tap_row == 2) * PITCH + (p == 2)) * LINE;
#endif
      const Operand columns = operand_at<LINE>(window, (WIDE == 1 ? PITCH : 8) * LINE, LINE);
#pragma unroll
      for (int k = 0; k < PIXELS / 16; ++k) {  // 16 pixels of a row, or 8 of two
        const int pixel = WIDE == 1 ? 2 * k * PITCH : k / (WIDE / 2 + WIDE % 2) * PITCH + k % (WIDE / 2 + WIDE % 2) * 16;
        wgmma<1, 1>(d[p], operand_behind(rows, k * 2048), operand_behind(columns, pixel * LINE), 1);
      }
    }
    products_close();
    products_wait<1>();  // those of the tile before are made
    if (i > 0) arrive(empty + before);
    before = stage;
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
  products_wait<0>();
  // Of rows and columns that the group has.
  float4* to = partial + (i64)blockIdx.x * QUARTERS + tap_row * EIGHTS * 128 + thread;
  if (band * 64 + thread / 32 * 16 >= PLAIN) return;
#pragma unroll
  for (int j = 0; j < EIGHTS; ++j) {
    const float* v = d[j * 8 / WGMMA_N] + 4 * (j % (WGMMA_N / 8));
    if (j * 8 % COLUMNS < WINDOWED) to[j * 128] = make_float4(v[0], v[1], v[2], v[3]);
  }
}

// Grid (QUARTERS / SUM_LANES, jobs). A thread adds up every SUM_PARTS-th line, then the sums of SUM_PARTS threads are.
extern "C" __global__ void __launch_bounds__(SUM_THREADS) conv3x3_backward_weight_sum(
    const float4* __restrict__ partial, Weight* __restrict__ dweight, int lines, int groups, int weight_out, int weight_in, int weight_row,
    int weight_column) {
  overlap_launches();
  __shared__ float4 sums[SUM_PARTS][SUM_LANES];
  const int lane = threadIdx.x % SUM_LANES, part = threadIdx.x / SUM_LANES, job = blockIdx.y;
  const int first = blockIdx.x * SUM_LANES, j = first / 128 % EIGHTS, tap_row = first / 128 / EIGHTS;  // wgmma.cuh
  const int group = job % groups, band = job / groups % BANDS;
  if (band * 64 + first % 128 / 32 * 16 >= PLAIN || j * 8 % COLUMNS >= WINDOWED) return;  // the block's quarters are no weight's
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 6
  for (int line = part; line < lines; line += SUM_PARTS) {
    const float4 v = __ldcg(partial + (i64)(line * gridDim.y + job) * QUARTERS + first + lane);
    sum.x += v.x;
    sum.y += v.y;
    sum.z += v.z;
    sum.w += v.w;
  }
  sums[part][lane] = sum;
  __syncthreads();
  if (threadIdx.x >= 4 * SUM_LANES) return;
  float value = 0.f;
#pragma unroll
  for (int p = 0; p < SUM_PARTS; ++p) value += ((const float*)sums[p])[threadIdx.x];
  // Which sum of which product that is.
  const int place = first % 128 + threadIdx.x / 4, e = threadIdx.x % 4, row = band * 64 + place / 32 * 16 + place % 32 / 4 + e / 2 * 8;
  const int column = j * 8 + place % 4 * 2 + e % 2, tap = column / COLUMNS, other = job / groups / BANDS * COLUMNS + column % COLUMNS;
  if (row >= PLAIN) return;
#if X_WINDOWED
  const i64 at = (i64)(group * PLAIN + row) * weight_out + (i64)other * weight_in + tap_row * weight_row + tap * weight_column;
#else
  const i64 at = (i64)(group * WINDOWED + other) * weight_out + (i64)row * weight_in + (2 - tap_row) * weight_row + (2 - tap) * weight_column;
#endif
  dweight[at] = as_stored(value);
}
