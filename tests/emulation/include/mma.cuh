// Emulated twin of kernels/include/mma.cuh. The fragments' layout is the PTX ISA's; sums are exact to fp32, where the
// hardware's last bits are its own.

#define MMA_M 16
#define MMA_N 8
#define MMA_K_16BIT 16
#define MMA_K_TF32 8

struct EmulatedMma {
  float* d;
  const unsigned int *a, *b;
};

struct EmulatedF16 {
  static float at(unsigned int w, int half) { return emulation::from_f16(w >> 16 * half & 0xffffu); }
};
struct EmulatedBf16 {
  static float at(unsigned int w, int half) { return emulation::from_bf16(w >> 16 * half & 0xffffu); }
};
struct EmulatedTf32 {
  static float at(unsigned int w, int) { return emulation::bits<float>(w & 0xffffe000u); }
};

// PACKED values a register: 2 (K = 16) or 1 (K = 8).
template <class Value, int PACKED>
void emulated_mma(void* const* lanes, unsigned present) {
  if (present != 0xffffffffu) emulation::fail("mma.sync without all lanes of the warp");
  constexpr int depth = 8 * PACKED;
  float a[16][depth], b[depth][8];
  for (int lane = 0; lane < 32; ++lane) {
    const EmulatedMma& m = *static_cast<const EmulatedMma*>(lanes[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int p = 0; p < PACKED; ++p) {
      for (int r = 0; r < 4; ++r) a[g + r % 2 * 8][r / 2 * 4 * PACKED + t * PACKED + p] = Value::at(m.a[r], p);
      for (int r = 0; r < 2; ++r) b[r * 4 * PACKED + t * PACKED + p][g] = Value::at(m.b[r], p);
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    float* d = static_cast<const EmulatedMma*>(lanes[lane])->d;
    for (int r = 0; r < 4; ++r) {
      const int row = lane / 4 + r / 2 * 8, column = lane % 4 * 2 + r % 2;
      double sum = d[r];
      for (int k = 0; k < depth; ++k) sum += double(a[row][k]) * double(b[k][column]);
      d[r] = float(sum);
    }
  }
}

inline void mma_f16(float (&d)[4], const unsigned int (&a)[4], const unsigned int (&b)[2]) {
  EmulatedMma mine{d, a, b};
  emulation::collective(emulated_mma<EmulatedF16, 2>, 0xffffffffu, &mine);
}
inline void mma_bf16(float (&d)[4], const unsigned int (&a)[4], const unsigned int (&b)[2]) {
  EmulatedMma mine{d, a, b};
  emulation::collective(emulated_mma<EmulatedBf16, 2>, 0xffffffffu, &mine);
}
inline void mma_tf32(float (&d)[4], const unsigned int (&a)[4], const unsigned int (&b)[2]) {
  EmulatedMma mine{d, a, b};
  emulation::collective(emulated_mma<EmulatedTf32, 1>, 0xffffffffu, &mine);
}

inline unsigned int to_tf32(float f) {  // to nearest, ties away from zero
  const unsigned int b = emulation::bits<unsigned int>(f);
  return f != f ? 0x7fffffffu : (b & 0x7f800000u) == 0x7f800000u ? b : (b + 0x1000u) & 0xffffe000u;
}

struct EmulatedLdmatrix {
  unsigned int* r;
  const void* row;
};

template <int MATRICES, bool TRANS>
void emulated_ldmatrix(void* const* lanes, unsigned present) {
  if (present != 0xffffffffu) emulation::fail("ldmatrix without all lanes of the warp");
  unsigned short values[MATRICES][8][8];
  for (int i = 0; i < MATRICES * 8; ++i) {
    const void* row = static_cast<const EmulatedLdmatrix*>(lanes[i])->row;
    emulation::acts(i);
    if (reinterpret_cast<uintptr_t>(row) % 16) emulation::fail("ldmatrix from an address that is no multiple of 16");
    memcpy(values[i / 8][i % 8], row, 16);
  }
  for (int lane = 0; lane < 32; ++lane) {
    unsigned int* r = static_cast<const EmulatedLdmatrix*>(lanes[lane])->r;
    const int g = lane / 4, t = lane % 4 * 2;
    for (int m = 0; m < MATRICES; ++m)
      r[m] = TRANS ? values[m][t][g] | unsigned(values[m][t + 1][g]) << 16
                   : values[m][g][t] | unsigned(values[m][g][t + 1]) << 16;
  }
}

inline void ldmatrix_x4(unsigned int (&r)[4], const void* row) {
  EmulatedLdmatrix mine{r, row};
  emulation::collective(emulated_ldmatrix<4, false>, 0xffffffffu, &mine);
}
inline void ldmatrix_x4_trans(unsigned int (&r)[4], const void* row) {
  EmulatedLdmatrix mine{r, row};
  emulation::collective(emulated_ldmatrix<4, true>, 0xffffffffu, &mine);
}
inline void ldmatrix_x2(unsigned int (&r)[2], const void* row) {
  EmulatedLdmatrix mine{r, row};
  emulation::collective(emulated_ldmatrix<2, false>, 0xffffffffu, &mine);
}
inline void ldmatrix_x2_trans(unsigned int (&r)[2], const void* row) {
  EmulatedLdmatrix mine{r, row};
  emulation::collective(emulated_ldmatrix<2, true>, 0xffffffffu, &mine);
}
