// Depthwise rows as banded matrix products on the tensor cores: what the kernels of 16-bit storage share.
//
// A row of one channel is cut into strips of PIXELS output pixels. out[strip, n] += sum over j of in[strip, j] band[j, n], where
// in[strip, j] is the strip's window of at most 16 input pixels and band[j, n] = w[r, j + lead - n] (a row of the taps,
// shifted by one column a pixel): one m16n8k16 for 16 strips, a channel and a row of taps, in place of 4 K fp32 FMA.
//
// 16 strips are STRIPS neighbours in each of WALKERS images. All strips of a block walk down the same rows, so that row bounds are
// uniform in a block. Rows of pixels are copied to shared memory STAGES ahead; a warp takes CH channels, 2 or 4, a lane's pixels
// (PTX ISA, fragments of m16n8k16) in an order of k that spreads them over the banks.
//
// Set by the build: K, CH, TILE channels a block, COPY bytes a copy (4, 8 or 16), STRIPS, PIXELS, WINDOW pixels of a strip's input (at most 16), PIECE pixels of one image's row in a
// stage, STAGES.

#include "channels.cuh"
#include "cp_async.cuh"
#include "mma.cuh"
#include "pairs.cuh"

#define WARPS (TILE / CH)
#define BAND_THREADS (32 * WARPS)
#define WALKERS (16 / STRIPS)
#define STAGE_PIXELS (WALKERS * PIECE)
#define ROW_PIXELS (16 * PIXELS)           // output pixels of a row of all strips
#define UNITS (2 * TILE / COPY)            // copies that make a pixel
#define PITCH (COPY / 4 * (UNITS | 1))     // words a pixel: an odd number of copies, so that pixels lie in different banks
#define AT_ONCE (16 * COPY / CH)           // pixels that the block copies at once: BAND_THREADS / UNITS
#define COPIES ((STAGE_PIXELS + AT_ONCE - 1) / AT_ONCE)  // by one thread
#define ROW_COPIES ((ROW_PIXELS + AT_ONCE - 1) / AT_ONCE)
#define WIDE (WINDOW > 8)                  // else the upper half of the product's k is zero

// What a block works on: rows [begin, end) of the output in WALKERS images from `n` on, columns from `column` on.
struct Part {
  int n, column, begin, end;
};

// Items are ordered (segment, column tile, group of images).
__device__ __forceinline__ Part part_of(int item, int groups, int column_tiles, int segment_rows, int rows) {
  Part p;
  p.n = item % groups * WALKERS;
  item /= groups;
  p.column = item % column_tiles * (STRIPS * PIXELS);
  p.begin = item / column_tiles * segment_rows;
  p.end = rows - p.begin < segment_rows ? rows : p.begin + segment_rows;
  return p;
}

__device__ __forceinline__ void copy_unit(unsigned int* to, const char* from, bool valid) {
#if COPY == 16
  cp_async16(to, from, valid);
#elif COPY == 8
  cp_async8(to, from, valid);
#else
  cp_async4(to, from, valid);
#endif
}

// Where the pixels of a stage come from or go to: `span` pixels of each of WALKERS images side by side. Written by the block
// for all its threads: bytes from the first image's row, or a negative number outside. Pixel 0 is column `first` of image n.
template <int count, int span>
__device__ __forceinline__ void place(int (&table)[count * AT_ONCE], int n, int batch, int first, int width, int image_bytes, int pixel_bytes) {
#pragma unroll 1
  for (int at = threadIdx.x; at < count * AT_ONCE; at += BAND_THREADS) {
    const int walker = at / span, column = first + at % span;
    const bool inside = at < WALKERS * span && n + walker < batch && column >= 0 && column < width;
    table[at] = inside ? walker * image_bytes + column * pixel_bytes : -1;
  }
}

// The lower, or upper, halves of two words as one: one PRMT.
__device__ __forceinline__ unsigned int low_halves(unsigned int a, unsigned int b) { return __byte_perm(a, b, 0x5410); }
__device__ __forceinline__ unsigned int high_halves(unsigned int a, unsigned int b) { return __byte_perm(a, b, 0x7632); }

__device__ __forceinline__ void product(float (&d)[4], const unsigned int (&a)[4], const unsigned int (&b)[2]) {
#if STORAGE == 1
  mma_f16(d, a, b);
#else
  mma_bf16(d, a, b);
#endif
}

// The pixel of a strip's window that a lane holds as its i-th, by its index t (or g) and i times the step.
__device__ __forceinline__ int in_window(int at) { return at < WINDOW ? at : WINDOW - 1; }
