// Winograd's F(4x4, 3x3) along one side, at the points 0, 1, -1, 1/2, -2 and infinity, and the scales that keep it in fp16's range.
//
//   y = A^T [(G g) * (B^T d)]   of a filter's three taps g and six pixels d, four results y; along both sides the same twice.
//   g' = G^T [(A y') * (B^T d)]  the filter's gradient, of the results' y'.
//
// The rows of B^T are scaled so that their magnitudes add up to 1, and those of G by the inverse: what six pixels become is never larger
// than the largest of them. Source: Lavin and Gray, Fast Algorithms for Convolutional Neural Networks (arXiv:1509.09308); the points are
// those of the least error in fp16 of the sets that were tried (docs/notes/kernels/convolution-algorithms.md).
//
// Pixels of a tile, all channels, are scaled by a power of two to below 2^PIXELS_BELOW, and an output's filters so that of each frequency
// the magnitudes of all inputs add up to less than 2^FILTERS_BELOW. So a product summed over all channels is below 2^15, and fp16 ends at
// 65,504: what is finite stays so, whatever its magnitude. What is not makes results that are not; those are made from their own taps.
//
// WEIGHT_STORAGE: 0 fp32, 2 bf16. TRANSPOSED: taps are turned, for the gradient of an input. PAD: pixels of zeros at each side.

typedef long long i64;

#define PIXELS_BELOW 3
#define FILTERS_BELOW 12
#define FILTER_GROWTH 125.44f  // the most that G g G^T has of the largest of nine taps
#define GRADIENTS_BELOW 14  // of the largest of a result's gradient, beside the scales of the pixels that it is multiplied with

#if WEIGHT_STORAGE == 0
typedef float Weight;
__device__ __forceinline__ float widen_weight(Weight w) { return w; }
__device__ __forceinline__ Weight narrow_weight(float v) { return v; }
#else
typedef unsigned short Weight;
__device__ __forceinline__ float widen_weight(Weight w) { return widen_bf16(w); }
__device__ __forceinline__ Weight narrow_weight(float v) { return (Weight)narrow_bf16x2(v, 0.f); }
#endif

__device__ __forceinline__ i64 tap_at(int r, int s, i64 step_row, i64 step_column) {
  return (TRANSPOSED ? 2 - r : r) * step_row + (TRANSPOSED ? 2 - s : s) * step_column;
}

// B^T d
__device__ __forceinline__ void pixel_transform(const float (&d)[6], float (&v)[6]) {
  const float a = d[1] - d[3], b = d[2] - d[4];
  v[0] = fmaf(2.f, d[0] + d[4], fmaf(-3.f, a, -4.f * d[2])) * (1.f / 14);
  v[1] = fmaf(-2.f, d[1], fmaf(5.f, d[3], fmaf(2.f, d[4], d[2]))) * (1.f / 10);
  v[2] = fmaf(-2.f, d[1], fmaf(5.f, d[2], fmaf(-2.f, d[4], -d[3]))) * (1.f / 10);
  v[3] = fmaf(2.f, a, b) * (1.f / 6);
  v[4] = fmaf(-2.f, b, a) * (1.f / 6);
  v[5] = fmaf(2.f, d[1] + d[5], fmaf(-3.f, b, -4.f * d[3])) * (1.f / 14);
}

// G g
__device__ __forceinline__ void filter_transform(float g0, float g1, float g2, float (&u)[6]) {
  u[0] = 7.f * g0;
  u[1] = (5.f / 3) * (g0 + g1 + g2);
  u[2] = (5.f / 3) * (g0 - g1 + g2);
  u[3] = fmaf(6.4f, g0, fmaf(3.2f, g1, 1.6f * g2));
  u[4] = fmaf(0.2f, g0, fmaf(-0.4f, g1, 0.8f * g2));
  u[5] = 7.f * g2;
}

// A^T m
__device__ __forceinline__ void result_transform(const float (&m)[6], float (&y)[4]) {
  const float sum = m[1] + m[2], difference = m[1] - m[2];
  y[0] = m[0] + sum + m[3] + m[4];
  y[1] = fmaf(0.5f, m[3], fmaf(-2.f, m[4], difference));
  y[2] = fmaf(0.25f, m[3], fmaf(4.f, m[4], sum));
  y[3] = fmaf(0.125f, m[3], fmaf(-8.f, m[4], difference)) + m[5];
}

// A dy for the weight's gradient, which is F(3x3, 4x4) at the same points: A is A^T turned, its rows scaled as those of B^T are.
__device__ __forceinline__ void gradient_transform(const float (&g)[4], float (&d)[6]) {
  const float even = g[0] + g[2], odd = g[1] + g[3];
  d[0] = g[0];
  d[1] = 0.25f * (even + odd);
  d[2] = 0.25f * (even - odd);
  d[3] = fmaf(8.f, g[0], fmaf(4.f, g[1], fmaf(2.f, g[2], g[3]))) * (1.f / 15);
  d[4] = fmaf(-8.f, g[3], fmaf(4.f, g[2], fmaf(-2.f, g[1], g[0]))) * (1.f / 15);
  d[5] = g[3];
}

// G^T m, with the inverse of those scales.
__device__ __forceinline__ void tap_transform(const float (&m)[6], float (&w)[3]) {
  const float sum = (20.f / 3) * (m[1] + m[2]);
  w[0] = fmaf(7.f, m[0], fmaf(12.f, m[3], fmaf(3.f, m[4], sum)));
  w[1] = fmaf(20.f / 3, m[1] - m[2], 6.f * (m[3] - m[4]));
  w[2] = fmaf(7.f, m[5], fmaf(3.f, m[3], fmaf(12.f, m[4], sum)));
}

// A power of two by which a magnitude comes below 2^below, and to half of that or more unless it is below 2^-111; NaN where it is not finite.
__device__ __forceinline__ float scale_for(float most, int below) {
  const int exponent = (int)(__float_as_uint(most) >> 23);  // biased
  if (exponent == 255) return __uint_as_float(0x7fc00000u);
  return __uint_as_float((unsigned int)(127 + 126 + below - (exponent < 16 ? 16 : exponent)) << 23);
}
