// Matrix products of one warp on the tensor cores (mma.sync) and the loads from shared memory that feed them (ldmatrix).
//
// d[16, 8] += a[16, K] b[K, 8], all 32 lanes together, fp32 accumulation. K = 16 for fp16 and bf16, 8 for tf32. With
// g = lane / 4 and t = lane % 4 a lane holds (PTX ISA, "Matrix Fragments for mma.m16n8k16", "… mma.m16n8k8"):
//
//            fp16, bf16: two values a register, the lower column (a) or row (b) in the low half     tf32
//   a[0..3]  (g, 2t..) (g + 8, 2t..) (g, 2t + 8..) (g + 8, 2t + 8..)                (g, t) (g + 8, t) (g, t + 4) (g + 8, t + 4)
//   b[0..1]  (2t.., g) (2t + 8.., g)                                                (t, g) (t + 4, g)
//   d[0..3]  (g, 2t) (g, 2t + 1) (g + 8, 2t) (g + 8, 2t + 1)                        the same
//
// ldmatrix reads 8x8 matrices of 16-bit values, rows of 16 bytes anywhere in shared memory (16-byte aligned): lanes
// 8i..8i+7 pass the rows of matrix i, and r[i] gets (g, 2t..) of it; with trans, (2t.., g) of it. x2 takes the rows of
// lanes 0..15. Four x4 matrices in the order (rows 0-7, k 0-7) (rows 8-15, k 0-7) (rows 0-7, k 8-15) (rows 8-15, k 8-15)
// are an `a`. All need sm_80.

#define MMA_M 16
#define MMA_N 8
#define MMA_K_16BIT 16
#define MMA_K_TF32 8

__device__ __forceinline__ void mma_f16(float (&d)[4], const unsigned int (&a)[4], const unsigned int (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void mma_bf16(float (&d)[4], const unsigned int (&a)[4], const unsigned int (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Ten bits of mantissa of each operand count; round with to_tf32 first, the hardware cuts.
__device__ __forceinline__ void mma_tf32(float (&d)[4], const unsigned int (&a)[4], const unsigned int (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ unsigned int to_tf32(float f) {
  unsigned int r;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(f));
  return r;
}

__device__ __forceinline__ void ldmatrix_x4(unsigned int (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"((unsigned int)__cvta_generic_to_shared(row)) : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(unsigned int (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"((unsigned int)__cvta_generic_to_shared(row)) : "memory");
}

__device__ __forceinline__ void ldmatrix_x2(unsigned int (&r)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1]) : "r"((unsigned int)__cvta_generic_to_shared(row)) : "memory");
}

__device__ __forceinline__ void ldmatrix_x2_trans(unsigned int (&r)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1]) : "r"((unsigned int)__cvta_generic_to_shared(row)) : "memory");
}
