// Mean and 1 / standard deviation of rows that lie in registers.
//
// LANES threads have a row, each VECTORS vectors of it (vector = lane + k * LANES; those past the row's end are zero), ROWS rows
// at once. Two passes over registers: no cancellation. All lanes of a warp must call.

__device__ __forceinline__ void add_over_lanes(float (&sum)[ROWS]) {
#pragma unroll
  for (int o = LANES / 2; o > 0; o /= 2)
#pragma unroll
    for (int u = 0; u < ROWS; ++u) sum[u] += __shfl_xor_sync(0xffffffffu, sum[u], o);
}

__device__ __forceinline__ void row_means(const Vec16 (&v)[ROWS][VECTORS], float inverse, float (&mean)[ROWS]) {
#pragma unroll
  for (int u = 0; u < ROWS; ++u) {
    mean[u] = 0.f;
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) {
      float f[VEC];
      widen(v[u][k], f);
#pragma unroll
      for (int j = 0; j < VEC; ++j) mean[u] += f[j];
    }
  }
  add_over_lanes(mean);
#pragma unroll
  for (int u = 0; u < ROWS; ++u) mean[u] *= inverse;
}

__device__ __forceinline__ void row_statistics(
    const Vec16 (&v)[ROWS][VECTORS], int lane, int vectors, float inverse, float eps, float (&mean)[ROWS], float (&rstd)[ROWS]) {
  row_means(v, inverse, mean);
#pragma unroll
  for (int u = 0; u < ROWS; ++u) {
    rstd[u] = 0.f;
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) {
      if (lane + k * LANES >= vectors) continue;
      float f[VEC];
      widen(v[u][k], f);
#pragma unroll
      for (int j = 0; j < VEC; ++j) rstd[u] += (f[j] - mean[u]) * (f[j] - mean[u]);
    }
  }
  add_over_lanes(rstd);
#pragma unroll
  for (int u = 0; u < ROWS; ++u) rstd[u] = rsqrtf(rstd[u] * inverse + eps);
}
