// Copies of boxes of an NHWC tensor into shared memory that the hardware makes (TMA). sm_90. Include mbarrier.cuh first.
//
// A TensorMap says where a tensor is, its sizes, a box and how units are swapped (advisor/ops/tensor_map.py makes it); kernels take it
// by value, as `const __grid_constant__ TensorMap`. A box's pixels lie one behind the other, row by row, each 128 or 64 bytes. What is
// outside the tensor comes as zeros.

struct __align__(64) TensorMap { unsigned long long opaque[16]; };

// The box whose first value is (image, row, column, channel); `from` is the tensor's first value. Arrives at `full` with its bytes.
__device__ __forceinline__ void copy_box(
    void* to, const TensorMap& map, const void* from, Barrier* full, int channel, int column, int row, int image) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];"
      :: "r"((unsigned int)__cvta_generic_to_shared(to)), "l"(&map), "r"((unsigned int)__cvta_generic_to_shared(full)), "r"(channel),
         "r"(column), "r"(row), "r"(image) : "memory");
}
