// Squeeze-and-excite, what lies between the two passes over the tensor: two small products a sample, forward and backward.
//
//   squeeze           s = pool sums / HW               z1 = s W1^T + b1                h = act(z1)
//   excite            z2 = h W2^T + b2
//   excite_backward   dz2 = gate'(z2) * sum_hw dy x    dz1 = act'(z1) * (dz2 W2)
//   squeeze_backward  dpool = dz1 W1 / HW              dW1 = dz1^T s  db1 = sum_n dz1  dW2 = dz2^T h  db2 = sum_n dz2
//
// Shapes    partial: [N, parts, C]; s, z2, dz2, dpool: [N, C]; z1, h, dz1: [N, S]; W1, dW1: [S, C]; W2, dW2: [C, S]; b1: [S]
//           and b2: [C], each may be null. All fp32, C a multiple of 4, rows 16-byte aligned (of S values only if HIDDEN4).
// Replaces  two 1x1 convolutions (or linear layers) on one pixel a sample, their casts, bias additions and the activation
//           between them: 4 to 8 launches forward, 12 and more backward, as two each.
// Bytes     about nothing from DRAM; from L2 4 KiB a piece and 16 of k. MobileNetV3-L's largest (256 x 960, S = 240):
//           24 MB forward, 60 MB backward. 4 N C S flops forward, 8 N C S backward: 0.24 and 0.47 G there.
// Bound     latency, and L2 to SM at 64 bytes a clock: 2 to 3 us a launch forward, 6 for the last.
// Grid      a piece of the result a warp, or a few warps that share its k (the host's choice: a block for every SM).
// Numerics  fp32 sums of products in tf32 where the tensor is in bf16 or fp16 (eager under autocast rounds operands and
//           results to those), exact as fp32 otherwise (include/warp_product.cuh). Deterministic.

#include "activation.cuh"
#include "gate.cuh"
#include "mma.cuh"
#include "overlap.cuh"

typedef long long i64;

#include "warp_product.cuh"

#define WARPS (THREADS / 32)

// The piece of a result that a warp takes part in: rows from m, columns from n.
struct Piece {
  int m, n;
  bool active;
};

__device__ __forceinline__ Piece piece_of(int block, int slices, int tall, int rows, int columns) {
  const int across = (columns + PIECE_COLUMNS - 1) / PIECE_COLUMNS, height = 16 * tall;
  const int piece = block * (WARPS / slices) + threadIdx.x / 32 / slices;
  Piece p;
  p.m = piece / across * height;
  p.n = piece % across * PIECE_COLUMNS;
  p.active = p.m < rows;
  return p;
}

__device__ __forceinline__ void store4(float* at, const Operand4& o) {
  const float4 f = {o.v[0], o.v[1], o.v[2], o.v[3]};
  *(float4*)at = f;
}

// k .. k + 3 of a part of the sums of sample n and the next one.
__device__ __forceinline__ Rows part_of(
    const float* __restrict__ partial, int n, int samples, int parts, int part, int k, int channels) {
  Rows rows;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    rows.of[r] = no_operand();
    if (n + r < samples) rows.of[r] = four<true>(partial + ((i64)(n + r) * parts + part) * channels, k, channels);
  }
  return rows;
}

__device__ __forceinline__ void add(Rows& to, const Rows& more) {
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int i = 0; i < 4; ++i) to.of[r].v[i] += more.of[r].v[i];
}

// k .. k + 3 of row n and the next one of a matrix of so many rows.
template <bool ALIGNED>
__device__ __forceinline__ Rows rows_of(const float* __restrict__ matrix, int n, int rows, int k, int size) {
  Rows found;
#pragma unroll
  for (int r = 0; r < 2; ++r) found.of[r] = n + r < rows ? four<ALIGNED>(matrix + (i64)(n + r) * size, k, size) : no_operand();
  return found;
}

// b(k, n) = matrix[n][k]: four rows, each read along k.
template <bool ALIGNED>
__device__ __forceinline__ void rows_as_columns(
    const float* __restrict__ matrix, int n, int columns, int k, int size, Operand4 (&out)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const Operand4 row = n + i < columns ? four<ALIGNED>(matrix + (i64)(n + i) * size, k, size) : no_operand();
#pragma unroll
    for (int q = 0; q < 4; ++q) out[q].v[i] = row.v[q];
  }
}

// b(k, n) = matrix[k][n]: four rows of k, each read along n.
template <bool ALIGNED>
__device__ __forceinline__ void rows_as_rows(
    const float* __restrict__ matrix, int n, int columns, int k, int size, Operand4 (&out)[4]) {
#pragma unroll
  for (int q = 0; q < 4; ++q)
    out[q] = k + q < size ? four<ALIGNED>(matrix + (i64)(k + q) * columns, n, columns) : no_operand();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) squeeze_excite_squeeze(
    const float* __restrict__ partial, const float* __restrict__ w1, const float* __restrict__ b1,
    float* __restrict__ pooled, float* __restrict__ z1, float* __restrict__ h,
    int samples, int parts, int channels, int hidden, int slices, float inverse, float slope) {
  overlap_launches();
  __shared__ float shared[16 * THREADS];
  const Piece p = piece_of(blockIdx.x, slices, 1, samples, hidden);
  warp_product<1, 4 - SPLIT>(
      channels, parts, slices, p.active,
      [&](int row, int k) { return part_of(partial, p.m + row, samples, parts, 0, k, channels); },
      [&](int row, int k, int part, Rows& raw) { add(raw, part_of(partial, p.m + row, samples, parts, part, k, channels)); },
      [&](int row, int k, const Rows& raw, Operand4 (&out)[2]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int n = p.m + row + r;
#pragma unroll
          for (int i = 0; i < 4; ++i) out[r].v[i] = raw.of[r].v[i] * inverse;
          if (p.n == 0 && n < samples && k < channels) store4(pooled + (i64)n * channels + k, out[r]);
        }
      },
      [&](int k, int column, Operand4 (&out)[4]) { rows_as_columns<true>(w1, p.n + column, hidden, k, channels, out); },
      [&](int, int column) { return b1 && p.n + column < hidden ? b1[p.n + column] : 0.f; },
      [&](int row, int column, float sum, float bias) {
        const int n = p.m + row, j = p.n + column;
        if (n >= samples || j >= hidden) return;
        const float z = sum + bias;
        z1[(i64)n * hidden + j] = z;
        h[(i64)n * hidden + j] = activate(z, slope);
      },
      shared);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) squeeze_excite_excite(
    const float* __restrict__ h, const float* __restrict__ w2, const float* __restrict__ b2, float* __restrict__ z2,
    int samples, int channels, int hidden, int slices) {
  overlap_launches();
  __shared__ float shared[16 * TALL * THREADS];
  const Piece p = piece_of(blockIdx.x, slices, TALL, samples, channels);
  warp_product<TALL, 4 / TALL>(
      hidden, 1, slices, p.active,
      [&](int row, int k) { return rows_of<HIDDEN4>(h, p.m + row, samples, k, hidden); },
      InOnePart(), AsLoaded(),
      [&](int k, int column, Operand4 (&out)[4]) { rows_as_columns<HIDDEN4>(w2, p.n + column, channels, k, hidden, out); },
      [&](int, int column) { return b2 && p.n + column < channels ? b2[p.n + column] : 0.f; },
      [&](int row, int column, float sum, float bias) {
        const int n = p.m + row, c = p.n + column;
        if (n < samples && c < channels) z2[(i64)n * channels + c] = sum + bias;
      },
      shared);
}

struct Gated {
  Rows sums, z;
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) squeeze_excite_excite_backward(
    const float* __restrict__ partial, const float* __restrict__ z1, const float* __restrict__ z2,
    const float* __restrict__ w2, float* __restrict__ dz2, float* __restrict__ dz1, float* __restrict__ h,
    int samples, int parts, int channels, int hidden, int slices, float slope) {
  overlap_launches();
  __shared__ float shared[16 * THREADS];
  const Piece p = piece_of(blockIdx.x, slices, 1, samples, hidden);
  warp_product<1, 3 - SPLIT>(
      channels, parts, slices, p.active,
      [&](int row, int k) {
        Gated raw;
        raw.sums = part_of(partial, p.m + row, samples, parts, 0, k, channels);
        raw.z = rows_of<true>(z2, p.m + row, samples, k, channels);
        return raw;
      },
      [&](int row, int k, int part, Gated& raw) {
        add(raw.sums, part_of(partial, p.m + row, samples, parts, part, k, channels));
      },
      [&](int row, int k, const Gated& raw, Operand4 (&out)[2]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int n = p.m + row + r;
#pragma unroll
          for (int i = 0; i < 4; ++i) out[r].v[i] = through_gate(raw.sums.of[r].v[i], raw.z.of[r].v[i]);
          if (p.n == 0 && n < samples && k < channels) store4(dz2 + (i64)n * channels + k, out[r]);
        }
      },
      [&](int k, int column, Operand4 (&out)[4]) { rows_as_rows<HIDDEN4>(w2, p.n + column, hidden, k, channels, out); },
      [&](int row, int column) {
        const int n = p.m + row, j = p.n + column;
        return n < samples && j < hidden ? z1[(i64)n * hidden + j] : 0.f;
      },
      [&](int row, int column, float sum, float z) {
        const int n = p.m + row, j = p.n + column;
        if (n >= samples || j >= hidden) return;
        dz1[(i64)n * hidden + j] = through(sum, z, slope);
        h[(i64)n * hidden + j] = activate(z, slope);
      },
      shared);
}

// One weight's gradient and its bias's: dw[m][n] = sum over samples of left[.][m] right[.][n]; the bias's is one more column,
// of ones.
__device__ __forceinline__ void weight_gradient(
    const float* __restrict__ left, const float* __restrict__ right, float* dw, float* db,
    int block, int slices, int samples, int rows, int columns, float* shared) {
  const Piece p = piece_of(block, slices, TALL, rows, columns + 1);
  warp_product<TALL, 4 / TALL>(
      samples, 1, slices, p.active,
      [&](int row, int k) {
        Rows out;
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          const float* at = left + (i64)(k + q) * rows;
          const int m = p.m + row;
          if (HIDDEN4) {
            float2 f = {0.f, 0.f};
            if (k + q < samples && m < rows) f = *(const float2*)(at + m);
            out.of[0].v[q] = f.x;
            out.of[1].v[q] = f.y;
          } else {
            out.of[0].v[q] = k + q < samples && m < rows ? at[m] : 0.f;
            out.of[1].v[q] = k + q < samples && m + 1 < rows ? at[m + 1] : 0.f;
          }
        }
        return out;
      },
      InOnePart(), AsLoaded(),
      [&](int k, int column, Operand4 (&out)[4]) {
        const int n = p.n + column;
        rows_as_rows<HIDDEN4>(right, n, columns, k, samples, out);
#pragma unroll
        for (int q = 0; q < 4; ++q)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            if (n + i == columns) out[q].v[i] = 1.f;
      },
      [](int, int) { return 0.f; },
      [&](int row, int column, float sum, float) {
        const int m = p.m + row, n = p.n + column;
        if (m >= rows) return;
        if (n < columns) dw[(i64)m * columns + n] = sum;
        if (n == columns) db[m] = sum;
      },
      shared);
}

// Blocks: `pool_blocks` for dpool, whose warps share k in `slices`, `w1_blocks` for dW1 and db1, the others for dW2 and db2.
extern "C" __global__ void __launch_bounds__(THREADS, 2 - SPLIT) squeeze_excite_squeeze_backward(
    const float* __restrict__ pooled, const float* __restrict__ h, const float* __restrict__ dz1,
    const float* __restrict__ dz2, const float* __restrict__ w1, float* __restrict__ dpool, float* __restrict__ dw1,
    float* __restrict__ db1, float* __restrict__ dw2, float* __restrict__ db2,
    int samples, int channels, int hidden, int slices, int weight_slices, int pool_blocks, int w1_blocks, float inverse) {
  overlap_launches();
  __shared__ float shared[16 * TALL * THREADS];
  if (blockIdx.x >= pool_blocks) {
    const bool first = blockIdx.x < pool_blocks + w1_blocks;
    weight_gradient(
        first ? dz1 : dz2, first ? pooled : h, first ? dw1 : dw2, first ? db1 : db2,
        blockIdx.x - pool_blocks - (first ? 0 : w1_blocks), weight_slices, samples, first ? hidden : channels,
        first ? channels : hidden, shared);
    return;
  }
  const Piece p = piece_of(blockIdx.x, slices, TALL, samples, channels);
  warp_product<TALL, 4 / TALL>(
      hidden, 1, slices, p.active,
      [&](int row, int k) { return rows_of<HIDDEN4>(dz1, p.m + row, samples, k, hidden); },
      InOnePart(), AsLoaded(),
      [&](int k, int column, Operand4 (&out)[4]) { rows_as_rows<true>(w1, p.n + column, channels, k, hidden, out); },
      [](int, int) { return 0.f; },
      [&](int row, int column, float sum, float) {
        const int n = p.m + row, c = p.n + column;
        if (n < samples && c < channels) dpool[(i64)n * channels + c] = sum * inverse;
      },
      shared);
}
