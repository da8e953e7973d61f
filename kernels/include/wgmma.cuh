// Matrix products of a warpgroup (four warps) on Hopper's tensor cores, operands in shared memory or the first in registers (wgmma), and the
// store that turns their sums (stmatrix). sm_90a alone: no other architecture has them.
//
// d[64, N] += a[64, 16] b[16, N], fp32 accumulation, operands fp16 (STORAGE 1) or bf16 (2); N is WGMMA_N: 64, 96, 112, 128, 192, 224 or
// 256. Set by the build. With warp w of the group, g = lane / 4 and t = lane % 4 a lane holds, for each 8 columns j,
//
//   d[4 j ..]  (16 w + g, 8 j + 2 t) (16 w + g, 8 j + 2 t + 1) (16 w + g + 8, 8 j + 2 t) (16 w + g + 8, 8 j + 2 t + 1)
//
// Operands lie in lines of 128 bytes, 64 values, whose 16-byte units are swapped: unit u of line l is at l * 128 + (u ^ (l & 7)) * 16
// behind a multiple of 1024 bytes (SWIZZLE_128B). Lines of 64 bytes swap u ^ (l / 2 & 3) (SWIZZLE_64B). The hardware applies that to the
// address itself, so an operand may begin at any line: a window that is shifted by a pixel is the same operand a line on.
// `stride` is from one 8 lines to the next 8.
//   across:  a line is values of the summed dimension. Lines are rows of a, or columns of b; 16 values further is 32 bytes on.
//   along:   a line is rows of a, or columns of b, and lines are the summed dimension; 16 of them further is 2 * stride on. `next` is
//            from a line's columns to the columns behind them.
// What wrote the lines is made visible to the tensor cores by order_with_hardware() (mbarrier.cuh).

typedef unsigned long long Operand;

template <int line_bytes>
__device__ __forceinline__ Operand operand_at(const void* line, int stride, int next = 16) {
  const unsigned int at = (unsigned int)__cvta_generic_to_shared(line);
  return (Operand)((at & 0x3ffffu) >> 4) | (Operand)(next >> 4) << 16 | (Operand)(stride >> 4) << 32 | (line_bytes == 128 ? 1ull : 2ull) << 62;
}
__device__ __forceinline__ Operand operand_behind(Operand first, int bytes) { return first + (Operand)(bytes >> 4); }

__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Closes a group of products of this warpgroup, which is not empty: behind an empty one the compiler has products wait for each other.
__device__ __forceinline__ void products_close() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most the last `groups` are still under way.
template <int groups>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(groups) : "memory");
}

#if STORAGE == 1
#define PTX_TYPES "f32.f16.f16"
#else
#define PTX_TYPES "f32.bf16.bf16"
#endif

#define PTX_NAMES_0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define PTX_NAMES_1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define PTX_NAMES_2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define PTX_NAMES_3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define PTX_NAMES_4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define PTX_NAMES_5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define PTX_NAMES_6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define PTX_NAMES_7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define PTX_NAMES_8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define PTX_NAMES_9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define PTX_NAMES_10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define PTX_NAMES_11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define PTX_NAMES_12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define PTX_NAMES_13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define PTX_NAMES_14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define PTX_NAMES_15 "%120, %121, %122, %123, %124, %125, %126, %127"
#define PTX_EIGHT(i) "+f"(d[8 * i + 0]), "+f"(d[8 * i + 1]), "+f"(d[8 * i + 2]), "+f"(d[8 * i + 3]), "+f"(d[8 * i + 4]), "+f"(d[8 * i + 5]), "+f"(d[8 * i + 6]), "+f"(d[8 * i + 7])

#if WGMMA_N == 64
#define PTX_NAME "m64n64k16"
#define PTX_NAMES PTX_NAMES_0 ", " PTX_NAMES_1 ", " PTX_NAMES_2 ", " PTX_NAMES_3
#define PTX_REST "%32, %33, p, 1, 1, %35, %36"
#define PTX_ADDS "%34"
#define PTX_HELD "{%32, %33, %34, %35}, %36, p, 1, 1, %38"
#define PTX_HELD_ADDS "%37"
#define PTX_SUMS PTX_EIGHT(0), PTX_EIGHT(1), PTX_EIGHT(2), PTX_EIGHT(3)
#elif WGMMA_N == 96
#define PTX_NAME "m64n96k16"
#define PTX_NAMES PTX_NAMES_0 ", " PTX_NAMES_1 ", " PTX_NAMES_2 ", " PTX_NAMES_3 ", " PTX_NAMES_4 ", " \
  PTX_NAMES_5
#define PTX_REST "%48, %49, p, 1, 1, %51, %52"
#define PTX_ADDS "%50"
#define PTX_HELD "{%48, %49, %50, %51}, %52, p, 1, 1, %54"
#define PTX_HELD_ADDS "%53"
#define PTX_SUMS PTX_EIGHT(0), PTX_EIGHT(1), PTX_EIGHT(2), PTX_EIGHT(3), PTX_EIGHT(4), PTX_EIGHT(5)
#elif WGMMA_N == 112
#define PTX_NAME "m64n112k16"
#define PTX_NAMES PTX_NAMES_0 ", " PTX_NAMES_1 ", " PTX_NAMES_2 ", " PTX_NAMES_3 ", " PTX_NAMES_4 ", " \
  PTX_NAMES_5 ", " PTX_NAMES_6
#define PTX_REST "%56, %57, p, 1, 1, %59, %60"
#define PTX_ADDS "%58"
#define PTX_HELD "{%56, %57, %58, %59}, %60, p, 1, 1, %62"
#define PTX_HELD_ADDS "%61"
#define PTX_SUMS PTX_EIGHT(0), PTX_EIGHT(1), PTX_EIGHT(2), PTX_EIGHT(3), PTX_EIGHT(4), PTX_EIGHT(5), PTX_EIGHT(6)
#elif WGMMA_N == 128
#define PTX_NAME "m64n128k16"
#define PTX_NAMES PTX_NAMES_0 ", " PTX_NAMES_1 ", " PTX_NAMES_2 ", " PTX_NAMES_3 ", " PTX_NAMES_4 ", " \
  PTX_NAMES_5 ", " PTX_NAMES_6 ", " PTX_NAMES_7
#define PTX_REST "%64, %65, p, 1, 1, %67, %68"
#define PTX_ADDS "%66"
#define PTX_HELD "{%64, %65, %66, %67}, %68, p, 1, 1, %70"
#define PTX_HELD_ADDS "%69"
#define PTX_SUMS PTX_EIGHT(0), PTX_EIGHT(1), PTX_EIGHT(2), PTX_EIGHT(3), PTX_EIGHT(4), PTX_EIGHT(5), PTX_EIGHT(6), PTX_EIGHT(7)
#elif WGMMA_N == 192
#define PTX_NAME "m64n192k16"
#define PTX_NAMES PTX_NAMES_0 ", " PTX_NAMES_1 ", " PTX_NAMES_2 ", " PTX_NAMES_3 ", " PTX_NAMES_4 ", " \
  PTX_NAMES_5 ", " PTX_NAMES_6 ", " PTX_NAMES_7 ", " PTX_NAMES_8 ", " PTX_NAMES_9 ", " \
  PTX_NAMES_10 ", " PTX_NAMES_11
#define PTX_REST "%96, %97, p, 1, 1, %99, %100"
#define PTX_ADDS "%98"
#define PTX_HELD "{%96, %97, %98, %99}, %100, p, 1, 1, %102"
#define PTX_HELD_ADDS "%101"
#define PTX_SUMS PTX_EIGHT(0), PTX_EIGHT(1), PTX_EIGHT(2), PTX_EIGHT(3), PTX_EIGHT(4), PTX_EIGHT(5), PTX_EIGHT(6), PTX_EIGHT(7), \
  PTX_EIGHT(8), PTX_EIGHT(9), PTX_EIGHT(10), PTX_EIGHT(11)
#elif WGMMA_N == 224
#define PTX_NAME "m64n224k16"
#define PTX_NAMES PTX_NAMES_0 ", " PTX_NAMES_1 ", " PTX_NAMES_2 ", " PTX_NAMES_3 ", " PTX_NAMES_4 ", " \
  PTX_NAMES_5 ", " PTX_NAMES_6 ", " PTX_NAMES_7 ", " PTX_NAMES_8 ", " PTX_NAMES_9 ", " \
  PTX_NAMES_10 ", " PTX_NAMES_11 ", " PTX_NAMES_12 ", " PTX_NAMES_13
#define PTX_REST "%112, %113, p, 1, 1, %115, %116"
#define PTX_ADDS "%114"
#define PTX_HELD "{%112, %113, %114, %115}, %116, p, 1, 1, %118"
#define PTX_HELD_ADDS "%117"
#define PTX_SUMS PTX_EIGHT(0), PTX_EIGHT(1), PTX_EIGHT(2), PTX_EIGHT(3), PTX_EIGHT(4), PTX_EIGHT(5), PTX_EIGHT(6), PTX_EIGHT(7), \
  PTX_EIGHT(8), PTX_EIGHT(9), PTX_EIGHT(10), PTX_EIGHT(11), PTX_EIGHT(12), PTX_EIGHT(13)
#elif WGMMA_N == 256
#define PTX_NAME "m64n256k16"
#define PTX_NAMES PTX_NAMES_0 ", " PTX_NAMES_1 ", " PTX_NAMES_2 ", " PTX_NAMES_3 ", " PTX_NAMES_4 ", " \
  PTX_NAMES_5 ", " PTX_NAMES_6 ", " PTX_NAMES_7 ", " PTX_NAMES_8 ", " PTX_NAMES_9 ", " \
  PTX_NAMES_10 ", " PTX_NAMES_11 ", " PTX_NAMES_12 ", " PTX_NAMES_13 ", " PTX_NAMES_14 ", " \
  PTX_NAMES_15
#define PTX_REST "%128, %129, p, 1, 1, %131, %132"
#define PTX_ADDS "%130"
#define PTX_HELD "{%128, %129, %130, %131}, %132, p, 1, 1, %134"
#define PTX_HELD_ADDS "%133"
#define PTX_SUMS PTX_EIGHT(0), PTX_EIGHT(1), PTX_EIGHT(2), PTX_EIGHT(3), PTX_EIGHT(4), PTX_EIGHT(5), PTX_EIGHT(6), PTX_EIGHT(7), \
  PTX_EIGHT(8), PTX_EIGHT(9), PTX_EIGHT(10), PTX_EIGHT(11), PTX_EIGHT(12), PTX_EIGHT(13), PTX_EIGHT(14), PTX_EIGHT(15)
#endif

// With `adds` 0 d is set. A_ALONG, B_ALONG: of the operands.
template <int A_ALONG, int B_ALONG>
__device__ __forceinline__ void wgmma(float (&d)[WGMMA_N / 2], Operand a, Operand b, int adds) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " PTX_ADDS ", 0;\n"
               "wgmma.mma_async.sync.aligned." PTX_NAME "." PTX_TYPES " {" PTX_NAMES "}, " PTX_REST ";\n}"
               : PTX_SUMS : "l"(a), "l"(b), "r"(adds), "n"(A_ALONG), "n"(B_ALONG));
}

// As wgmma, with a in registers: (g, 2 t ..), (g + 8, 2 t ..), (g, 2 t + 8 ..), (g + 8, 2 t + 8 ..) of the warp's 16 rows, two values each. They
// may not change while the product is under way.
template <int B_ALONG>
__device__ __forceinline__ void wgmma_held(float (&d)[WGMMA_N / 2], const unsigned int (&a)[4], Operand b, int adds) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " PTX_HELD_ADDS ", 0;\n"
               "wgmma.mma_async.sync.aligned." PTX_NAME "." PTX_TYPES " {" PTX_NAMES "}, " PTX_HELD ";\n}"
               : PTX_SUMS : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds), "n"(B_ALONG));
}

// Stores four 8x8 matrices of 16-bit values turned: lanes 8i..8i+7 pass where column 0..7 of matrix i goes, 16 bytes each; r[i] holds
// (g, 2t..) of it.
__device__ __forceinline__ void stmatrix_x4_trans(void* column, const unsigned int (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 [%0], {%1, %2, %3, %4};"
               :: "r"((unsigned int)__cvta_generic_to_shared(column)), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}
