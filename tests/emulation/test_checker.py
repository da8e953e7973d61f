"""Kernels whose every access is looked at: what a GPU would refuse, or get wrong by chance, is planted in entries of a few lines."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from emulation.compiler import INCLUDE, EmulationError
from emulation.device import Device, emulated_boxes

ARRAY = "__shared__ __align__(16) float a[64]; "
DYNAMIC = "extern __shared__ __align__(16) float d[]; "
# Each with what is said of it.
ACCESSES = [
    ("y[i] = ((float4*)(x + 1))->x;", "misaligned"),
    ("y[i] = ((float2*)(x + 2 * i + 1))->x;", "misaligned"),
    ("*(uint4*)((unsigned*)y + 2) = uint4{1, 2, 3, 4};", "misaligned"),
    ("*(int2*)((int*)y + 1 + 2 * n) = int2{1, 2};", "misaligned"),
    ("*(unsigned*)((unsigned short*)y + 1) = 1u;", "misaligned"),  # two values of 16 bits as one
    # Arrays begin where their declarations say, not where vectors could be read.
    ("__shared__ float a[64]; a[i] = 1.f; __syncwarp(); y[i] = ((float4*)a)[i / 4].x;", "no multiple|misaligned"),
    ("__shared__ unsigned short a[64]; ((unsigned*)a)[i] = 1u; __syncwarp(); y[i] = a[i];", "no multiple|misaligned"),
    (DYNAMIC + "*(float4*)(d + 1) = float4{1, 2, 3, 4};", "no multiple|misaligned"),
    (ARRAY + "cp_async16(a + 4 * (i % 4) + 2, x);", "cp.async of 16 bytes"),
    (ARRAY + "cp_async8(a + 4 * (i % 4), x + 1);", "cp.async of 8 bytes"),
    (ARRAY + "cp_async4((char*)a + 2, x);", "cp.async of 4 bytes"),
    (ARRAY + "unsigned r[4]; ldmatrix_x4(r, a + 4 * (i % 4) + 2); y[i] = r[0];", "ldmatrix"),
    (ARRAY + "initialise((Barrier*)(a + 1), 1);", "a barrier at an address"),
    # To the byte: what rounding up, or a page, would hide. x has 63 values.
    ("y[i] = x[i + 32];", "reads 0 bytes behind the 252 bytes of argument 0"),
    ("const float4 v = ((float4*)x)[15]; y[i] = v.x + v.y + v.z + v.w;", "reads 0 bytes behind"),
    (ARRAY + "cp_async16(a, x + 60);", "reads 0 bytes behind"),
    ("x[i - 1] = 1.f;", "writes .* before"),
    ("y[i] = x[i + 3000000];", "reads at 0x.*, where no tensor is"),
    ("__shared__ float a[32], b[32]; float* p = a; b[i] = 1.f; p[i + 32 * n] = 1.f; y[i] = b[i];", "between two shared arrays"),
    (DYNAMIC + "d[i + 32] = 1.f;", "leaves the launch's dynamic shared memory"),
    (DYNAMIC + "*(float2*)(d + 32) = float2{1, 2};", "leaves the launch's dynamic shared memory"),
]  # fmt: skip
# Right with the barrier in the place of BARRIER (and where n), and without it not.
RACES = [
    ("a[i] = x[i]; BARRIER y[i] = a[63 - i];", "__syncthreads();"),
    ("a[i] = x[i]; __syncthreads(); y[i] = a[63 - i]; BARRIER a[i] = 2.f; __syncthreads(); y[i] += a[i];", "__syncthreads();"),
    ("if (i < 32 || !n) a[i % 32] = x[i]; __syncthreads(); y[i] = a[0];", ""),
    ("a[i] = x[i]; BARRIER y[i] = a[i ^ 1];", "__syncwarp();"),  # the lanes of a warp are not in step
    ("a[i] = x[i]; y[i] = __shfl_sync(~0u, a[i], 3); BARRIER y[i] += a[i ^ 1];", "__syncwarp();"),
    ("if (i < 32) a[i] = x[i]; BARRIER y[i] = a[i % 32];", "wait_for_part(1, 64);"),
    ("__shared__ Barrier b; if (i == 0) initialise(&b, 32); __syncthreads(); if (i < 32) { a[i] = x[i]; arrive(&b); } BARRIER "
     "y[i] = a[31 - i % 32];", "wait(&b, 0);"),
    ("cp_async4(a + i, x + i); cp_async_commit(); BARRIER y[i] = a[i];", "cp_async_wait<0>();"),
    ("cp_async4(a + i, x + i); BARRIER cp_async4(a + i, x + i); cp_async_wait<0>();", "cp_async_commit(); cp_async_wait<0>();"),
    ("cp_async4(a + i, x + i); cp_async_commit(); BARRIER __syncthreads(); y[i] = a[63 - i];", "cp_async_wait<0>();"),
    ("cp_async4(a + i, x + i); cp_async_commit(); cp_async_wait<0>(); BARRIER y[i] = a[63 - i];", "__syncthreads();"),
    ("if (i == 0) a[0] = 0.f; __syncthreads(); atomicAdd(a, 1.f); BARRIER y[i] = a[0];", "__syncthreads();"),
]  # fmt: skip
VIEW = (
    "for (int c = 0; c < 3; ++c) y[i] += x[8 * i + c]; if (n < 0) y[i] = x[8 * i - n]; if (n > 2) x[8 * i + n] = 1.f;"
)


@cache
def _source() -> str:
    """All as entries of one source, which compiles once."""
    bodies = {f"access{number}": body for number, (body, _) in enumerate(ACCESSES)}
    bodies["view"] = VIEW
    for number, (body, barrier) in enumerate(RACES):
        bodies[f"race{number}"] = ARRAY + body.replace("BARRIER", f"if (n) {{ {barrier} }}")
    entry = 'extern "C" __global__ void {}(float* x, float* y, int n) {{ const int i = threadIdx.x; {} }}'
    headers = ((INCLUDE / name).read_text() for name in ("cp_async.cuh", "mma.cuh", "mbarrier.cuh"))
    return "\n".join((*headers, *(entry.format(name, body) for name, body in bodies.items())))


def launch(
    device: Device, name: str, x: torch.Tensor, y: torch.Tensor, n: int = 1, threads: int = 32, shared: int = 0
) -> None:
    device.use(checked=True)
    arguments = (x.data_ptr(), y.data_ptr(), np.int32(n))
    device.compiled(_source(), name)((1,), (threads,), arguments, shared)


@pytest.mark.parametrize("number", range(len(ACCESSES)), ids=[body for body, _ in ACCESSES])
def test_an_access_that_a_gpu_would_refuse_is_refused(emulated: Device, number: int) -> None:
    x, y = torch.ones(63), torch.zeros(64)
    with pytest.raises(EmulationError, match=ACCESSES[number][1]):
        launch(emulated, f"access{number}", x, y, shared=128 if DYNAMIC in ACCESSES[number][0] else 0)
    assert not y.any()
    assert x.all()


def test_an_access_outside_a_view_inside_its_storage_is_refused(emulated: Device) -> None:
    y = torch.zeros(32)
    channels = torch.ones(32, 8)[:, 2:5]  # with gaps of five
    launch(emulated, "view", channels, y)
    assert torch.equal(y, torch.full((32,), 3.0))
    for n, what in ((-3, "reads"), (3, "writes"), (-7, "reads"), (5, "writes")):
        with pytest.raises(EmulationError, match=f"{what} the storage of argument 0, outside the tensor"):
            launch(emulated, "view", channels, y, n)


@pytest.mark.parametrize("number", range(len(RACES)), ids=[body for body, _ in RACES])
def test_a_missing_barrier_is_found_in_every_order(emulated: Device, number: int) -> None:
    for seed in range(1, 6):
        emulated.use(seed=seed)
        launch(emulated, f"race{number}", torch.ones(64), torch.zeros(64), threads=64)
        with pytest.raises(EmulationError, match=r"without a barrier behind|a cp\.async goes to"):
            launch(emulated, f"race{number}", torch.ones(64), torch.zeros(64), 0, threads=64)


@pytest.mark.parametrize(
    ("offset", "shape", "how", "message"),
    [
        (0, (1, 4, 4, 64), {}, ""),
        (1, (1, 4, 4, 64), {}, "begins at no multiple of 16 bytes"),
        (0, (1, 4, 4, 20), {}, "strides are no multiples of 16 bytes"),
        (0, (1, 4, 4, 64), {"rows": 257}, "a box of 1 x 257 x 4"),
        (0, (1, 4, 4, 64), {"channels": 48}, "no swizzle"),
    ],
)
def test_a_map_that_the_driver_would_refuse_is_refused(
    offset: int, shape: tuple[int, ...], how: dict[str, int], message: str
) -> None:
    size = int(np.prod(shape))
    x = torch.zeros(size + offset, dtype=torch.bfloat16)[offset:].view(shape).permute(0, 3, 1, 2)
    wanted = {"channels": 64, "columns": 4, "rows": 4, **how}
    if message:
        with pytest.raises(EmulationError, match=message):
            emulated_boxes(x, **wanted)
    else:
        assert emulated_boxes(x, **wanted).nbytes == 128
