"""What a kernel sees that was launched before the one ahead of it has ended (kernels/include/overlap.cuh)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from advisor.ops import cuda_driver, nvrtc
from advisor.resources import kernels_dir

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or bool(nvrtc.unavailable()), reason="needs a CUDA GPU and CuPy"),
]

# The kernel ahead has every SM read all of x, so that their first-level caches hold it, and only then, behind a barrier of all its
# blocks, does one other block write each value anew. The kernel behind has long been on the same SMs by then.
SOURCE = """
typedef unsigned int u32;
extern "C" __global__ void ahead(u32* x, u32* sink, u32* ticket, int values, u32 old) {
  asm volatile("griddepcontrol.wait; griddepcontrol.launch_dependents;" ::: "memory");
  u32 sum = 0;
  for (int turn = 0; turn < 4; ++turn)
    for (int i = threadIdx.x; i < values; i += blockDim.x) {
      u32 v;
      asm volatile("LOAD.u32 %0, [%1];" : "=r"(v) : "l"(x + i));
      sum += v - old;
    }
  if (sum) sink[blockIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    atomicAdd(ticket, 1u);
    while (*(volatile u32*)ticket < gridDim.x) __nanosleep(2000);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < values; i += blockDim.x)
    if (i / 32 % gridDim.x == blockIdx.x) x[i] = old + 1;
}
extern "C" __global__ void behind(u32* x, u32* stale, int values, u32 fresh) {
  WAIT
  for (int i = threadIdx.x; i < values; i += blockDim.x) {
    u32 v;
    asm volatile("LOAD.u32 %0, [%1];" : "=r"(v) : "l"(x + i));
    if (v != fresh) atomicAdd(stale, 1u);
  }
}
"""
VALUES = 8192  # 32 KiB: a first-level cache holds them


def kernels(load: str, wait: str) -> tuple[Any, Any]:
    import cupy

    overlap = (kernels_dir() / "include" / "overlap.cuh").read_text()
    text = overlap + SOURCE.replace("LOAD", load).replace("WAIT", wait)
    module = cupy.RawModule(code=text, options=nvrtc.options({}), backend="nvrtc")
    return tuple(
        cuda_driver.Kernel(module.get_function(entry).kernel, entry, types, overlapping=True)
        for entry, types in (("ahead", "PPPiI"), ("behind", "PPiI"))
    )


def stale(load: str, wait: str) -> int:
    """How many values the kernel behind finds as they were."""
    ahead, behind = kernels(load, wait)
    sms, stream = nvrtc.sm_count(0), nvrtc.stream(0)
    x, sink = torch.zeros(VALUES, dtype=torch.int32, device="cuda"), torch.zeros(sms, dtype=torch.int32, device="cuda")
    found = torch.zeros(1, dtype=torch.int32, device="cuda")
    tickets = torch.zeros(100, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    for number in range(len(tickets)):
        sizes = VALUES, number
        pointers = x.data_ptr(), sink.data_ptr(), tickets[number].data_ptr()
        ahead((sms, 1, 1), (256, 1, 1), (*pointers, *sizes), 0, stream)
        behind((sms, 1, 1), (256, 1, 1), (x.data_ptr(), found.data_ptr(), VALUES, number + 1), 0, stream)
    assert not int(sink.count_nonzero()), "the kernel ahead did not wait for the one before it"
    return int(found)


@pytest.mark.parametrize("load", ["ld.global", "ld.global.nc"])
def test_it_sees_what_the_kernel_ahead_wrote_though_the_sm_has_cached_what_was_there(load: str) -> None:
    assert stale(load, "overlap_launches();") == 0


@pytest.mark.parametrize("load", ["ld.global", "ld.global.nc"])
def test_without_its_wait_it_would_not(load: str) -> None:
    if not nvrtc.overlaps(0):
        pytest.skip("no launch overlaps here")
    assert stale(load, "") > 0


def test_a_refused_launch_says_why() -> None:
    from advisor.core.errors import AdvisorError

    _, behind = kernels("ld.global", "overlap_launches();")
    with pytest.raises(AdvisorError, match="refuses to launch behind: invalid argument"):
        behind((1, 1, 1), (4096, 1, 1), (0, 0, 0, 0), 0, nvrtc.stream(0))
