// Emulated twin of kernels/include/wgmma.cuh. Products are made as they are asked for by half of the warps and when they are
// waited for by the others, since the hardware promises neither: operands that are not there yet and sums that are read too early both show.

typedef unsigned long long Operand;

template <int line_bytes>
inline Operand operand_at(const void* line, int stride, int next = 16) {
  const ptrdiff_t at = static_cast<const char*>(line) - static_cast<const char*>(emulation::dynamic_shared());
  if (at < 0 || at >= 1 << 18 || at % 16 || stride % 16 || next % 16)
    emulation::fail("no operand can be at %td, 8 lines %d and columns %d bytes apart", at, stride, next);
  return Operand(at >> 4) | Operand(next >> 4) << 16 | Operand(stride >> 4) << 32 | (line_bytes == 128 ? 1ull : 2ull) << 62;
}
inline Operand operand_behind(Operand first, int bytes) { return first + (Operand)(bytes >> 4); }

struct EmulatedProduct {
  float* d;
  const unsigned int* held;  // a's part that the lane has; null where a is an operand in shared memory
  Operand a, b;
  bool adds, a_along, b_along;
  int warp;  // of its warpgroup
};

static EmulatedProduct emulated_products[1024][128];  // by thread, not yet made
// How many, how many of them in groups that are closed, and in those that were when products were last waited for.
static int emulated_waiting[1024], emulated_closed[1024], emulated_before[1024];
static unsigned long long emulated_block[1024];            // whose they are

inline float emulated_value(unsigned short v) {
#if STORAGE == 1
  return emulation::from_f16(v);
#else
  return emulation::from_bf16(v);
#endif
}

// The 16-bit value of an operand: `across` the summed dimension, or `along` its rows or columns.
EMULATED_UNREPORTED inline float emulated_operand(Operand operand, int place, int k, bool along) {
  const unsigned start = (operand & 0x3fff) << 4, stride = (operand >> 32 & 0x3fff) << 4, next = (operand >> 16 & 0x3fff) << 4;
  const int bytes = operand >> 62 == 1 ? 128 : 64, values = bytes / 2;
  const int line = along ? k : place, inside = along ? place % values : k;
  unsigned at = start + (along ? place / values * next : 0) + line / 8 * stride + line % 8 * bytes + inside * 2;
  at ^= bytes == 128 ? (at >> 7 & 7) << 4 : (at >> 7 & 3) << 4;
  const char* value = static_cast<const char*>(emulation::dynamic_shared()) + at;
  if (at % 16 == 0) emulation::accessed(value, 16, emulation::Doing::read);  // a unit at once, of which all eight are asked for
  unsigned short v;
  memcpy(&v, value, 2);
  return emulated_value(v);
}

inline void emulated_wgmma(void* const* lanes, unsigned present) {
  if (present != 0xffffffffu) emulation::fail("wgmma without all lanes of the warp");
  const EmulatedProduct& first = *static_cast<const EmulatedProduct*>(lanes[0]);
  static float a[16][16], b[WGMMA_N][16];
  for (int m = 0; m < 16; ++m)
    for (int k = 0; k < 16; ++k)
      if (first.held) {
        const unsigned int* held = static_cast<const EmulatedProduct*>(lanes[m % 8 * 4 + k % 8 / 2])->held;
        a[m][k] = emulated_value((unsigned short)(held[m / 8 + k / 8 * 2] >> k % 2 * 16));
      } else {
        a[m][k] = emulated_operand(first.a, 16 * first.warp + m, k, first.a_along);
      }
  for (int n = 0; n < WGMMA_N; ++n)
    for (int k = 0; k < 16; ++k) b[n][k] = emulated_operand(first.b, n, k, first.b_along);
  for (int lane = 0; lane < 32; ++lane) {
    const EmulatedProduct& p = *static_cast<const EmulatedProduct*>(lanes[lane]);
    if (p.a != first.a || p.b != first.b || p.adds != first.adds) emulation::fail("lanes of a warp ask for different products");
    for (int i = 0; i < WGMMA_N / 2; ++i) {
      const float* row = a[lane / 4 + i % 4 / 2 * 8];
      const float* column = b[i / 4 * 8 + lane % 4 * 2 + i % 2];
      double sum = p.adds ? p.d[i] : 0.0;
      for (int k = 0; k < 16; ++k) sum += double(row[k]) * double(column[k]);
      p.d[i] = float(sum);
    }
  }
  emulation::ordered(present);  // each lane waits for the warp's products
}

inline void products_begin() {
  const unsigned thread = emulation::current->number;
  if (emulated_block[thread] == emulation::blocks_run) return;
  emulated_block[thread] = emulation::blocks_run;
  emulated_waiting[thread] = emulated_closed[thread] = emulated_before[thread] = 0;
}

inline void products_close() { emulated_closed[emulation::current->number] = emulated_waiting[emulation::current->number]; }

template <int groups>
void products_wait() {
  static_assert(groups <= 1);
  const unsigned thread = emulation::current->number;
  const int made = groups ? emulated_before[thread] : emulated_closed[thread];
  for (int i = 0; i < made; ++i) emulation::collective(emulated_wgmma, 0xffffffffu, &emulated_products[thread][i]);
  for (int i = made; i < emulated_waiting[thread]; ++i) emulated_products[thread][i - made] = emulated_products[thread][i];
  emulated_waiting[thread] -= made;
  emulated_before[thread] = emulated_closed[thread] -= made;
}

inline void emulated_ask(const EmulatedProduct& mine) {
  EmulatedProduct asked = mine;
  const unsigned thread = emulation::current->number;
  if ((emulation::current->warp + emulation::block_index.x) % 2)
    emulation::collective(emulated_wgmma, 0xffffffffu, &asked);
  else if (emulated_waiting[thread] == 128)
    emulation::fail("more than 128 products without a wait");
  else
    emulated_products[thread][emulated_waiting[thread]++] = asked;
}

template <int A_ALONG, int B_ALONG>
void wgmma(float (&d)[WGMMA_N / 2], Operand a, Operand b, int adds) {
  emulated_ask({d, nullptr, a, b, adds != 0, A_ALONG != 0, B_ALONG != 0, int(emulation::current->warp % 4)});
}

template <int B_ALONG>
void wgmma_held(float (&d)[WGMMA_N / 2], const unsigned int (&a)[4], Operand b, int adds) {
  emulated_ask({d, a, 0, b, adds != 0, false, B_ALONG != 0, int(emulation::current->warp % 4)});
}

struct EmulatedStmatrix {
  void* column;
  const unsigned int* r;
};

inline void emulated_stmatrix_trans(void* const* lanes, unsigned present) {
  if (present != 0xffffffffu) emulation::fail("stmatrix without all lanes of the warp");
  for (int i = 0; i < 32; ++i) {
    void* to = static_cast<const EmulatedStmatrix*>(lanes[i])->column;
    emulation::acts(i);
    if (reinterpret_cast<uintptr_t>(to) % 16) emulation::fail("stmatrix to an address that is no multiple of 16");
    unsigned short column[8];
    for (int row = 0; row < 8; ++row) {
      const unsigned int* r = static_cast<const EmulatedStmatrix*>(lanes[row * 4 + i % 8 / 2])->r;
      column[row] = (unsigned short)(r[i / 8] >> 16 * (i % 2));
    }
    memcpy(to, column, 16);
  }
}

inline void stmatrix_x4_trans(void* column, const unsigned int (&r)[4]) {
  EmulatedStmatrix mine{column, r};
  emulation::collective(emulated_stmatrix_trans, 0xffffffffu, &mine);
}
