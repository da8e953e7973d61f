// VEC fp32 values a thread beside 16-bit ones: two 16-byte stores. Of neighbouring threads each store alone would fill half of every
// 32-byte sector; so two threads exchange a half, and each store fills whole sectors. Include vector.cuh first.

#if VEC == 8
// f to p, where threads of even number hold the vector before their neighbour's (`paired`), and both are here; else as they are.
__device__ __forceinline__ void store_wide(float* p, const float (&f)[VEC], bool paired) {
  float* first = p;
  float* second = p + 4;
  float a[4], b[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) a[j] = f[j], b[j] = f[4 + j];
  if (paired) {
    const bool odd = threadIdx.x & 1;
    const unsigned int both = 3u << (threadIdx.x & 30);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float other = __shfl_xor_sync(both, odd ? a[j] : b[j], 1);
      a[j] = odd ? other : a[j];
      b[j] = odd ? b[j] : other;
    }
    first = odd ? p - 4 : p;
    second = odd ? p + 4 : p + 8;
  }
  *(float4*)first = {a[0], a[1], a[2], a[3]};
  *(float4*)second = {b[0], b[1], b[2], b[3]};
}
#endif
