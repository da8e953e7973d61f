"""Compiles kernel sources with NVRTC through CuPy and launches them on torch's current stream."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from threading import Lock
from typing import Any

import torch
from torch import distributed
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

from advisor.core import architectures
from advisor.core.errors import AdvisorError
from advisor.ops import cuda_driver, dispatch_table, sources
from advisor.ops.cuda_driver import Kernel

DRIVER_OF_OVERLAP_IN_GRAPHS = 12030  # CUDA 12.3: programmatic dependences between the nodes of a graph
NVRTC_OF_TWO_TARGETS = (12, 9)  # the first that was seen to compile with two -arch options; 12.6 and 12.8 refuse


@lru_cache(maxsize=1)
def unavailable() -> str:
    """Why kernels cannot be compiled here; empty when they can."""
    if not torch.cuda.is_available():
        return "no CUDA GPU"
    if torch.cuda.get_device_capability() < divmod(architectures.BUNDLED_KERNELS, 10):
        return f"the GPU is older than sm_{architectures.BUNDLED_KERNELS}"
    try:
        import cupy
    except Exception as error:
        major = (torch.version.cuda or "13").split(".")[0]
        return f"CuPy cannot be imported ({error}); install cnn-advisor[cuda{major}]"
    built, used = cupy.cuda.runtime.runtimeGetVersion() // 1000, int((torch.version.cuda or "0").split(".")[0])
    if built != used:
        return f"CuPy is built for CUDA {built}, torch for CUDA {used}; install cnn-advisor[cuda{used}]"
    return cuda_driver.unavailable()


def on_device(tensor: torch.Tensor) -> str:
    """Why kernels cannot run where this tensor is; empty when they can."""
    if not tensor.is_cuda:
        return "not on a CUDA device"
    return out_of_reach(tensor) or unavailable()


def out_of_reach(tensor: torch.Tensor) -> str:
    """Why no kernel may touch this tensor's memory, wherever it lies; empty when one may."""
    return transformed() or outlived(tensor)


def outlived(*tensors: torch.Tensor) -> str:
    """Why one of these tensors has no memory of its own outside of torch.func's transforms; empty where all have."""
    wrapped = any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors))
    return "outlived a torch.func transform" if wrapped else ""


def transformed() -> str:
    """What stands between a tensor and plain reverse-mode autograd on its memory; empty for nothing."""
    if torch._C._are_functorch_transforms_active():
        return "inside a torch.func transform"  # its tensors have no memory of their own
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation"
    return ""


def alone() -> bool:
    """Whether this process trains by itself: no collectives of a process group take SMs beside its kernels for long."""
    return not (distributed.is_available() and distributed.is_initialized())


@cache
def refused(name: str) -> str:
    """Why the compiler here cannot take `kernels/<name>` for this GPU; empty when it can.

    A source for one architecture alone names that (`sources.target`), CuPy names the GPU's behind it, and before 12.9 NVRTC takes no two.
    """
    if not sources.target(name):
        return ""
    import cupy

    version: tuple[int, int] = cupy.cuda.nvrtc.getVersion()
    if version >= NVRTC_OF_TWO_TARGETS:
        return ""
    least, found = (".".join(map(str, v)) for v in (NVRTC_OF_TWO_TARGETS, version))
    return f"compiled by NVRTC {least} or newer only, CuPy finds {found}"


@cache
def arch(device: int) -> int:
    """The device's architecture as one number: 90 for sm_90."""
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


def used() -> int:
    """The architecture whose layer of the dispatch table calls go by: of the first GPU, or what was measured while none is in use."""
    return arch(0) if torch.cuda.is_initialized() else architectures.MEASURED.sm


dispatch_table.present = used


@cache
def overlaps(device: int) -> bool:
    """Whether a kernel's blocks may be launched before the kernel ahead has ended, in captured graphs too."""
    import cupy

    return (
        architectures.of(arch(device)).early_launches
        and cupy.cuda.runtime.driverGetVersion() >= DRIVER_OF_OVERLAP_IN_GRAPHS
    )


@cache
def sm_count(device: int) -> int:
    """Streaming multiprocessors of the device."""
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def options(defines: Mapping[str, int]) -> tuple[str, ...]:
    """Compiler options for a variant. `defines` are the macros that the source documents."""
    return ("-std=c++17", *(f"-D{name}={value}" for name, value in sorted(defines.items())))


@cache
def compiled_module(name: str, defines: tuple[tuple[str, int], ...], device: int) -> Any:
    import cupy

    with cupy.cuda.Device(device):
        flags = (*options(dict(defines)), *sources.target(name))
        return cupy.RawModule(code=sources.source(name), options=flags, backend="nvrtc")


# What is made once for all is made by one thread at a time: the script's own may be the first at once, and so may autograd's.
_making = Lock()
launched: set[str] = set()  # sources of the kernels that this process has asked for, to launch them
most_dynamic_by_kernel: dict[tuple[str, str, tuple[tuple[str, int], ...], int], int] = {}  # by kernel and device


@cache
def function(name: str, entry: str, defines: tuple[tuple[str, int], ...], device: int, most_dynamic: int = 0) -> Kernel:
    """The compiled kernel `entry` of `kernels/<name>`: call as `f(grid, block, arguments, shared_bytes, stream(device))`.

    `most_dynamic`: the most bytes of dynamic shared memory that a launch will ask for, where that and the kernel's own are
    more than 48 KiB.

    Raises:
        AdvisorError: when the compiler refuses the source; the compiler's own message is shown.
    """
    import cupy

    try:
        with _making, cupy.cuda.Device(device):
            raw = compiled_module(name, defines, device).get_function(entry)
            launched.add(name)
            # What is asked for is the kernel's, whoever launches it: less would be too little for those who asked for more.
            kernel = name, entry, defines, device
            if most_dynamic > most_dynamic_by_kernel.get(kernel, 0):
                raw.max_dynamic_shared_size_bytes = most_dynamic_by_kernel[kernel] = most_dynamic
            overlapping = sources.overlaps(name) and overlaps(device)
            types = sources.parameters(name, entry, defines)
            return Kernel(raw.kernel, entry, types, device=device, overlapping=overlapping)
    except cupy.cuda.compiler.CompileException as error:
        raise AdvisorError(f"kernels/{name} does not compile: {error}", fix="Run `advisor doctor`.") from None


def warm(variants: Iterable[tuple[str, Mapping[str, int]]], device: int = 0) -> None:
    """Compile variants (source, macros) side by side into CuPy's cache on disk, so that their first launch need not wait.

    NVRTC compiles without Python's lock, a variant a core. What does not compile is told at its first launch, not here.
    """

    def compile_one(name: str, defines: tuple[tuple[str, int], ...]) -> None:
        with contextlib.suppress(Exception):
            compiled_module(name, defines, device).compile()

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for name, defines in dict.fromkeys((name, tuple(defines.items())) for name, defines in variants):
            pool.submit(compile_one, name, defines)


def stream(device: int) -> int:
    """Address of torch's current stream on `device`."""
    raw: int = torch._C._cuda_getCurrentRawStream(device)
    return raw


def address(tensor: torch.Tensor | None) -> int:
    """Of a tensor's memory, as a launch wants it: 0 without one."""
    return 0 if tensor is None else tensor.data_ptr()


_TICKETS_PER_STREAM = 1024
STREAMS = 64  # torch hands out 32 pooled streams a priority; the default stream and a few external ones come on top
tickets_of: dict[int, tuple[torch.Tensor, dict[int, int]]] = {}


def tickets(device: torch.device) -> int:
    """Address of 1024 zeroed 32-bit counters that belong to this device and torch's current stream alone.

    Kernels leave them zeroed. They are allocated for all streams at the first call, which must not be inside a stream
    capture (a capture would only record the zeroing, and its pool would own the memory).

    Raises:
        AdvisorError: when the first call is captured, or when more streams than foreseen launch kernels.
    """
    index = device.index or 0
    if index not in tickets_of:
        if torch.cuda.is_current_stream_capturing():
            raise AdvisorError("a kernel's first launch is inside a CUDA graph capture", fix="Run one step before it.")
        with _disable_current_modes():  # made once, and so no part of a call that is recorded just now (ops/sites)
            zeroed = torch.zeros(STREAMS * _TICKETS_PER_STREAM, dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)  # another stream may be the next to use them
        tickets_of.setdefault(index, (zeroed, {}))  # another thread may have been at it meanwhile
    counters, slots = tickets_of[index]
    stream = torch._C._cuda_getCurrentRawStream(index)
    slot = slots.get(stream)
    if slot is None:
        with _making:
            slot = slots.setdefault(stream, len(slots))
    if slot >= STREAMS:
        raise AdvisorError(f"kernels were launched on more than {STREAMS} streams")
    return counters.data_ptr() + slot * _TICKETS_PER_STREAM * 4


def keeps(address: int) -> bool:
    """Whether it lies in memory that `tickets` or `exchange` has given out, and which stays where it is."""
    kept = [counters for counters, _ in tickets_of.values()] + [
        block for blocks, _ in exchanges.values() for block in blocks
    ]
    return any(0 <= address - t.data_ptr() < t.untyped_storage().nbytes() for t in kept)


# Of include/exchange.cuh: words of state ahead of two halves, and what stands in a word that has not come yet.
EXCHANGE_STATE, ABSENT = 4, 0x7FEDCBA9
_STREAMS_AT_A_TIME, _STREAMS_TO_SPARE = 8, 4  # to spare: for captures, which may take but not add to them
# By device: memory, for some streams at a time, and how many streams have theirs.
exchanges: dict[int, tuple[list[torch.Tensor], int]] = {}
exchange_of: dict[tuple[int, int], int] = {}  # by device and stream: an address


def exchange(device: torch.device, half: int) -> int:
    """Address of the memory through which blocks of a launch on torch's current stream tell each other sums; 0 where there is none.

    It is this stream's alone and has room for `half` words at a time, the same for all calls of a device. It comes for some streams at a
    time, and there is none for the next one inside a capture, which would own it, or beyond as many streams as `tickets` foresees.
    """
    index = device.index or 0
    stream = index, torch._C._cuda_getCurrentRawStream(index)
    return exchange_of.get(stream) or _new_exchange(device, stream, half)


def new_exchanges(streams: int, half: int) -> torch.Tensor:
    """Memory for so many streams [streams, words] int32, on the CPU, as include/exchange.cuh wants to find it at first."""
    found = torch.full((streams, EXCHANGE_STATE + 2 * half), ABSENT, dtype=torch.int32)
    found[:, :EXCHANGE_STATE] = 0
    return found


def _new_exchange(device: torch.device, stream: tuple[int, int], half: int) -> int:
    with _making, _disable_current_modes():  # as in `tickets`
        return exchange_of.get(stream) or _take_exchange(device, stream, half)


def _take_exchange(device: torch.device, stream: tuple[int, int], half: int) -> int:
    blocks, taken = exchanges.get(stream[0], ([], 0))
    left = _STREAMS_AT_A_TIME * len(blocks) - taken
    if left <= _STREAMS_TO_SPARE and not torch.cuda.is_current_stream_capturing():
        left += _STREAMS_AT_A_TIME
        blocks.append(new_exchanges(_STREAMS_AT_A_TIME, half).to(device))
        torch.cuda.synchronize(device)  # another stream may be the next to use it
    if not left or taken >= STREAMS:
        return 0
    exchanges[stream[0]] = blocks, taken + 1
    block, place = divmod(taken, _STREAMS_AT_A_TIME)
    address: int = blocks[block][place].data_ptr()
    exchange_of[stream] = address
    return address
