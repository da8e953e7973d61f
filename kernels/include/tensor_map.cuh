// Copies of boxes of an NHWC tensor into shared memory, and out of it, that the hardware makes (TMA). sm_90. Include mbarrier.cuh first.
//
// A TensorMap says where a tensor is, its sizes, a box, and how units are swapped (advisor/ops/tensor_map.py makes it); kernels take it by
// value, as `const __grid_constant__ TensorMap`. It can be of every other row and column of the tensor: then these are its pixels. A box's
// pixels lie one behind the other, row by row, each 128 or 64 bytes, channels of one group. What is outside the tensor or the group comes as
// zeros, and is not stored.

struct __align__(64) TensorMap { unsigned long long opaque[16]; };

// The box whose first value is (image, row, column, group, channel in the group); `from` is the tensor's first value. Arrives at `full`
// with its bytes.
__device__ __forceinline__ void copy_box(
    void* to, const TensorMap& map, const void* from, Barrier* full, int channel, int group, int column, int row, int image) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], [%2];"
      :: "r"((unsigned int)__cvta_generic_to_shared(to)), "l"(&map), "r"((unsigned int)__cvta_generic_to_shared(full)), "r"(channel),
         "r"(group), "r"(column), "r"(row), "r"(image) : "memory");
}

// Stores a box. What wrote it to shared memory has been ordered with the hardware (mbarrier.cuh).
__device__ __forceinline__ void store_box(
    const TensorMap& map, void* to, const void* box, int channel, int group, int column, int row, int image) {
  asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];"
               :: "l"(&map), "r"((unsigned int)__cvta_generic_to_shared(box)), "r"(channel), "r"(group), "r"(column), "r"(row), "r"(image)
               : "memory");
}
// Closes a group of this thread's stores.
__device__ __forceinline__ void stores_close() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until the boxes of all but the last `groups` are read, so that their memory may be written again.
template <int groups>
__device__ __forceinline__ void stores_wait() {
  asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(groups) : "memory");
}
