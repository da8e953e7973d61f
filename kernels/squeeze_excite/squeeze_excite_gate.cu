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

// out(o, sums) for every output o of rows of `weight` [outputs, K]: sums[q] = sum_k in[q][k] * weight[o][k].
// `lanes` threads (a power of two up to 32) share an output and take WIDTH values of a row at a time.
template <int WIDTH, class Out>
__device__ __forceinline__ void dense(
    const float* __restrict__ weight, int K, int outputs, int lanes, const float* in, int stride, Out out) {
  const int lane = threadIdx.x % lanes;
  for (int base = 0; base < outputs; base += THREADS / lanes) {  // all threads take every turn: shuffles need whole warps
    const int o = base + threadIdx.x / lanes;
    float sum[SAMPLES];
#pragma unroll
    for (int q = 0; q < SAMPLES; ++q) sum[q] = 0.f;
    if (o < outputs) {
      const float* row = weight + (i64)o * K;
#pragma unroll 4
      for (int k = lane * WIDTH; k < K; k += lanes * WIDTH) {
        if (WIDTH == 4) {
          const float4 w = *(const float4*)(row + k);
#pragma unroll
          for (int q = 0; q < SAMPLES; ++q) {
            const float4 a = *(const float4*)(in + q * stride + k);
            sum[q] += a.x * w.x + a.y * w.y + a.z * w.z + a.w * w.w;
          }
        } else {
          const float w = row[k];
#pragma unroll
          for (int q = 0; q < SAMPLES; ++q) sum[q] += in[q * stride + k] * w;
        }
      }
    }
#pragma unroll
    for (int q = 0; q < SAMPLES; ++q)
      for (int s = lanes / 2; s > 0; s /= 2) sum[q] += __shfl_xor_sync(0xffffffffu, sum[q], s);
    if (o < outputs && lane == 0) out(o, sum);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) squeeze_excite_gate(
    const float* __restrict__ partial, const float* __restrict__ w1, const float* __restrict__ b1,
    const float* __restrict__ w2, const float* __restrict__ b2, float* __restrict__ pooled, float* __restrict__ z1,
    float* __restrict__ z2, int samples, int splits, int channels, int hidden, int lanes, float inverse, float slope) {
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
  dense<4>(w1, channels, hidden, 32, s, MAX_CHANNELS, [&](int o, const float (&sum)[SAMPLES]) {
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
    dense<4>(w2, hidden, channels, lanes, h, MAX_HIDDEN, expand);
  else
    dense<1>(w2, hidden, channels, lanes, h, MAX_HIDDEN, expand);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) squeeze_excite_gate_backward(
    const float* __restrict__ partial, const float* __restrict__ z1, const float* __restrict__ z2,
    const float* __restrict__ w1, const float* __restrict__ w2, float* __restrict__ dz1, float* __restrict__ dz2,
    float* __restrict__ dpool, int samples, int splits, int channels, int hidden, float inverse, float slope) {
  __shared__ float d2[SAMPLES * MAX_CHANNELS], d1[SAMPLES * MAX_HIDDEN], strips[SAMPLES * THREADS];
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
  // dz2 W2: a thread owns a column and every `strip`-th row, so that the block reads W2 from end to end.
  const int width = hidden < THREADS ? hidden : THREADS, strip = THREADS / width;
  for (int base = 0; base < hidden; base += width) {
    const int j = base + threadIdx.x % width, r = threadIdx.x / width;
    float sum[SAMPLES];
#pragma unroll
    for (int q = 0; q < SAMPLES; ++q) sum[q] = 0.f;
    if (j < hidden && r < strip) {
#pragma unroll 8
      for (int c = r; c < channels; c += strip) {
        const float w = w2[(i64)c * hidden + j];
#pragma unroll
        for (int q = 0; q < SAMPLES; ++q) sum[q] += d2[q * MAX_CHANNELS + c] * w;
      }
    }
#pragma unroll
    for (int q = 0; q < SAMPLES; ++q) strips[q * THREADS + threadIdx.x] = sum[q];
    __syncthreads();
    if (j < hidden && r == 0) {
#pragma unroll
      for (int q = 0; q < SAMPLES; ++q) {
        for (int k = 1; k < strip; ++k) sum[q] += strips[q * THREADS + k * width + threadIdx.x];
        float d = 0.f;
        if (first + q < samples) {
          const i64 at = (i64)(first + q) * hidden + j;
          d = sum[q] * slope_at(z1[at], slope);
          dz1[at] = d;
        }
        d1[q * MAX_HIDDEN + j] = d;
      }
    }
    __syncthreads();
  }
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
