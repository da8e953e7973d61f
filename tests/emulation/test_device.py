"""The emulated device finds what it is there to find: each fault is planted in a kernel of a few lines."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from emulation.compiler import INCLUDE, EmulationError, runtime

HEAD = "typedef long long i64;\n"


def vector(n: int, fill: float = 0.0) -> torch.Tensor:
    return torch.full((n,), fill)


REVERSE = """
extern "C" __global__ void __launch_bounds__(256) reverse(const float* __restrict__ x, float* __restrict__ y) {
  __shared__ float shared[256];
  shared[threadIdx.x] = x[blockIdx.x * 256 + threadIdx.x];
  %s
  y[blockIdx.x * 256 + threadIdx.x] = shared[255 - threadIdx.x];
}
"""


def test_a_barrier_is_kept_and_a_missing_one_is_found(emulated):
    x = torch.arange(1024.0)
    for barrier, right in (("__syncthreads();", True), ("", False)):
        y = vector(1024)
        emulated.compiled(REVERSE % barrier, "reverse")((4, 1, 1), (256, 1, 1), (x.data_ptr(), y.data_ptr()))
        assert torch.equal(y.view(4, 256), x.view(4, 256).flip(1)) is right


BEHIND_A_BARRIER = """
extern "C" __global__ void exchange(const float* x, float* y) {
  __shared__ float rows[2][64];
  float sum = 0.f;
  for (int row = 0; row < 8; ++row) {
    rows[row %% 2][threadIdx.x] = x[row * 64 + threadIdx.x];
    __syncwarp();
    %s
    sum += rows[row %% 2][63 - threadIdx.x];
    __syncthreads();
  }
  y[threadIdx.x] = sum;
}
"""


def test_a_warp_ahead_of_the_others_between_two_barriers_is_found(emulated):
    x = torch.rand(8, 64)
    for barrier, right in (("__syncthreads();", True), ("", False)):
        y = vector(64)
        emulated.compiled(BEHIND_A_BARRIER % barrier, "exchange")((1, 1, 1), (64, 1, 1), (x.data_ptr(), y.data_ptr()))
        assert torch.allclose(y, x.sum(0).flip(0)) is right


def test_shared_memory_that_nobody_wrote_is_nan_in_every_block(emulated):
    source = """
    extern "C" __global__ void sums(float* y) {
      __shared__ float shared[33];
      if (threadIdx.x < %s) shared[threadIdx.x] = 1.f;
      __syncthreads();
      float sum = 0.f;
      for (int i = 0; i < 33; ++i) sum += shared[i];
      y[blockIdx.x * blockDim.x + threadIdx.x] = sum;
      __syncthreads();
      shared[threadIdx.x %% 33] = 1.f;
    }
    """
    y = vector(128)
    emulated.compiled(source % 33, "sums")((2,), (64,), (y.data_ptr(),))
    assert torch.equal(y, vector(128, 33.0))
    emulated.compiled(source % 32, "sums")((2,), (64,), (y.data_ptr(),))
    assert y.isnan().all()


COPY = """
extern "C" __global__ void copy(const float* x, float* y, int n, int shift) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i + shift] = x[i];
}
"""


@pytest.mark.parametrize("size", [1000, 1024, 3])
@pytest.mark.parametrize("shift", [1, -1, 5000, -5000])
def test_a_write_outside_a_tensor_is_found_and_does_not_happen(emulated, size, shift):
    x, y = vector(size, 1.0), vector(size)
    copy = emulated.compiled(COPY, "copy")
    grid, block = (-(-size // 128), 1, 1), (128, 1, 1)
    with pytest.raises(EmulationError, match=r"bytes (before|behind) the .* bytes of argument 1"):
        copy(grid, block, (x.data_ptr(), y.data_ptr(), np.int32(size), np.int32(shift)))
    assert not y.any()
    copy(grid, block, (x.data_ptr(), y.data_ptr(), np.int32(size), np.int32(0)))
    assert torch.equal(x, y)


def test_a_read_behind_a_tensor_is_found_with_its_line(emulated):
    x, y = vector(1024, 1.0), vector(2048)
    with pytest.raises(EmulationError, match=r"0 bytes behind the 4096 bytes of argument 0 .* near: .*y\[i \+ shift\]"):
        emulated.compiled(COPY, "copy")((9,), (128,), (x.data_ptr(), y.data_ptr(), np.int32(1025), np.int32(0)))


def test_an_index_outside_a_shared_array_is_found(emulated):
    source = """
    extern "C" __global__ void fill(float* y) {
      __shared__ float first[32], second[32];
      first[threadIdx.x] = 1.f; second[threadIdx.x %% 32] = 2.f;
      __syncthreads();
      y[threadIdx.x] = first[threadIdx.x %% 32];
    }
    """.replace("%%", "%")
    y = vector(64)
    emulated.compiled(source, "fill")((1,), (32,), (y.data_ptr(),))
    with pytest.raises(EmulationError, match=r"leaves a local or shared array.*first"):
        emulated.compiled(source, "fill")((1,), (33,), (y.data_ptr(),))


def test_a_misaligned_vector_is_found(emulated):
    source = (
        'extern "C" __global__ void four(const float4* x, float* y, int by) { *y = ((float4*)((float*)x + by))->w; }'
    )
    x, y = torch.arange(64.0), vector(1)
    four = emulated.compiled(source, "four")
    four((1,), (1,), (x.data_ptr(), y.data_ptr(), np.int32(4)))
    assert y.item() == 7.0
    with pytest.raises(EmulationError, match="misaligned"):
        four((1,), (1,), (x.data_ptr(), y.data_ptr(), np.int32(1)))


def test_static_shared_memory_is_an_entrys_own(emulated):
    """What another entry of the source declares takes nothing of a block's; what the entry itself declares does."""
    source = """
    extern "C" __global__ void lean(float* y) {
      extern __shared__ __align__(16) float memory[];
      memory[threadIdx.x] = 1.f;
      y[threadIdx.x] = memory[threadIdx.x];
    }
    extern "C" __global__ void heavy(float* y) {
      static const float ones[2] = {1.f, 1.f};  // no shared memory
      __shared__ float sums[1024];
      sums[0] = ones[threadIdx.x & 1];
      extern __shared__ __align__(16) float memory[];
      sums[threadIdx.x] = memory[threadIdx.x] = 1.f;
      y[threadIdx.x] = memory[threadIdx.x] + sums[threadIdx.x];
    }
    """
    y, most = vector(32), 227 * 1024
    for name in ("lean", "heavy"):
        entry = emulated.compiled(source, name)
        entry.most_dynamic = most
        if name == "lean":
            entry((1, 1, 1), (32, 1, 1), (y.data_ptr(),), most)
            assert y.tolist() == [1.0] * 32
        else:
            with pytest.raises(EmulationError, match=f"no block of sm_90 has {most + 4096} bytes"):
                entry((1, 1, 1), (32, 1, 1), (y.data_ptr(),), most)


def test_dynamic_shared_memory_has_its_size(emulated):
    source = """
    extern "C" __global__ void reverse(float* y) {
      extern __shared__ __align__(16) float memory[];
      memory[threadIdx.x] = y[threadIdx.x];
      __syncthreads();
      y[threadIdx.x] = memory[blockDim.x - 1 - threadIdx.x];
    }
    """
    y = torch.arange(96.0)
    reverse = emulated.compiled(source, "reverse")
    reverse((1,), (96,), (y.data_ptr(),), 384)
    assert torch.equal(y, torch.arange(96.0).flip(0))
    with pytest.raises(EmulationError, match="reads or writes"):
        reverse((1,), (96,), (y.data_ptr(),), 368)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("if (threadIdx.x == 7) return; __syncthreads();", "divergent barrier.*thread 7 has returned"),
        ("if (threadIdx.x < 9) {\n__syncthreads();\n} else {\n__syncthreads();\n}", "divergent barrier.*line.*line"),
        ("if (threadIdx.x % 32 != 3) __shfl_sync(0xffffffffu, 1, 0); else __syncthreads();", "lanes of a warp wait"),
        ("__shfl_sync(0x1u, 1, 0);", "a lane outside its own mask"),
        ("while (atomicAdd(y, 0.f) == 0.f) {}", "waits for something that does not come"),
        ("y[0] = y[64 / (blockDim.x - 64)];", "divides an integer by zero"),
        ("*(volatile float*)(0 * (i64)y) = 1.f;", "where no tensor is"),
        ("__trap();", "__trap"),
    ],
)
def test_a_block_that_cannot_go_on_is_found(emulated, body, message):
    source = f'{HEAD}extern "C" __global__ void stuck(float* y) {{ {body} }}'
    y = vector(64)
    with pytest.raises(EmulationError, match=message):
        emulated.compiled(source, "stuck")((1,), (64,), (y.data_ptr(),))
    test_a_barrier_is_kept_and_a_missing_one_is_found(emulated)  # the next launch starts afresh


def test_arguments_must_have_the_types_of_the_parameters(emulated):
    x, y = vector(8), vector(8)
    copy = emulated.compiled(COPY, "copy")
    for wrong, message in (
        ((x.data_ptr(), y.data_ptr(), np.int64(8), np.int32(0)), "argument 2"),
        ((x.data_ptr(), y.data_ptr(), 2**31, np.int32(0)), "argument 2"),
        ((x.data_ptr(), y.data_ptr(), 8.0, np.int32(0)), "argument 2"),
        ((x.data_ptr(), np.int32(0), np.int32(8), np.int32(0)), "argument 1"),
        ((x.data_ptr(), y.data_ptr(), np.int32(8)), "4 parameters, 3"),
        ((x.data_ptr(), y.data_ptr() + 32, np.int32(8), np.int32(0)), "belongs to no tensor"),
        ((vector(7).data_ptr(), y.data_ptr(), np.int32(8), np.int32(0)), "was freed"),
    ):
        with pytest.raises(EmulationError, match=message):
            copy((1,), (8,), wrong)
    with pytest.raises(EmulationError, match="no block"):
        copy((1,), (1025,), (x.data_ptr(), y.data_ptr(), np.int32(8), np.int32(0)))


def test_the_last_block_adds_up_in_any_order_and_leaves_the_ticket_zero(emulated):
    source = """
    extern "C" __global__ void total(const float* x, float* partial, unsigned* ticket, float* y, int leave) {
      __shared__ bool last;
      if (threadIdx.x == 0) {
        partial[blockIdx.x] = x[blockIdx.x];
        __threadfence();
        last = atomicAdd(ticket, 1u) == gridDim.x - 1;
        if (last) {
          float sum = 0.f;
          for (int i = 0; i < gridDim.x; ++i) sum += __ldcg(partial + i);
          *y = sum;
          *ticket = leave;
        }
      }
    }
    """
    total = emulated.compiled(source, "total")
    for _ in range(5):
        x, partial, y = torch.arange(50.0), torch.empty(50), torch.empty(1)
        arguments = (x.data_ptr(), partial.data_ptr(), emulated.tickets(x.device), y.data_ptr())
        total((50,), (32,), (*arguments, np.int32(0)))
        assert y.item() == x.sum().item()
    with pytest.raises(EmulationError, match="ticket"):
        total((50,), (32,), (*arguments, np.int32(1)))


def test_what_depends_on_the_order_of_blocks_differs_between_seeds(emulated):
    source = 'extern "C" __global__ void who(float* y) { if (threadIdx.x == 0) y[0] = blockIdx.x; }'
    seen = set()
    for _ in range(8):
        y = vector(1)
        emulated.compiled(source, "who")((16,), (32,), (y.data_ptr(),))
        seen.add(y.item())
    assert len(seen) > 1


def test_warp_operations(emulated):
    source = """
    extern "C" __global__ void warp(int* y) {
      const int lane = threadIdx.x % 32;
      int* at = y + threadIdx.x * 10;
      at[0] = __shfl_sync(0xffffffffu, lane * 2, 5);
      at[1] = __shfl_xor_sync(0xffffffffu, lane, 1);
      at[2] = __shfl_down_sync(0xffffffffu, lane, 3, 16);
      at[3] = __shfl_up_sync(0xffffffffu, lane, 2, 8);
      at[4] = __ballot_sync(0xffffffffu, lane % 3 == 0);
      at[5] = __any_sync(0xffffffffu, lane == 31) + 2 * __all_sync(0xffffffffu, lane < 31);
      at[6] = __reduce_add_sync(0xffffffffu, lane);
      if (lane >= 16) at[7] = __shfl_sync(0xffff0000u, lane, 20); else at[7] = __reduce_max_sync(0x0000ffffu, lane);
      at[8] = __match_any_sync(0xffffffffu, lane / 8);
      __syncwarp();
      at[9] = __syncthreads_count(lane == 0) * 10 + __syncthreads_or(0) + 2 * __syncthreads_and(1);
    }
    """
    y = torch.zeros(64, 10, dtype=torch.int32)
    emulated.compiled(source, "warp")((1,), (64,), (y.data_ptr(),))
    lane = torch.arange(32)
    want = [
        torch.full((32,), 10),
        lane ^ 1,
        torch.where(lane % 16 + 3 < 16, lane + 3, lane),
        torch.where(lane % 8 >= 2, lane - 2, lane),
        torch.full((32,), sum(1 << i for i in range(0, 32, 3))),
        torch.full((32,), 1),
        torch.full((32,), 31 * 16),
        torch.where(lane >= 16, 20, 15),
        (255 << lane // 8 * 8).to(torch.int32),
        torch.full((32,), 22),
    ]
    for column, values in enumerate(want):
        assert torch.equal(y[:, column], values.repeat(2).to(torch.int32)), column


def test_uninitialised_tensors_are_nan(emulated):
    x = vector(4)
    for tensor in (torch.empty(4), torch.empty_like(x), x.new_empty(3), torch.empty(4, dtype=torch.bfloat16)):
        assert tensor.isnan().all()


def test_half_precision_rounds_as_torch(emulated):
    source = """
    extern "C" __global__ void round_trip(const float* x, float* f16, float* bf16) {
      const int i = blockIdx.x * blockDim.x + threadIdx.x;
      f16[i] = emulation::from_f16(emulation::to_f16(x[i]));
      bf16[i] = emulation::from_bf16(emulation::to_bf16(x[i]));
    }
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8192, generator=generator) * torch.pow(2.0, torch.randint(-30, 30, (8192,), generator=generator))
    x[:6] = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 65519.9, 2**-25])
    f16, bf16 = torch.empty(8192), torch.empty(8192)
    emulated.compiled(source, "round_trip")((32,), (256,), (x.data_ptr(), f16.data_ptr(), bf16.data_ptr()))
    assert torch.equal(f16, x.half().float())
    assert torch.equal(bf16, x.bfloat16().float())


# Each block of a cluster publishes its rank in shared memory, and adds up what the others published.
CLUSTER = """
#include "cluster.cuh"
extern "C" CLUSTERED __global__ void sums(float* y) {
  __shared__ float mine[32];
  mine[threadIdx.x] = blockIdx.x;
  ARRIVE
  WAIT
  float sum = 0.f;
  for (int rank = 0; rank < CLUSTER + MORE; ++rank) sum += cluster_read(mine + threadIdx.x, rank);
  LAST
  y[blockIdx.x * 32 + threadIdx.x] = sum;
}
"""
PARTS = {
    "ARRIVE": "cluster_arrive();",
    "WAIT": "cluster_wait();",
    "LAST": "cluster_arrive(); cluster_wait();",
    "MORE": "0",
}


def clusters(emulated, grid: int = 8, **change: str) -> torch.Tensor:
    source = CLUSTER.replace('#include "cluster.cuh"', (INCLUDE / "cluster.cuh").read_text())
    for name, text in {**PARTS, **change}.items():
        source = source.replace(name, text)
    y = torch.full((8, 32), float("nan"))
    emulated.compiled(source, "sums", {"CLUSTER": 4})((grid, 1, 1), (32, 1, 1), (y.data_ptr(),))
    return y


# Each block tells the others its rank, and adds up what they tell.
EXCHANGE = """
extern "C" __global__ void ranks(unsigned int* memory, int half, float* y) {
  const Exchange e = open_exchange(memory, half);
  const unsigned int before = exchanged_before(e);
  if (threadIdx.x < 4) SEND send(exchanged(e) + blockIdx.x * 4 + threadIdx.x, (float)blockIdx.x + threadIdx.x);
  float sum = 0.f;
  float4 v[2];
  for (int i = 0; i < gridDim.x; i += 2) {
    receive((const float4*)exchanged(e) + i, 1, (int)gridDim.x - i, v);
    for (int u = 0; u < 2 && i + u < gridDim.x; ++u) sum += v[u].x + v[u].w;
  }
  CLEAR clear_before(e, before);
  __syncthreads();
  if (threadIdx.x == 0) close_exchange(e, leave_exchange(e), WORDS);
  y[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}
"""
WHOLE = {"SEND": "", "CLEAR": "", "WORDS": "4 * gridDim.x"}


@pytest.mark.parametrize(
    ("change", "cooperative", "message"),
    [
        ({}, True, ""),
        ({"SEND": "if (blockIdx.x)"}, True, "never come to the grid's barrier"),
        ({"CLEAR": "if (blockIdx.x)"}, True, "finds what is not its own"),
        ({"WORDS": "4 * gridDim.x - 1"}, True, "finds what is not its own"),
        ({}, False, "not cooperative"),
    ],
)
def test_blocks_of_a_cooperative_launch_exchange_words(
    emulated, change: dict[str, str], cooperative: bool, message: str
) -> None:
    emulated.use(sm_count=4)
    text = EXCHANGE
    for name, part in {**WHOLE, **change}.items():
        text = text.replace(name, part)
    kernel = emulated.compiled((INCLUDE / "exchange.cuh").read_text() + text, "ranks")

    def launch(blocks: int) -> torch.Tensor:
        y = vector(4 * 40)
        arguments = (emulated.exchange(y.device, 64), np.int32(64), y.data_ptr())
        kernel((blocks,), (40,), arguments, 0, 0, cooperative=cooperative)
        return y

    if message:
        # What is left behind is seen once the next launch has begun on it.
        with pytest.raises(EmulationError, match=message):
            [launch(4) for _ in range(3)]
        return
    for blocks in (4, 3, 4, 2, 4):
        total = sum(2 * rank + 3 for rank in range(blocks))
        assert torch.equal(launch(blocks)[: blocks * 40], torch.full((blocks * 40,), float(total)))
    with pytest.raises(EmulationError, match=r"not all of .* run at the same time"):
        launch(5)


def test_blocks_of_a_cluster_read_each_others_shared_memory(emulated):
    y = clusters(emulated)
    assert torch.equal(y[:4], torch.full((4, 32), 6.0))
    assert torch.equal(y[4:], torch.full((4, 32), 22.0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ARRIVE": "", "WAIT": ""}, "before that has begun"),
        ({"LAST": ""}, "after that has returned"),
        ({"ARRIVE": ""}, "without having arrived"),
        ({"LAST": "cluster_arrive(); cluster_arrive();"}, "without having waited"),
        ({"MORE": "1"}, "has no block 4"),
        ({"ARRIVE": "if (blockIdx.x != 1 || threadIdx.x) cluster_arrive();",
          "WAIT": "if (blockIdx.x != 1 || threadIdx.x) cluster_wait(); else __syncthreads();"}, "the cluster's barrier"),
    ],
)  # fmt: skip
def test_a_cluster_that_does_not_wait_as_it_must_is_found(emulated, change, message):
    with pytest.raises(EmulationError, match=message):
        clusters(emulated, **change)
    test_blocks_of_a_cluster_read_each_others_shared_memory(emulated)


def test_a_grid_of_no_whole_clusters_is_found(emulated):
    with pytest.raises(EmulationError, match="no whole clusters of 4"):
        clusters(emulated, grid=6)


def test_a_tensor_for_which_there_is_no_room_says_so() -> None:
    code = """
import ctypes, resource, sys
library = ctypes.CDLL(sys.argv[1])
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
library.emulation_allocate(ctypes.c_size_t(4 << 30), ctypes.create_string_buffer(64))
"""
    ended = subprocess.run([sys.executable, "-c", code, runtime()._name], capture_output=True, text=True, check=False)
    assert ended.returncode < 0
    assert "emulation: no room for a tensor of " in ended.stderr
