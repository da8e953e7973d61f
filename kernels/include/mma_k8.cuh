// Matrix products as in mma.cuh over half the depth: d[16, 8] += a[16, 8] b[8, 8], for what 16 does not divide. Include mma.cuh first.
//
// The fragments are the first halves of mma.cuh's: a[0..1] is (g, 2t..) (g + 8, 2t..), b is (2t.., g) (PTX ISA, "Matrix
// Fragments for mma.m16n8k8"). sm_80.

__device__ __forceinline__ void mma_f16_k8(float (&d)[4], const unsigned int (&a)[2], unsigned int b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(b));
}

__device__ __forceinline__ void mma_bf16_k8(float (&d)[4], const unsigned int (&a)[2], unsigned int b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(b));
}
