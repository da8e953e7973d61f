// Products of small fp32 matrices on the tensor cores (tf32), one piece of the result a warp, straight from global memory.
//
// out[m, n] = sum_k a(m, k) b(k, n). A warp makes 16 * HEIGHT rows by 32 columns; `slices` warps share a piece and take every
// slices-th 16 of k. Which k, row or column a fragment's register stands for is free as long as both operands agree, so each
// lane takes 16 bytes at a time: k = 4 t .. 4 t + 3, rows 2 g and 2 g + 1, columns 4 g .. 4 g + 3 (g = lane / 4, t = lane % 4).
// Every loaded value is used by the tensor cores at once, nothing passes through shared memory but the slices' sums.
//
// SPLIT 0: operands rounded to tf32 (11 bits: finer than bf16, as fp16). SPLIT 1: each operand is two tf32 values and the
// product three, which is as exact as fp32. Include mma.cuh first. THREADS: the block's, a multiple of 32.

#define PIECE_COLUMNS 32
#define STEP 16  // of k at a time
#define FINISHED 4  // values of a thread whose result's operands are loaded together

struct Operand4 {
  float v[4];
};

// Four neighbouring values of a row of `size` values, zero behind its end. Rows are 16-byte aligned where ALIGNED.
template <bool ALIGNED>
__device__ __forceinline__ Operand4 four(const float* __restrict__ row, int at, int size) {
  Operand4 o;
  if (ALIGNED) {
    float4 f = {0.f, 0.f, 0.f, 0.f};
    if (at < size) f = *(const float4*)(row + at);
    o.v[0] = f.x, o.v[1] = f.y, o.v[2] = f.z, o.v[3] = f.w;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) o.v[i] = at + i < size ? row[at + i] : 0.f;
  }
  return o;
}

__device__ __forceinline__ Operand4 no_operand() {
  Operand4 o;
  o.v[0] = o.v[1] = o.v[2] = o.v[3] = 0.f;
  return o;
}

__device__ __forceinline__ unsigned int rest(float f, unsigned int high) { return to_tf32(f - __uint_as_float(high)); }

// What a lane loads of two rows of the left operand, k .. k + 3 of each.
struct Rows {
  Operand4 of[2];
};

// The left operand of most products: as it lies in memory.
struct AsLoaded {
  __device__ __forceinline__ void operator()(int, int, const Rows& raw, Operand4 (&out)[2]) const {
    out[0] = raw.of[0];
    out[1] = raw.of[1];
  }
};
struct InOnePart {
  __device__ __forceinline__ void operator()(int, int, int, Rows&) const {}
};

// Left operand, rows `row` and `row` + 1 of the piece (0 .. 16 HEIGHT - 1), k .. k + 3 of each: begin(row, k) loads what it is made of,
// a Raw; join(row, k, part, raw) adds part 1, 2 .. of the `parts` in which it lies; end(row, k, raw, out) makes the operand. Nothing
// before `end` may wait for a load: those of PREFETCH steps are under way together. b(k, column, out): the four columns of four k, as
// Operand4[4] by k. early(row, column): a float that done(row, column, sum, early) wants with a value of the piece, loaded ahead.
// `shared`: 16 * HEIGHT * THREADS floats. All threads of the block call, with the same slices (a power of two); `active` alike in a
// piece's warps.
template <int HEIGHT, int PREFETCH, class Begin, class Join, class End, class B, class Early, class Done>
__device__ __forceinline__ void warp_product(
    int size, int parts, int slices, bool active, Begin begin, Join join, End end, B b, Early early, Done done, float* shared) {
  using Raw = decltype(begin(0, 0));
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4, slice = warp % slices;
  const int steps = (size + STEP - 1) / STEP;
  float sum[HEIGHT][4][4], small[HEIGHT][4][4];
#pragma unroll
  for (int r = 0; r < HEIGHT; ++r)
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[r][i][e] = small[r][i][e] = 0.f;
  // Of the piece's 16 HEIGHT values a lane, numbered 16 r + 8 row + 4 half + i (row 2 g + row of the r-th 16, column 8 t + 4 half + i),
  // this warp adds up and finishes those from `mine` on.
  const int each = 16 * HEIGHT / slices > 0 ? 16 * HEIGHT / slices : 1;
  const int mine = slice * each, last = active ? min(mine + each, 16 * HEIGHT) : 0;
  const auto row_of = [&](int v) { return v / 16 * 16 + 2 * g + v / 8 % 2; };
  const auto column_of = [&](int v) { return 8 * t + v % 8; };
  float ahead[FINISHED];
#pragma unroll
  for (int i = 0; i < FINISHED; ++i) ahead[i] = mine + i < last ? early(row_of(mine + i), column_of(mine + i)) : 0.f;
  for (int first = active ? slice : steps; first < steps; first += PREFETCH * slices) {
    Raw raw[PREFETCH][HEIGHT];
    Operand4 right[PREFETCH][4];
#pragma unroll
    for (int p = 0; p < PREFETCH; ++p) {
      const int k = (first + p * slices) * STEP + 4 * t;  // behind the end: zeros
      b(k, 4 * g, right[p]);
#pragma unroll
      for (int r = 0; r < HEIGHT; ++r) raw[p][r] = begin(16 * r + 2 * g, k);
    }
#pragma unroll 2
    for (int part = 1; part < parts; ++part)
#pragma unroll
      for (int p = 0; p < PREFETCH; ++p)
#pragma unroll
        for (int r = 0; r < HEIGHT; ++r)
          join(16 * r + 2 * g, (first + p * slices) * STEP + 4 * t, part, raw[p][r]);
#pragma unroll
    for (int p = 0; p < PREFETCH; ++p) {
      Operand4 left[HEIGHT][2];
#pragma unroll
      for (int r = 0; r < HEIGHT; ++r) end(16 * r + 2 * g, (first + p * slices) * STEP + 4 * t, raw[p][r], left[r]);
#pragma unroll
      for (int h = 0; h < 2; ++h) {  // k = 4 t + 2 h stands for column t of a fragment, 4 t + 2 h + 1 for t + 4
        unsigned int x[HEIGHT][4], xs[HEIGHT][4];
#pragma unroll
        for (int r = 0; r < HEIGHT; ++r)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float f = left[r][e % 2].v[2 * h + e / 2];
            x[r][e] = to_tf32(f);
            xs[r][e] = SPLIT ? rest(f, x[r][e]) : 0u;
          }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          unsigned int y[2], ys[2];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float f = right[p][2 * h + e].v[i];
            y[e] = to_tf32(f);
            ys[e] = SPLIT ? rest(f, y[e]) : 0u;
          }
#pragma unroll
          for (int r = 0; r < HEIGHT; ++r) {
            if (SPLIT) {
              mma_tf32(small[r][i], xs[r], y);
              mma_tf32(small[r][i], x[r], ys);
            }
            mma_tf32(sum[r][i], x[r], y);
          }
        }
      }
    }
  }
#pragma unroll
  for (int r = 0; r < HEIGHT; ++r)
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float s = sum[r][i][e];
        // an infinite operand has no rest: what it made of the small products is no number and does not count
        if (SPLIT && s - s == 0.f) s += small[r][i][e];
        shared[(16 * r + e / 2 * 8 + e % 2 * 4 + i) * THREADS + threadIdx.x] = s;
      }
  __syncthreads();
  const float* of = shared + (warp - slice) * 32 + lane;
  for (int v = mine; v < last; v += FINISHED) {
#pragma unroll
    for (int i = 0; i < FINISHED; ++i) {
      if (v + i >= last) break;
      float total = 0.f;
      for (int s = 0; s < slices; ++s) total += of[(v + i) * THREADS + 32 * s];
      done(row_of(v + i), column_of(v + i), total, ahead[i]);
    }
    const int next = v + FINISHED;
#pragma unroll
    for (int i = 0; i < FINISHED; ++i) ahead[i] = next + i < last ? early(row_of(next + i), column_of(next + i)) : 0.f;
  }
}
