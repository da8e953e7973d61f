// Grouped 3 x 3 convolution, and with TRANSPOSED the gradient of its input where the stride is 1.
//
//   y[n,oh,ow,o] = sum over (r, s, i) of w[o,i,r,s] * x[n, oh*STRIDE - 1 + r, ow*STRIDE - 1 + s, first of o's group + i]
//   TRANSPOSED:    y and x change places, and taps are w[i's channel, o's place in its group, 2-r, 2-s]
//
// Shapes    x: [N, H, W, C], y: [N, OH, OW, C], fp16 or bf16; w: [C, GROUP, 3, 3] in the same dtype or fp32, any strides.
// Replaces  aten::convolution with 4 to 64 channels a group (cuDNN slices, transposes and pads them in NHWC).
// Bytes     x once, y once. ResNeXt-50's [256,128,56,56] in bf16: 206 + 206 MB.
// Flops     2 * 9 * GROUP an output: 7.4 G there; on the tensor cores CG / GROUP times that, and 4 / 3 for CG 8, 10 / 9 for CG 24.
// Bound     DRAM bandwidth up to CG 16: 0.097 ms there at 4.24 TB/s, where mma.sync at 600 TFLOP/s takes 0.033. CG 32: both alike
//           (1024 channels at 7 x 7: 0.012 ms). CG 64: mma.sync.
//           Shared memory: an octet's row of 16 pixels costs 256 * CHUNKS bytes of ldmatrix and feeds 3 * STEPS products, since
//           a row of x goes to three rows of y at once, whose sums stay in registers: 1.0 (CG 8) to 1.3 clocks a product at
//           128 bytes a clock, where the product takes 1.6. With a row of y at a time it would be 4.
// Grid      (blocks over items, slabs of WARPS octets). Rows of x pass through a ring of STAGES rows in shared memory (cp.async);
//           rows of y leave through shared memory in 16-byte vectors. A row costs two barriers: several blocks an SM hide them.
// Moments   with MOMENTS also what a batch norm behind it needs (include/moments.cuh): [blocks over items, 3, C] fp32. A lane has the
//           sums of two channels, in six registers, from the values that it stages; a warp has all of its octet's.
// Numerics  fp32 sums on the tensor cores in a fixed order, rounded once; fp32 weights are rounded to x's dtype before. Two runs are
//           bit-equal. With GROUP 4 the other group's products are with zero; where the result is not finite it is made again without.
// Limits    padding 1, dilation 1, C a multiple of 8, x and y of one dtype.

#include "vector.cuh"
#include "overlap.cuh"
#include "cp_async.cuh"
#include "mma.cuh"
#include "grouped.cuh"
#include "grouped_slab.cuh"
#if MOMENTS
#include "moments.cuh"
#endif

#define STORES ((TILES + 1) / 2)

#if GROUP < CG
__device__ __forceinline__ float value_of(unsigned short bits) {
  const Vec16 v = {{bits, 0u, 0u, 0u}};
  float f[VEC];
  widen(v, f);
  return f[0];
}

__device__ __forceinline__ bool finite(const Vec16& v) {
  const unsigned int top = STORAGE == 1 ? 0x7c00u : 0x7f80u;
  bool all = true;
#pragma unroll
  for (int i = 0; i < 4; ++i) all = all && (v.w[i] & top) != top && (v.w[i] >> 16 & top) != top;
  return all;
}

// An octet of y from products within each group alone.
__device__ __forceinline__ Vec16 within_groups(
    const Vec16* x, const Weight* weight, const Strides& at, i64 image, int row, int column, int octet, int octets, int height,
    int width) {
  float f[VEC];
#pragma unroll
  for (int n = 0; n < VEC; ++n) f[n] = 0.f;
#pragma unroll 1
  for (int tap = 0; tap < 9; ++tap) {
    const int h = row * STRIDE - 1 + tap / 3, w = column * STRIDE - 1 + tap % 3;
    if (h < 0 || h >= height || w < 0 || w >= width) continue;
    const unsigned short* from = (const unsigned short*)(x + ((image * height + h) * width + w) * octets + octet);
#pragma unroll 1
    for (int c = 0; c < GROUP; ++c)
#pragma unroll
      for (int n = 0; n < VEC; ++n) {
        const int k = n / GROUP * GROUP + c, r = TRANSPOSED ? 2 - tap / 3 : tap / 3, s = TRANSPOSED ? 2 - tap % 3 : tap % 3;
        const unsigned int rounded = paired(tap_at(weight, at, octet, octets, n, k, r, s), 0);
        f[n] = fmaf(value_of((unsigned short)rounded), value_of(from[k]), f[n]);
      }
  }
  return narrow(f);
}
#endif

#if MOMENTS
// Of this lane's two channels: sums of what is stored, less `shift`, and of its square.
struct Sums {
  float sum[2], square[2];
  unsigned int shift;  // the block's first pixel, as it is stored; its registers are few
};

__device__ __forceinline__ float shift_of(const Sums& of, int channel) {
  const Vec16 v = {{of.shift, 0u, 0u, 0u}};
  float f[VEC];
  widen(v, f);
  return f[channel];
}

__device__ __forceinline__ void add(Sums& of, int channel, float f) {
  const float d = f - shift_of(of, channel);
  of.sum[channel] += d;
  of.square[channel] += d * d;
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) grouped_forward(
    const Vec16* __restrict__ x, const Weight* __restrict__ weight, Vec16* __restrict__ y,
#if MOMENTS
    float* __restrict__ moments,
#endif
    int items, int batch, int octets,
    int height, int width, int out_height, int out_width, int images, int strip, int strips, int segments, int segment_rows,
    int weight_out, int weight_in, int weight_row, int weight_column) {
  overlap_launches();
  extern __shared__ __align__(16) Vec16 shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int padded = STRIDE * (strip - 1) + 3;  // columns with their neighbours
  const int row_units = images * padded * PIXEL;
  Vec16* staged = shared + STAGES * row_units;
  const Strides strides = {weight_out, weight_in, weight_row, weight_column};

  unsigned int taps[3][STEPS][2];
#pragma unroll
  for (int r = 0; r < 3; ++r)
#pragma unroll
    for (int chunk = 0; chunk < 2 * STEPS; ++chunk) {
      const int s = chunk / OCTETS, row = TRANSPOSED ? 2 - r : r, column = TRANSPOSED ? 2 - s : s;
      taps[r][chunk / 2][chunk % 2] =
          chunk < CHUNKS
              ? taps_of(weight, strides, blockIdx.y * WARPS + warp, octets, chunk % OCTETS * 8, row, column)
              : 0u;
    }

  // Where this lane's pixel of each tile begins in a row of the ring; with STRIDE 2 even columns stand before odd ones.
  int at[TILES];
#pragma unroll
  for (int i = 0; i < TILES; ++i) {
    const int m = i * 16 + lane % 16 < images * strip ? i * 16 + lane % 16 : 0;
    at[i] = (m / strip * padded + m % strip) * PIXEL + warp / OCTETS * OCTETS;
  }
  auto offset = [&](int chunk) {
    const int s = chunk / OCTETS;
    return (STRIDE == 1 ? s : s == 0 ? 0 : s == 1 ? strip + 1 : 1) * PIXEL + chunk % OCTETS;
  };

  // This thread's vectors of a row: pixels k * 32 + pixel, always the same octet.
  const int pixel = threadIdx.x / WARPS, mine = blockIdx.y * WARPS + threadIdx.x % WARPS;
  int into[LOADS];
#pragma unroll
  for (int k = 0; k < LOADS; ++k) {
    const int p = k * 32 + pixel, column = p % padded;
    const int place = STRIDE == 1 ? column : column % 2 * (strip + 1) + column / 2;
    into[k] = p < images * padded ? (p / padded * padded + place) * PIXEL + threadIdx.x % WARPS : -1;
  }

  float sum[SLOTS][TILES][4];
#pragma unroll
  for (int q = 0; q < SLOTS; ++q)
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[q][i][e] = 0.f;

#if MOMENTS
  const int octet = blockIdx.y * WARPS + warp;
  Sums of = {{0.f, 0.f}, {0.f, 0.f}, 0u};
#endif

  for (int index = blockIdx.x; index < items; index += gridDim.x) {
    const Item item = item_of(index, images, strip, strips, segments);
    const int begin = item.segment * segment_rows;
    const int end = out_height - begin < segment_rows ? out_height : begin + segment_rows;
    const int first = begin * STRIDE - 1, rows = (end - 1 - begin) * STRIDE + 3;
    int from[LOADS], to[STORES];
#pragma unroll
    for (int k = 0; k < LOADS; ++k) {
      const int p = k * 32 + pixel, image = item.image + p / padded, column = item.column * STRIDE - 1 + p % padded;
      const bool inside = p < images * padded && image < batch && column >= 0 && column < width && mine < octets;
      from[k] = inside ? (p / padded * height * width + column) * octets + mine : -1;
    }
#pragma unroll
    for (int k = 0; k < STORES; ++k) {
      const int p = k * 32 + pixel, image = item.image + p / strip, column = item.column + p % strip;
      const bool inside = p < images * strip && image < batch && column < out_width && mine < octets;
      to[k] = inside ? (p / strip * out_height * out_width + column) * octets + mine : -1;
    }
#if MOMENTS
    unsigned int counted = 0;  // which of this lane's pixels, two a tile, are any
#pragma unroll
    for (int i = 0; i < 2 * TILES; ++i) {
      const int p = i / 2 * 16 + i % 2 * 8 + lane / 4;
      const bool inside = p < images * strip && item.image + p / strip < batch && item.column + p % strip < out_width;
      counted |= (inside ? 1u : 0u) << i;
    }
#endif
    const Vec16* image = x + (i64)item.image * height * width * octets;
    Vec16* out_image = y + (i64)item.image * out_height * out_width * octets;

    int fetched = 0, filled = 0, stage = 0;
    auto fetch = [&]() {
      const int h = first + fetched;
      if (fetched < rows && h >= 0 && h < height) {
        const Vec16* row = image + (i64)h * width * octets;
#pragma unroll
        for (int k = 0; k < LOADS; ++k)
          if (into[k] >= 0) cp_async16(shared + filled * row_units + into[k], from[k] >= 0 ? row + from[k] : x, from[k] >= 0);
      }
      cp_async_commit();
      ++fetched;
      filled = filled + 1 == STAGES ? 0 : filled + 1;
    };

    __syncthreads();  // the ring and the staged row of the item before are read
#pragma unroll
    for (int k = 0; k < STAGES - 1; ++k) fetch();
    for (int q = 0; q < rows; q += PHASES) {
#pragma unroll
      for (int u = 0; u < PHASES; ++u) {
        if (q + u >= rows) break;
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        fetch();
        if (meets(u, 0)) {
#pragma unroll
          for (int i = 0; i < TILES; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) sum[slot_of(u, 0)][i][e] = 0.f;
        }
        const int h = first + q + u;
        if (h >= 0 && h < height) {
          const Vec16* row = shared + stage * row_units;
#pragma unroll
          for (int step = 0; step < STEPS; ++step) {
            const int low = offset(2 * step), high = 2 * step + 1 < CHUNKS ? offset(2 * step + 1) : low;
            const int lanes = lane < 16 ? low : high;
#pragma unroll
            for (int i = 0; i < TILES; ++i) {
              unsigned int a[4];
              if (2 * step + 1 < CHUNKS) {
                ldmatrix_x4(a, row + at[i] + lanes);
              } else {
                unsigned int half[2];
                ldmatrix_x2(half, row + at[i] + lanes);
                a[0] = a[2] = half[0];
                a[1] = a[3] = half[1];
              }
#pragma unroll
              for (int r = 0; r < 3; ++r)
                if (meets(u, r)) MMA(sum[slot_of(u, r)][i], a, taps[r][step]);
            }
          }
        }
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        if (meets(u, 2) && q + u >= 2) {  // the last tap row of this row of y
#pragma unroll
          for (int i = 0; i < TILES; ++i)
            stage_tile((unsigned int*)(staged + i * 16 * PIXEL + warp), sum[slot_of(u, 2)][i], 4 * PIXEL);
          const int out_row = begin + (q + u - 2) / STRIDE;
#if MOMENTS
          bool lost = false;
#pragma unroll
          for (int i = 0; i < TILES; ++i) {
            const float(&d)[4] = sum[slot_of(u, 2)][i];
            const float exact[VEC] = {d[0], d[1], d[2], d[3], 0.f, 0.f, 0.f, 0.f};
            float f[VEC];
            const Vec16 v = narrow(exact);
            widen(v, f);
            if (i == 0 && index == blockIdx.x && out_row == begin) {
              const bool finite = f[0] - f[0] == 0.f && f[1] - f[1] == 0.f;
              of.shift = __shfl_sync(0xffffffffu, finite ? v.w[0] : 0u, lane % 4);
            }
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              if (!(counted >> (2 * i + k / 2) & 1u)) continue;
              if (GROUP < CG && f[k] - f[k] != 0.f)
                lost = true;
              else
                add(of, k % 2, f[k]);
            }
          }
#if GROUP < CG
          if (lost && octet < octets) {
#pragma unroll 1
            for (int i = 0; i < 2 * TILES; ++i) {
              if (!(counted >> i & 1u)) continue;
              const int p = i / 2 * 16 + i % 2 * 8 + lane / 4;
              unsigned short* at = (unsigned short*)(staged + p * PIXEL + warp) + lane % 4 * 2;
              if (value_of(at[0]) - value_of(at[0]) == 0.f && value_of(at[1]) - value_of(at[1]) == 0.f) continue;
              const Vec16 v = within_groups(
                  x, weight, strides, item.image + p / strip, out_row, item.column + p % strip, octet, octets, height, width);
              unsigned int own = 0;
#pragma unroll
              for (int k = 0; k < 4; ++k) own = k == lane % 4 ? v.w[k] : own;
#pragma unroll
              for (int e = 0; e < 2; ++e) {
                if (value_of(at[e]) - value_of(at[e]) == 0.f) continue;
                at[e] = (unsigned short)(own >> 16 * e);
                add(of, e, value_of(at[e]));
              }
            }
          }
#endif
#endif
          __syncthreads();
          Vec16* line = out_image + (i64)out_row * out_width * octets;
#pragma unroll
          for (int k = 0; k < STORES; ++k) {
            if (to[k] < 0) continue;
            const int p = k * 32 + pixel;
            Vec16 v = staged[p * PIXEL + threadIdx.x % WARPS];
#if GROUP < CG && !MOMENTS
            if (!finite(v))
              v = within_groups(
                  x, weight, strides, item.image + p / strip, out_row, item.column + p % strip, mine, octets, height, width);
#endif
            store(line + to[k], v);
          }
        }
      }
    }
  }
#if MOMENTS
  int count = 0;
  for (int index = blockIdx.x; index < items; index += gridDim.x) {
    const Item item = item_of(index, images, strip, strips, segments);
    count += min(images, batch - item.image) * min(strip, out_width - item.column) *
             min(segment_rows, out_height - item.segment * segment_rows);
  }
#pragma unroll
  for (int lanes = 4; lanes < 32; lanes <<= 1) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      of.sum[e] += __shfl_xor_sync(0xffffffffu, of.sum[e], lanes);
      of.square[e] += __shfl_xor_sync(0xffffffffu, of.square[e], lanes);
    }
  }
  if (lane < 4 && octet < octets) {
#pragma unroll
    for (int e = 0; e < 2; ++e)
      leave_moments(moments, blockIdx.x, octets * 8, octet * 8 + 2 * lane + e, count, shift_of(of, e), of.sum[e], of.square[e]);
  }
#endif
}
