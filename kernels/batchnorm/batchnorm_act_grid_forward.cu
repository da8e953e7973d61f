// Batch normalisation in training mode, then an optional residual add, then an activation, in one launch of the whole GPU that
// reads x once and keeps it on chip, or of a larger x what the chip holds (STREAM).
//
//   mean[c] = 1/M sum_m x[m,c]        var[c] = 1/M sum_m (x[m,c] - mean[c])^2        (biased)
//   z = (x - mean) * weight / sqrt(var + eps) + bias (+ residual)                    y = act(z)
//   running_mean += momentum * (mean - running_mean);  running_var likewise with var * M / (M - 1)
//
// Shapes    as in batchnorm_act_forward.cu: x, residual, y: [M, C] with M = N*H*W, rows contiguous (NHWC), fp16, bf16 or fp32;
//           C a multiple of VEC. weight, bias, running_*: [C] fp32 (running_*_out may be the same memory). saved: [2, C] fp32
//           (mean, 1/sqrt(var + eps)). mask: [M, C/VEC] bytes, only with a residual and an activation.
// Replaces  the two launches of batchnorm_act_forward.cu where x fits the registers and the shared memory of all SMs, and beyond.
// Bytes     1 read (+1 residual), 1 write (+1/16 mask): a third, or a quarter, less than in two launches. STREAM: and what is not
//           kept again, from L2 as far as that holds it: it is the last to be read first.
// Bound     L2 where x still lies there (H200: some 5.5 TB/s), else DRAM (4.2), and a chain that no size shortens: launch and
//           first load 2 us, sums of the block 0.5, send and receive the column's partial sums 2 x 0.6, constants 0.2: some
//           4 us. Arithmetic: 70 instructions a vector and warp, 1 us per 64 KiB an SM, half of it under loads.
//           Expected on an H200, warm, bf16, ReLU (two launches measured 20 us at 12.6 MB on average):
//             16.8 MB 128x64x32x32  loads 3.2, stores 4.2: 12 us        25.7 MB 256x256x14x14  16 us
//              8.4 MB 128x128x16x16 9 us     4.2 MB 128x256x8x8 7 us    12.8 MB 256x512x7x7    11 us
//             24.1 MB 256x960x7x7   15 us    8.0 MB 256x80x14x14 9 us
//           STREAM, 29 MB kept: 51 MB 33 us, 103 MB 74 us (two launches measured 51 and 90).
// WHOLE_ROWS  a block has whole rows, where pieces of them would split cache lines, or where it takes several rows for their channels to be
//           whole vectors: one more exchange, 4 us (11 MB: 16 for 12).
// Grid      (blocks, tiles), include/grid_tile.cuh; cooperative. HOLD rows of 16 bytes a thread in registers, `kept` more in shared
//           memory, all under way at once: x first, then `ahead` rows of the residual, which land during the exchange of sums.
// Numerics  those of the two launches: fp32 sums of x - x[0,c], fp64 across warps and blocks.
// Limits    without STREAM M <= (HOLD + kept) * blocks * (THREADS / tile); fewer than 2^31 vectors; every block on an SM at once.

#ifndef STREAM
#define STREAM 0  // rows that are read twice, at a time; 0 where all are kept
#endif

#include "vector.cuh"
#include "gelu.cuh"
#include "cp_async.cuh"
#include "slots.cuh"
#include "grid_tile.cuh"

#ifndef UNROLL
#define UNROLL 4  // rows that come from shared memory at a time
#endif

struct Channel {
  float mean[VEC], scale[VEC], offset[VEC];
};

// y, and with a residual the mask, of one vector.
__device__ __forceinline__ void apply(
    const Channel& k, const Vec16& v, const Vec16& r, Vec16* y, unsigned char* mask, int place, float slope) {
  float f[VEC];
  widen(v, f);
#if RESIDUAL
  float g[VEC];
  widen(r, g);
  unsigned int bits = 0;
#endif
#pragma unroll
  for (int j = 0; j < VEC; ++j) {
    float z = (f[j] - k.mean[j]) * k.scale[j] + k.offset[j];
#if RESIDUAL
    z += g[j];
    bits |= (lives(z) ? 1u : 0u) << j;
#endif
    f[j] = activate_streaming(z, slope);
  }
  store(y + place, narrow(f));
#if RESIDUAL && ACT != 0
  mask[place] = (unsigned char)bits;  // fp32 uses the low four bits of its byte
#endif
}

#if STORAGE == 0
typedef float Element;
__device__ __forceinline__ float widened(Element e) { return e; }
#else
typedef unsigned short Element;
__device__ __forceinline__ float widened(Element e) {
  const Vec16 v = {{e, 0u, 0u, 0u}};
  float f[VEC];
  widen(v, f);
  return f[0];
}
#endif

__device__ __forceinline__ void accumulate(const Vec16& v, const float (&shift)[VEC], float (&sum)[VEC], float (&square)[VEC]) {
  float f[VEC];
  widen(v, f);
#pragma unroll
  for (int j = 0; j < VEC; ++j) {
    const float d = f[j] - shift[j];
    sum[j] += d;
    square[j] += d * d;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) batchnorm_act_grid_forward(
    const Vec16* __restrict__ x, const Vec16* __restrict__ residual, unsigned int* __restrict__ memory, int half,
    const float* running_mean, const float* running_var, const float* __restrict__ weight, const float* __restrict__ bias,
    float* __restrict__ saved, float* running_mean_out, float* running_var_out, Vec16* __restrict__ y, unsigned char* __restrict__ mask, int rows, int vectors, int tile, int kept,
    int ahead,
#if WHOLE_ROWS
    int channels, int joined,  // rows of the tensor in a row
#endif
    float momentum, float eps, float slope) {
  extern __shared__ __align__(16) Vec16 slots[];  // [kept + ahead][THREADS]
  __shared__ __align__(16) float scratch[GRID_SCRATCH];
  __shared__ float constant[(WHOLE_ROWS ? 3 : 5) * GRID_WIDTH];
  const Exchange exchange = open_exchange(memory, half);
  const GridTile t = grid_tile(tile, vectors);
  const int width = tile * VEC;
#if !WHOLE_ROWS
  const int channels = vectors * VEC, joined = 1;
#endif
  const int end = t.vector < 0 ? 0 : rows;
  const int at = t.first * vectors + t.vector, step = t.stride * vectors;
  const Slot slot = first_slot(slots);
#if STREAM
  const unsigned long long policy = evict_first();  // what is read again has L2 to itself
#endif
  Slot to = slot;
  for (int k = 0; k < kept; ++k, go_on(to))
    if (t.first + (HOLD + k) * t.stride < end)
#if STREAM
      copy_to(to, x + at + (HOLD + k) * step, policy);
#else
      copy_to(to, x + at + (HOLD + k) * step);
#endif
  cp_async_commit();
  Vec16 v[HOLD];
#pragma unroll
  for (int u = 0; u < HOLD; ++u)
    if (t.first + u * t.stride < end) v[u] = load(x + at + u * step);
  // While the loads are under way: behind the sums they would be waited for. All of them before what waits for one.
  Vec16 row = {};
  if (t.vector >= 0) row = load(x + t.vector);
#if WHOLE_ROWS
  const int c = owned_channel(channels);
  Element own_shift = {};
  float old_mean = 0.f, old_var = 0.f;
  if (c >= 0) {
    own_shift = ((const Element*)x)[c];
    old_mean = running_mean[c];
    old_var = running_var[c];
  }
  if (t.vector >= 0) {
    for (int j = t.ty; j < VEC; j += t.rows_per_pass) {
      const int column = t.vector * VEC + j, channel = joined > 1 ? column % channels : column;
      constant[width + j * tile + t.tx] = weight[channel];
      constant[2 * width + j * tile + t.tx] = bias[channel];
    }
  }
#else
  const int c = grid_channel(tile, vectors);
  if (c >= 0) {
    const bool last = blockIdx.x == 0;  // who writes the running statistics
    const float its_weight = weight[c], its_bias = bias[c];
    const float old_mean = last ? running_mean[c] : 0.f, old_var = last ? running_var[c] : 0.f;
    constant[width + threadIdx.x] = its_weight;
    constant[2 * width + threadIdx.x] = its_bias;
    if (last) {
      constant[3 * width + threadIdx.x] = old_mean;
      constant[4 * width + threadIdx.x] = old_var;
    }
  }
#endif
  float sum[VEC], square[VEC], shift[VEC];
#pragma unroll
  for (int j = 0; j < VEC; ++j) sum[j] = square[j] = 0.f;
  widen(row, shift);
#if WHOLE_ROWS
  if (joined > 1 && t.vector >= 0)  // one for all columns of a channel
#pragma unroll
    for (int j = 0, channel = t.vector * VEC % channels; j < VEC; ++j, channel = channel + 1 < channels ? channel + 1 : 0)
      shift[j] = widened(((const Element*)x)[channel]);
#endif
  if (threadIdx.x < tile) {
#pragma unroll
    for (int j = 0; j < VEC; ++j) constant[j * tile + t.tx] = shift[j];
  }
#if RESIDUAL
  const Slot other = slot + kept * SLOTS_APART;
  for (int k = 0; k < ahead; ++k)
    if (t.first + k * t.stride < end) copy_to(other + k * SLOTS_APART, residual + at + k * step);
#endif
  cp_async_commit();
#if STREAM
  // What is not kept goes by while the copies are under way.
  for (int row = t.first + (HOLD + kept) * t.stride; row < end; row += STREAM * t.stride) {
    Vec16 w[STREAM];
#pragma unroll
    for (int u = 0; u < STREAM; ++u)
      if (row + u * t.stride < end) w[u] = load(x + (row + u * t.stride) * vectors + t.vector);
#pragma unroll
    for (int u = 0; u < STREAM; ++u)
      if (row + u * t.stride < end) accumulate(w[u], shift, sum, square);
  }
#endif
  cp_async_wait<1>();  // x is here, the residual may be under way
  // This thread's rows, those on chip, and of these those in shared memory: whole batches of loads need no branch between them.
  const int passes = t.first < end ? (end - t.first + t.stride - 1) / t.stride : 0;
  const int held = passes < HOLD + kept ? passes : HOLD + kept, own = held - HOLD;
  for (int base = 0; base < own; base += UNROLL) {
    if (base + UNROLL <= own) {
      Vec16 w[UNROLL];
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) w[u] = load_slot(slot + (base + u) * SLOTS_APART);
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) accumulate(w[u], shift, sum, square);
    } else {
#pragma unroll 1
      for (int row = base; row < own; ++row) accumulate(load_slot(slot + row * SLOTS_APART), shift, sum, square);
    }
  }
#pragma unroll
  for (int u = 0; u < HOLD; ++u)
    if (t.first + u * t.stride < end) accumulate(v[u], shift, sum, square);
  double var;
  float mean, invstd;
  const double values = (double)rows * joined;  // a channel
  const double inverse = 1.0 / values;  // ahead of the sums: it takes as long as a trip to L2
  const auto statistics = [&](double first, double second, float its_shift) {
    const double d = first * inverse;
    var = second * inverse - d * d;
    var = var > 0.0 ? var : (var != var ? var : 0.0);
    mean = (float)(d + (double)its_shift);
    invstd = (float)rsqrt(var + (double)eps);
  };
#if WHOLE_ROWS
  sum_over_rows(
      vectors, channels, sum, square, scratch, exchange,
      [&](double first, double second) {
        statistics(first, second, widened(own_shift));
        return make_float2(mean, invstd);
      },
      [&](int channel, float its_mean, float its_invstd) {
        for (int column = channel; column < width; column += channels) {
          const int place = place_of(column, vectors);
          constant[place] = its_mean;
          constant[width + place] *= its_invstd;
        }
      });
  const unsigned int left = threadIdx.x == 0 ? leave_exchange(exchange) : 0u;
#else
  double first, second;
  sum_over_grid(tile, sum, square, scratch, exchange, first, second);
  const unsigned int left = threadIdx.x == 0 ? leave_exchange(exchange) : 0u;
  if (c >= 0) {
    statistics(first, second, constant[threadIdx.x]);
    constant[threadIdx.x] = mean;
    constant[width + threadIdx.x] *= invstd;
  }
#endif
  cp_async_wait<0>();
  __syncthreads();
  Channel k;
#pragma unroll
  for (int j = 0; j < VEC; ++j) {
    k.mean[j] = constant[j * tile + t.tx];
    k.scale[j] = constant[width + j * tile + t.tx];
    k.offset[j] = constant[2 * width + j * tile + t.tx];
  }
#if STREAM
  // Read again, the last of it first, which L2 still has.
#if RESIDUAL
  // Of two tensors, a few rows at a time: the next ones come while these are done with.
  constexpr int few = STREAM / 4;
  Vec16 even_x[few], even_r[few], odd_x[few], odd_r[few];
  const auto again = [&](int pass, Vec16 (&w)[few], Vec16 (&q)[few]) {
#pragma unroll
    for (int u = 0; u < few; ++u) {
      if (pass - u < HOLD + kept) continue;
      w[u] = load(x + at + (pass - u) * step);
      q[u] = load(residual + at + (pass - u) * step);
    }
  };
  const auto finish = [&](int pass, const Vec16 (&w)[few], const Vec16 (&q)[few]) {
#pragma unroll
    for (int u = 0; u < few; ++u)
      if (pass - u >= HOLD + kept) apply(k, w[u], q[u], y, mask, at + (pass - u) * step, slope);
  };
  again(passes - 1, even_x, even_r);
  for (int last = passes - 1; last >= HOLD + kept; last -= 2 * few) {
    again(last - few, odd_x, odd_r);
    finish(last, even_x, even_r);
    again(last - 2 * few, even_x, even_r);
    finish(last - few, odd_x, odd_r);
  }
#else
  for (int last = passes - 1; last >= HOLD + kept; last -= STREAM) {
    Vec16 w[STREAM];
#pragma unroll
    for (int u = 0; u < STREAM; ++u)
      if (last - u >= HOLD + kept) w[u] = load(x + at + (last - u) * step);
#pragma unroll
    for (int u = 0; u < STREAM; ++u)
      if (last - u >= HOLD + kept) apply(k, w[u], w[u], y, mask, at + (last - u) * step, slope);
  }
#endif
#endif
  // What is on chip, with the residual's next rows on their way.
  Vec16 r[UNROLL], next[UNROLL];
  const auto others = [&](int first, int count, Vec16 (&q)[UNROLL]) {
#if RESIDUAL
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
      if (u < count && first + u < held)
        q[u] = first + u < ahead ? load_slot(other + (first + u) * SLOTS_APART) : load(residual + at + (first + u) * step);
#endif
  };
  static_assert(HOLD <= UNROLL, "");
  others(0, HOLD, r);
  others(HOLD, UNROLL, next);
#pragma unroll
  for (int u = 0; u < HOLD; ++u)
    if (t.first + u * t.stride < end) apply(k, v[u], r[u], y, mask, at + u * step, slope);
  for (int base = 0; base < own; base += UNROLL) {
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) r[u] = next[u];
    others(HOLD + base + UNROLL, UNROLL, next);
    if (base + UNROLL <= own) {
      Vec16 w[UNROLL];
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) w[u] = load_slot(slot + (base + u) * SLOTS_APART);
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) apply(k, w[u], r[u], y, mask, at + (HOLD + base + u) * step, slope);
    } else {
#pragma unroll
      for (int u = 0; u < UNROLL; ++u)
        if (base + u < own)
          apply(k, load_slot(slot + (base + u) * SLOTS_APART), r[u], y, mask, at + (HOLD + base + u) * step, slope);
    }
  }
  if (c >= 0 && (WHOLE_ROWS ? threadIdx.x % 16 == 0 : blockIdx.x == 0)) {  // last: nobody in this launch waits for it
#if !WHOLE_ROWS
    const float old_mean = constant[3 * width + threadIdx.x], old_var = constant[4 * width + threadIdx.x];
#endif
    saved[c] = mean;
    saved[channels + c] = invstd;
    running_mean_out[c] = old_mean + momentum * (mean - old_mean);
    running_var_out[c] = old_var + momentum * ((float)(var * (values / (values - 1.0))) - old_var);
  }
  if (threadIdx.x == 0) close_exchange(exchange, left, exchanged_words(WHOLE_ROWS ? channels : width));
}
