// 3 x 3 convolution of stride 1, and with TRANSPOSED the gradient of its input, on Hopper's tensor cores.
//
//   y[n,h,w,o] = sum over (r, s, i) of weight[o,i,r,s] * x[n, h - 1 + r, w - 1 + s, i]
//   TRANSPOSED:  y[n,h,w,i] = sum over (r, s, o) of weight[o,i,r,s] * x[n, h + 1 - r, w + 1 - s, o]
//
// Shapes    x: [N, H, W, IN], y: [N, H, W, OUT], fp16 or bf16; weight: [OUT, IN, 3, 3] ([IN, OUT, 3, 3] with TRANSPOSED) in the same
//           dtype or fp32, any strides. With MOMENTS those of y, two parts a block: [2 * gridDim.x][3][OUT] fp32, include/moments.cuh.
// Replaces  aten::convolution (cuDNN's implicit product, which reads each pixel nine times from L2).
// Bytes     x once and its halo again (1.33 of it for 32 x 8 pixels a tile), y once. [128,64,32,32] in bf16: 16.8 + 16.8 MB.
// Flops     18 * IN * OUT a pixel: 9.7 G there. OUT 32 uses half of each product.
// Bound     tensor cores: 0.012 ms there at 800 TFLOP/s; DRAM bandwidth 0.008 ms at 4.24 TB/s.
//           Shared memory, bytes a product of 64 x WGMMA_N x 16: 2048 of weights and 32 * WGMMA_N of pixels. With 256 columns that is
//           10 KB in 128 clocks, where 128 bytes a clock can be had; so weights are the rows and pixels the columns.
// Grid      as many blocks as SMs, each walks over tiles of WGMMA_N pixels: HEIGHT rows of 8. All weights stay in shared memory. A thread
//           has tiles with their halo copied into STAGES stages, 64 channels each; two warpgroups take tiles by turns, so that one's
//           stores run beside the other's products. A tap is the same operand begun some lines later. y leaves through the tile's own stage.
// Numerics  fp32 sums in a fixed order, rounded once; fp32 weights are rounded to x's dtype before. Moments of the rounded values, about
//           the warpgroup's first pixel, so that a mean far from zero does not cancel. Two runs are bit-equal.
// Limits    padding 1, dilation 1, one group; IN a multiple of 64, OUT 32, 64 or 128; H * W * max(IN, OUT) below 2^31; sm_90a.

#define THREADS 288
#define HEIGHT (WGMMA_N / 8)
#define CHUNKS (IN / 64)              // of channels: a line each
#define PITCH 10                      // pixels of a tile's row with its halo
#define PIXELS ((HEIGHT + 2) * PITCH)
#define ROUND_UP(bytes) (((bytes) + 1023) / 1024 * 1024)
#define STAGE_BYTES ROUND_UP(PIXELS * 128)
#define BANDS ((OUT + 63) / 64)       // of 64 rows of products
#define STORED (OUT < 64 ? OUT : 64)  // channels of a band that y has
#if TRANSPOSED
#define WEIGHT_OUT IN
#define WEIGHT_IN OUT
#else
#define WEIGHT_OUT OUT
#define WEIGHT_IN IN
#endif
#define WEIGHT_LINES ((WEIGHT_IN + 63) / 64)  // of one tap of one output
#define WEIGHT_BYTES ROUND_UP(9 * WEIGHT_LINES * WEIGHT_OUT * 128)

#include "vector.cuh"
#include "half.cuh"
#include "mbarrier.cuh"
#include "tensor_map.cuh"
#include "wgmma.cuh"
#include "overlap.cuh"
#if MOMENTS
#include "moments.cuh"
#endif

#if WEIGHT_STORAGE == 0
typedef float Weight;
#else
typedef unsigned short Weight;
#endif
struct __align__(16) Eight { Weight v[8]; };

__device__ __forceinline__ unsigned int narrowed(float low, float high) {
#if STORAGE == 1
  return narrow_f16x2(low, high);
#else
  return narrow_bf16x2(low, high);
#endif
}

// Eight values of a weight in x's dtype.
__device__ __forceinline__ Vec16 octet_of(const Weight* at, int stride, bool dense) {
  Eight e;
  if (dense) {
    e = *(const Eight*)at;
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) e.v[i] = at[i * stride];
  }
  Vec16 v;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#if WEIGHT_STORAGE == 0
    v.w[i] = narrowed(e.v[2 * i], e.v[2 * i + 1]);
#else
    v.w[i] = e.v[2 * i] | (unsigned int)e.v[2 * i + 1] << 16;
#endif
  }
  return v;
}

// Of two values as they are stored.
__device__ __forceinline__ void widened(unsigned int pair, float& low, float& high) {
#if STORAGE == 1
  low = widen_f16((unsigned short)(pair & 0xffffu));
  high = widen_f16((unsigned short)(pair >> 16));
#else
  low = widen_bf16((unsigned short)(pair & 0xffffu));
  high = __uint_as_float(pair & 0xffff0000u);
#endif
}

struct Tile {
  int image, row, column;
};

__device__ __forceinline__ Tile tile_of(int index, int strips, int bands) {
  return {index / (strips * bands), index / strips % bands * HEIGHT, index % strips * 8};
}

// The unit of a line, behind the begin of a buffer.
__device__ __forceinline__ int unit_at(int line, int unit) { return line * 128 + (unit ^ (line & 7)) * 16; }

extern "C" __global__ void __launch_bounds__(THREADS, 1) conv3x3(
    const __grid_constant__ TensorMap boxes, const Vec16* __restrict__ x, const Weight* __restrict__ weight, Vec16* __restrict__ y,
#if MOMENTS
    float* __restrict__ moments,
#endif
    int tiles, int strips, int bands, int height, int width, int weight_out, int weight_in, int weight_row, int weight_column) {
  overlap_launches();
  extern __shared__ __align__(1024) unsigned char shared[];
  unsigned char* weights = shared;
  unsigned char* stages = weights + WEIGHT_BYTES;
  Barrier* full = (Barrier*)(stages + STAGES * STAGE_BYTES);
  Barrier* empty = full + STAGES;
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  if (threadIdx.x == 0)
    for (int i = 0; i < STAGES; ++i) {
      initialise(full + i, 1);
      initialise(empty + i, 128);
    }
  __syncthreads();
  const int mine = (tiles - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x;  // tiles of this block

  if (group == 2) {
    if (thread > 0) return;
    int stage = 0, parity = 1;
    for (int i = 0; i < mine; ++i) {
      const Tile tile = tile_of(blockIdx.x + i * gridDim.x, strips, bands);
      for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        wait(empty + stage, parity);
        arrive_for_bytes(full + stage, PIXELS * 128);
        copy_box(stages + stage * STAGE_BYTES, boxes, x, full + stage, chunk * 64, 0, tile.column - 1, tile.row - 1, tile.image);
        if (++stage == STAGES) {
          stage = 0;
          parity ^= 1;
        }
      }
    }
    return;
  }

  const bool dense = weight_in == 1 && (weight_out | weight_row | weight_column) % 8 == 0 && (unsigned long long)weight % 16 == 0;
#pragma unroll 6
  for (int i = threadIdx.x; i < 9 * WEIGHT_OUT * (WEIGHT_IN / 8); i += 256) {
    const int octet = i % (WEIGHT_IN / 8), tap = i / (WEIGHT_IN / 8) % 9, o = i / (WEIGHT_IN / 8 * 9);
    const Weight* from = weight + (i64)o * weight_out + octet * 8 * weight_in + tap / 3 * weight_row + tap % 3 * weight_column;
    *(Vec16*)(weights + unit_at((tap * WEIGHT_LINES + octet / 8) * WEIGHT_OUT + o, octet % 8)) = octet_of(from, weight_in, dense);
  }
  order_with_hardware();
  wait_for_part(1, 256);

#if MOMENTS
  float shift[BANDS][2], sum[BANDS][2], square[BANDS][2];  // of this lane's two channels of a band
#pragma unroll
  for (int band = 0; band < BANDS; ++band)
#pragma unroll
    for (int half = 0; half < 2; ++half) shift[band][half] = sum[band][half] = square[band][half] = 0.f;
  int count = 0;
#endif
  for (int i = group; i < mine; i += 2) {
    float d[BANDS][WGMMA_N / 2];
    int stage = 0;
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
      const int item = i * CHUNKS + chunk;
      stage = item % STAGES;
      wait(full + stage, item / STAGES % 2);
      products_begin();
      const Operand pixels = operand_at<128>(stages + stage * STAGE_BYTES, PITCH * 128);
#if TRANSPOSED  // the lines of a tap are the outputs that are summed over, turned taps
      const Operand taps = operand_at<128>(weights + chunk * 64 * 128, 1024);
#else
      const Operand taps = operand_at<128>(weights + chunk * WEIGHT_OUT * 128, 1024);
#endif
#pragma unroll
      for (int tap = 0; tap < 9; ++tap)
#pragma unroll
        for (int k = 0; k < 4; ++k)
#pragma unroll
          for (int band = 0; band < BANDS; ++band) {
            const int line = TRANSPOSED ? ((8 - tap) * WEIGHT_LINES + band) * WEIGHT_OUT + k * 16 : tap * WEIGHT_LINES * WEIGHT_OUT + band * 64;
            wgmma<TRANSPOSED, 0>(
                d[band], operand_behind(taps, line * 128 + (TRANSPOSED ? 0 : k * 32)),
                operand_behind(pixels, (tap / 3 * PITCH + tap % 3) * 128 + k * 32), chunk + tap + k);
          }
      products_close();
      products_wait<0>();
      if (chunk + 1 < CHUNKS) arrive(empty + stage);
    }
    const Tile tile = tile_of(blockIdx.x + i * gridDim.x, strips, bands);
    unsigned char* staged = stages + stage * STAGE_BYTES;
#pragma unroll
    for (int band = 0; band < BANDS; ++band) {
      wait_for_part(2 + group, 128);  // the other warps' products, and what they have stored of the band before
      if (warp * 16 < STORED) {
#pragma unroll
        for (int j = 0; j < HEIGHT; j += 2) {
          const float* v = d[band] + 4 * j;
          const unsigned int turned[4] = {narrowed(v[0], v[1]), narrowed(v[2], v[3]), narrowed(v[4], v[5]), narrowed(v[6], v[7])};
          stmatrix_x4_trans(staged + unit_at((j + lane / 16) * 8 + lane % 8, warp * 2 + lane / 8 % 2), turned);
#if MOMENTS
          if (j == 0 && i == group) {  // the tile's first pixel is one of the image
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              float low, high;
              widened(__shfl_sync(0xffffffffu, turned[half], lane & ~3), low, high);
              shift[band][half] = finite_or_zero(low);
            }
          }
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const int half = k % 2, row = tile.row + j + k / 2, column = tile.column + lane % 4 * 2;
            float values[2];
            widened(turned[k], values[0], values[1]);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const float distance = row < height && column + e < width ? values[e] - shift[band][half] : 0.f;
              sum[band][half] += distance;
              square[band][half] += distance * distance;
            }
          }
#endif
        }
      }
      wait_for_part(2 + group, 128);
#pragma unroll 4
      for (int u = thread; u < WGMMA_N * (STORED / 8); u += 128) {
        const int pixel = u / (STORED / 8), unit = u % (STORED / 8), row = tile.row + pixel / 8, column = tile.column + pixel % 8;
        const Vec16 v = *(const Vec16*)(staged + unit_at(pixel, unit));
        if (row < height && column < width)
          store(y + ((i64)tile.image * height * width + row * width + column) * (OUT / 8) + band * 8 + unit, v);
      }
    }
    order_with_hardware();
    arrive(empty + stage);
#if MOMENTS
    const int rows = height - tile.row, columns = width - tile.column;
    count += (rows < HEIGHT ? rows : HEIGHT) * (columns < 8 ? columns : 8);
#endif
  }
#if MOMENTS
#pragma unroll
  for (int band = 0; band < BANDS; ++band)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float s = sum[band][half], q = square[band][half];
#pragma unroll
      for (int lanes = 1; lanes < 4; lanes *= 2) {
        s += __shfl_xor_sync(0xffffffffu, s, lanes);
        q += __shfl_xor_sync(0xffffffffu, q, lanes);
      }
      if (lane % 4 == 0 && warp * 16 < STORED)
        leave_moments(moments, blockIdx.x * 2 + group, OUT, band * 64 + warp * 16 + half * 8 + lane / 4, count, shift[band][half], s, q);
    }
#endif
}
