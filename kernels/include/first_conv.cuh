// What the kernels of a first convolution (3 input channels) share: the tile of output pixels that a block works on, and the
// pixels of the image under it in shared memory.
//
// SIDE x SIDE taps, STRIDE, PAD columns of padding, OUT output channels; ROWS x COLS output pixels a tile, COLS a multiple of 16;
// THREADS a block; STORAGE of the product's operands and of dy and y (1 fp16, 2 bf16), X_STORAGE and WEIGHT_STORAGE of image
// and parameters (0 fp32 as well): set by the build. RAW: x is NHWC without gaps, stored like the operands, rows of pixels
// begin at multiples of 16 bytes, and STRIDE is even: rows are then copied as they are (cp.async).
//
// In shared memory a row of pixels is a row of PITCH values, PIX a pixel: 3, or 4 where neighbouring outputs are an odd number
// of pixels apart, so that the window of every output begins at a multiple of 4 bytes. The im2col matrix is never written: row m
// of it (an output pixel) and row r of taps is the PIX * SIDE values from (m * STRIDE - PAD) * PIX on, so a plain strided matrix.

#include "half.cuh"
#include "cp_async.cuh"

typedef long long i64;

#define PIX (STRIDE % 2 ? 4 : 3)
#define TAPS (SIDE * SIDE * 3)
#define LEAD (PAD * PIX % 2)  // values before a window, so that it begins at an even one
#define LEFT ((PAD * PIX + LEAD + 7) / 8 * 8)
#define PIXELS ((COLS - 1) * STRIDE + SIDE)
#define PITCH ((LEFT + (PIXELS - PAD) * PIX + 7) / 8 * 8)
#define IN_ROWS ((ROWS - 1) * STRIDE + SIDE)
#define BUFFER (IN_ROWS * PITCH + 8)  // values; the last loads of a row of taps may reach 6 further
#define STEP (STRIDE * PIX)           // values between the windows of neighbouring outputs

#if X_STORAGE == 0
typedef float X;
#else
typedef unsigned short X;
#endif

#if WEIGHT_STORAGE == 0
typedef float Weight;
#else
typedef unsigned short Weight;
#endif

__device__ __forceinline__ unsigned int operands(float low, float high) {
#if STORAGE == 1
  return narrow_f16x2(low, high);
#else
  return narrow_bf16x2(low, high);
#endif
}

__device__ __forceinline__ unsigned short operand(float v) { return (unsigned short)operands(v, 0.f); }

template <int STORED>
__device__ __forceinline__ float widen(unsigned short v) { return STORED == 1 ? widen_f16(v) : widen_bf16(v); }
template <int STORED>
__device__ __forceinline__ float widen(float v) { return v; }

__device__ __forceinline__ unsigned short taken(X v) {
#if X_STORAGE == STORAGE
  return v;
#else
  return operand(widen<X_STORAGE>(v));
#endif
}

// Where x lies: elements between images, rows, columns and channels.
struct Image {
  i64 image, row, column, channel;
  int height, width;
};

struct Tile {
  int n, row, column;  // the first output pixel
};

__device__ __forceinline__ Tile tile_of(i64 index, int strips, int bands) {
  Tile t;
  t.column = (int)(index % strips) * COLS;
  index /= strips;
  t.row = (int)(index % bands) * ROWS;
  t.n = (int)(index / bands);
  return t;
}

// Puts the pixels under a tile into `to` (BUFFER values, 16-byte aligned), zeros outside the image. There after staged() and
// a barrier.
__device__ __forceinline__ void stage(unsigned short* to, const X* x, const Image& image, const Tile& t, int pad_height) {
  const int first = t.row * STRIDE - pad_height;
#if RAW
  for (int i = threadIdx.x; i < IN_ROWS * (PITCH / 8); i += THREADS) {
    const int r = i / (PITCH / 8), piece = i % (PITCH / 8);
    const int row = first + r, at = t.column * STEP + piece * 8 - LEFT;
    const bool inside = row >= 0 && row < image.height && at >= 0 && at < image.width * 3;
    cp_async16(to + r * PITCH + piece * 8, inside ? x + ((i64)t.n * image.height + row) * image.width * 3 + at : x, inside);
  }
  cp_async_commit();
#else
  const X* base = x + t.n * image.image;
#pragma unroll 4
  for (int i = threadIdx.x; i < IN_ROWS * PIXELS; i += THREADS) {
    const int r = i / PIXELS, p = i % PIXELS;
    const int row = first + r, column = t.column * STRIDE - PAD + p;
    unsigned short v[4] = {0, 0, 0, 0};
    if (row >= 0 && row < image.height && column >= 0 && column < image.width) {
      const X* from = base + row * image.row + column * image.column;
#pragma unroll
      for (int c = 0; c < 3; ++c) v[c] = taken(__ldg(from + c * image.channel));
    }
    unsigned short* at = to + r * PITCH + LEFT - PAD * PIX + p * PIX;
#if STRIDE % 2
    *(uint2*)at = make_uint2(v[0] | (unsigned int)v[1] << 16, v[2]);
#else
    at[0] = v[0];
    at[1] = v[1];
    at[2] = v[2];
#endif
  }
#endif
}

// Waits for this thread's copies.
__device__ __forceinline__ void staged() {
#if RAW
  cp_async_wait<0>();
#endif
}
