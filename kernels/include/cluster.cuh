// Thread-block clusters: CLUSTER neighbouring blocks along x run at the same time and read each other's shared memory. sm_90.
//
// CLUSTER is set by the build. Entries are marked CLUSTERED; gridDim.x is a multiple of CLUSTER. A block's shared memory can be
// read by the others between two barriers of the cluster that it takes part in.

#define CLUSTERED __cluster_dims__(CLUSTER, 1, 1)

// The cluster's barrier in two halves, for all threads of all its blocks: what was written to shared memory before the one is
// seen after the other. Not the aligned form: a warp may come here from a branch that some of its lanes took.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// What block `rank` of the cluster has where this block has *at in shared memory.
__device__ __forceinline__ float cluster_read(const float* at, int rank) {
  float value;
  asm volatile("{ .reg .b32 a; mapa.shared::cluster.u32 a, %1, %2; ld.shared::cluster.f32 %0, [a]; }"
               : "=f"(value) : "r"((unsigned int)__cvta_generic_to_shared(at)), "r"(rank) : "memory");
  return value;
}
