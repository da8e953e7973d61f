// Squeeze-and-excite, what lies between the two passes over the tensor: two small products a sample, forward and backward.
//
//   forward   s = pool sums / HW     z1 = s W1^T + b1     h = act(z1)     z2 = h W2^T + b2
//   backward  dz2 = gate'(z2) * sum_hw dy x     dz1 = act'(z1) * (dz2 W2)     dpool = dz1 W1 / HW
//
// Shapes    partial: [N, splits, C]; s, z2, dz2, dpool: [N, C]; z1, dz1: [N, S]; W1: [S, C]; W2: [C, S]; b1: [S], b2: [C],
//           each may be null. All fp32, C a multiple of 4, rows of W1 16-byte aligned; C <= MAX_CHANNELS, S <= MAX_HIDDEN.
// Replaces  two 1x1 convolutions (or linear layers) on one pixel a sample, their casts, bias additions and the activation
//           between them: 4 to 8 launches in each direction, as one.
// Bytes     about nothing from DRAM. Each block reads both weights from L2: 8 C S bytes, 0.4 MB in EfficientNet-B0's
//           largest, 1.8 MB in MobileNetV3-L's. 4 C S flops a sample.
// Bound     latency, and L2 to SM at 64 bytes a clock: 4 to 16 us. A block takes SAMPLES samples, so that weights are read
//           N / SAMPLES times, and there is about a block for every second SM at N = 256.
// Grid      ceil(N / SAMPLES) blocks of THREADS.
// Numerics  fp32 (eager under autocast rounds s, z1, h and z2 to bf16). Deterministic.

#include "activation.cuh"
#include "gate.cuh"

typedef long long i64;

#define TOGETHER 4  // outputs that a thread sums at once: as many independent loads, and inputs read once for all of them

// out(o, sums) for every output o, a row of `weight` [outputs, K]: sums[q] = sum_k in[q][k] * weight[o][k].
// `lanes` threads (a power of two up to 32) share an output and take WIDTH values of a row at a time.
template <int WIDTH, class Out>
__device__ __forceinline__ void dense(
    const float* __restrict__ weight, int K, int outputs, int lanes, const float* in, int stride, Out out) {
  const int lane = threadIdx.x % lanes, group = threadIdx.x / lanes, groups = THREADS / lanes;
  // All threads take every turn: the shuffles need whole warps.
  for (int base = 0; base < outputs; base += TOGETHER * groups) {
    float sum[TOGETHER][SAMPLES];
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i)
#pragma unroll
      for (int q = 0; q < SAMPLES; ++q) sum[i][q] = 0.f;
#pragma unroll 2
    for (int k = lane * WIDTH; k < K; k += lanes * WIDTH) {
      float w[TOGETHER][WIDTH];
#pragma unroll
      for (int i = 0; i < TOGETHER; ++i) {
        const int o = base + i * groups + group;
        if (WIDTH == 4) {
          float4 v = {0.f, 0.f, 0.f, 0.f};
          if (o < outputs) v = *(const float4*)(weight + (i64)o * K + k);
          w[i][0] = v.x, w[i][1 % WIDTH] = v.y, w[i][2 % WIDTH] = v.z, w[i][3 % WIDTH] = v.w;
        } else {
          w[i][0] = o < outputs ? weight[(i64)o * K + k] : 0.f;
        }
      }
#pragma unroll
      for (int q = 0; q < SAMPLES; ++q) {
        float a[WIDTH];
        if (WIDTH == 4) {
          const float4 v = *(const float4*)(in + q * stride + k);
          a[0] = v.x, a[1 % WIDTH] = v.y, a[2 % WIDTH] = v.z, a[3 % WIDTH] = v.w;
        } else {
          a[0] = in[q * stride + k];
        }
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i)
#pragma unroll
          for (int j = 0; j < WIDTH; ++j) sum[i][q] += a[j] * w[i][j];
      }
    }
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i) {
#pragma unroll
      for (int q = 0; q < SAMPLES; ++q)
        for (int s = lanes / 2; s > 0; s /= 2) sum[i][q] += __shfl_xor_sync(0xffffffffu, sum[i][q], s);
      const int o = base + i * groups + group;
      if (o < outputs && lane == 0) out(o, sum[i]);
    }
  }
}

// done(j, q, sum) for every column j of `weight` [rows, columns]: sum over its rows c of in[q][c] * weight[c][j].
// A thread owns WIDTH columns and every `strip`-th row, so that the block reads the weight from end to end.
template <int WIDTH, class Done>
__device__ __forceinline__ void dense_columns(
    const float* __restrict__ weight, int rows, int columns, const float* in, int stride, float* strips, Done done) {
  const int across = columns / WIDTH, width = across < THREADS ? across : THREADS, strip = THREADS / width;
  const int r = threadIdx.x / width;
  for (int base = 0; base < across; base += width) {
    const int v = base + threadIdx.x % width;
    float sum[SAMPLES][WIDTH];
#pragma unroll
    for (int q = 0; q < SAMPLES; ++q)
#pragma unroll
      for (int j = 0; j < WIDTH; ++j) sum[q][j] = 0.f;
    if (v < across && r < strip) {
#pragma unroll 4
      for (int c = r; c < rows; c += strip) {
        float w[WIDTH];
        if (WIDTH == 4) {
          const float4 f = *(const float4*)(weight + (i64)c * columns + v * WIDTH);
          w[0] = f.x, w[1 % WIDTH] = f.y, w[2 % WIDTH] = f.z, w[3 % WIDTH] = f.w;
        } else {
          w[0] = weight[(i64)c * columns + v];
        }
#pragma unroll
        for (int q = 0; q < SAMPLES; ++q) {
          const float a = in[q * stride + c];
#pragma unroll
          for (int j = 0; j < WIDTH; ++j) sum[q][j] += a * w[j];
        }
      }
    }
#pragma unroll
    for (int q = 0; q < SAMPLES; ++q) {
#pragma unroll
      for (int j = 0; j < WIDTH; ++j) strips[j * THREADS + threadIdx.x] = sum[q][j];
      __syncthreads();
      if (v < across && r == 0) {
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) {
          float total = sum[q][j];
          for (int k = 1; k < strip; ++k) total += strips[j * THREADS + k * width + threadIdx.x];
          done(v * WIDTH + j, q, total);
        }
      }
      __syncthreads();
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) squeeze_excite_gate(
    const float* __restrict__ partial, const float* __restrict__ w1, const float* __restrict__ b1,
    const float* __restrict__ w2, const float* __restrict__ b2, float* __restrict__ pooled, float* __restrict__ z1,
    float* __restrict__ z2, int samples, int splits, int channels, int hidden, int lanes1, int lanes2,
    float inverse, float slope) {
  __shared__ __align__(16) float s[SAMPLES * MAX_CHANNELS], h[SAMPLES * MAX_HIDDEN];
  const int first = blockIdx.x * SAMPLES;
  for (int i = threadIdx.x; i < SAMPLES * channels; i += THREADS) {
    const int n = first + i / channels, c = i % channels;
    float sum = 0.f;
    if (n < samples) {
#pragma unroll 4
      for (int p = 0; p < splits; ++p) sum += partial[((i64)n * splits + p) * channels + c];
      sum *= inverse;
      pooled[(i64)n * channels + c] = sum;
    }
    s[i / channels * MAX_CHANNELS + c] = sum;
  }
  __syncthreads();
  dense<4>(w1, channels, hidden, lanes1, s, MAX_CHANNELS, [&](int o, const float (&sum)[SAMPLES]) {
    const float b = b1 ? b1[o] : 0.f;
#pragma unroll
    for (int q = 0; q < SAMPLES; ++q) {
      if (first + q < samples) z1[(i64)(first + q) * hidden + o] = sum[q] + b;
      h[q * MAX_HIDDEN + o] = activate(sum[q] + b, slope);
    }
  });
  __syncthreads();
  const auto expand = [&](int o, const float (&sum)[SAMPLES]) {
    const float b = b2 ? b2[o] : 0.f;
#pragma unroll
    for (int q = 0; q < SAMPLES; ++q)
      if (first + q < samples) z2[(i64)(first + q) * channels + o] = sum[q] + b;
  };
  if (hidden % 4 == 0)  // else rows of w2 are not 16-byte aligned
    dense<4>(w2, hidden, channels, lanes2, h, MAX_HIDDEN, expand);
  else
    dense<1>(w2, hidden, channels, lanes2, h, MAX_HIDDEN, expand);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) squeeze_excite_gate_backward(
    const float* __restrict__ partial, const float* __restrict__ z1, const float* __restrict__ z2,
    const float* __restrict__ w1, const float* __restrict__ w2, float* __restrict__ dz1, float* __restrict__ dz2,
    float* __restrict__ dpool, int samples, int splits, int channels, int hidden, float inverse, float slope) {
  __shared__ float d2[SAMPLES * MAX_CHANNELS], d1[SAMPLES * MAX_HIDDEN], strips[4 * THREADS];
  const int first = blockIdx.x * SAMPLES;
  for (int i = threadIdx.x; i < SAMPLES * channels; i += THREADS) {
    const int n = first + i / channels, c = i % channels;
    float sum = 0.f;
    if (n < samples) {
#pragma unroll 4
      for (int p = 0; p < splits; ++p) sum += partial[((i64)n * splits + p) * channels + c];
      sum *= gate_slope(z2[(i64)n * channels + c]);
      dz2[(i64)n * channels + c] = sum;
    }
    d2[i / channels * MAX_CHANNELS + c] = sum;
  }
  __syncthreads();
  const auto hidden_gradient = [&](int j, int q, float sum) {
    float d = 0.f;
    if (first + q < samples) {
      const i64 at = (i64)(first + q) * hidden + j;
      d = sum * slope_at(z1[at], slope);
      dz1[at] = d;
    }
    d1[q * MAX_HIDDEN + j] = d;
  };
  if (hidden % 4 == 0)
    dense_columns<4>(w2, channels, hidden, d2, MAX_CHANNELS, strips, hidden_gradient);
  else
    dense_columns<1>(w2, channels, hidden, d2, MAX_CHANNELS, strips, hidden_gradient);
  for (int v = threadIdx.x; v < channels / 4; v += THREADS) {
    float4 sum[SAMPLES];
#pragma unroll
    for (int q = 0; q < SAMPLES; ++q) sum[q].x = sum[q].y = sum[q].z = sum[q].w = 0.f;
#pragma unroll 8
    for (int j = 0; j < hidden; ++j) {
      const float4 w = ((const float4*)(w1 + (i64)j * channels))[v];
#pragma unroll
      for (int q = 0; q < SAMPLES; ++q) {
        const float d = d1[q * MAX_HIDDEN + j];
        sum[q].x += d * w.x;
        sum[q].y += d * w.y;
        sum[q].z += d * w.z;
        sum[q].w += d * w.w;
      }
    }
#pragma unroll
    for (int q = 0; q < SAMPLES; ++q) {
      if (first + q >= samples) continue;
      const float4 d = {sum[q].x * inverse, sum[q].y * inverse, sum[q].z * inverse, sum[q].w * inverse};
      ((float4*)(dpool + (i64)(first + q) * channels))[v] = d;
    }
  }
}
