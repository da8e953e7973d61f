// Grouped convolution by blocks: WARPS octets of the result, whole groups, a warp each, and TILES * 16 pixels of a row, `strip` columns of
// `images` images side by side, so that 7 and 14 columns fill tiles too. The block walks down the rows. Include grouped.cuh first.
//
// A pixel takes PIXEL 16-byte units of shared memory, an odd number: the 8 pixels of an ldmatrix matrix then lie in 32 different
// banks. A step of 16 is two chunks. An odd last one is doubled, with weights of zero: what is not finite spreads no further.

#define STEPS ((CHUNKS + 1) / 2)
#define PIXEL (WARPS | 1)

// The weight from channel c of the block of CG channels to channel n of `octet`, at tap (r, s); 0 between two groups.
__device__ __forceinline__ Weight tap_at(
    const Weight* weight, const Strides& at, int octet, int octets, int n, int c, int r, int s) {
  const int out = octet * 8 + n;
  if (octet >= octets || out % CG / GROUP != c / GROUP) return 0;
  const int in = c % GROUP;
#if TRANSPOSED
  return weight[(out / GROUP * GROUP + in) * at.out + out % GROUP * at.in + r * at.row + s * at.column];
#else
  return weight[out * at.out + in * at.in + r * at.row + s * at.column];
#endif
}

// Half a fragment of weights: the 8 channels from c on to the 8 of `octet`, for this lane.
__device__ __forceinline__ unsigned int taps_of(
    const Weight* weight, const Strides& at, int octet, int octets, int c, int r, int s) {
  const int n = threadIdx.x % 32 / 4, k = c + threadIdx.x % 4 * 2;
  return paired(tap_at(weight, at, octet, octets, n, k, r, s), tap_at(weight, at, octet, octets, n, k + 1, r, s));
}
