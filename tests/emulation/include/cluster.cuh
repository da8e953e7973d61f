// Emulated twin of kernels/include/cluster.cuh. The runtime lets the blocks of a cluster run by turns, and knows whose shared
// memory an address is in: a read of a block that has returned is found, one before the barrier sees what was not written yet.

#define CLUSTERED __cluster_dims__(CLUSTER, 1, 1)

inline void cluster_arrive() { emulation::cluster_arrive(); }
inline void cluster_wait() { emulation::cluster_wait(); }
inline float cluster_read(const float* at, int rank) {
  return *static_cast<const float*>(emulation::in_block_of_cluster(at, rank));
}
