// Partial moments of a channel, which a kernel leaves of the values that it stores, so that the batch norm behind it need not read
// the tensor for its statistics: how many values, their mean, and the sum of the squares of their distances from it (M2).
//
// moments: [blocks][3][channels] fp32, one part a block of the producer; a part with no value is three zeros. Values count as
// they are stored, rounded to the tensor's dtype. batchnorm/batchnorm_moments.cu merges the parts in a fixed order.
//
// A producer adds up value - shift and its square in fp32, the shift being one of its own values (so that a mean far from zero
// does not cancel), or 0 where that is not finite.

// `sum` and `square` of `count` values of `channel`, all of this block's.
__device__ __forceinline__ void leave_moments(
    float* moments, int block, int channels, int channel, int count, float shift, float sum, float square) {
  float* at = moments + (long long)block * 3 * channels + channel;
  const double mean = count ? (double)sum / (double)count : 0.0;
  const double m2 = (double)square - (double)sum * mean;
  at[0] = (float)count;
  at[channels] = count ? (float)((double)shift + mean) : 0.f;
  at[2 * channels] = m2 > 0.0 ? (float)m2 : (m2 != m2 ? (float)m2 : 0.f);
}

__device__ __forceinline__ float finite_or_zero(float f) { return f - f == 0.f ? f : 0.f; }
