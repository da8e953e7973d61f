"""CUPTI's records as they lie in memory, against the offsets in cupti_activity.h."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

from advisor.profiling.machine import activity

NAMES = {
    (2, 211): b"cudaLaunchKernel_v7000",
    (1, 307): b"cuLaunchKernel",
    (1, 5): b"cuCtxGetCurrent",
    (1, 279): b"cuMemcpyDtoH_v2",
}


class Library:
    """Knows the names of a few calls."""

    def cuptiGetCallbackName(self, domain: Any, number: Any, text: Any) -> int:
        text._obj.value = NAMES[domain.value, number.value]
        return 0


def record(length: int, **fields: tuple[int, str, int]) -> ctypes.Array[ctypes.c_char]:
    memory = ctypes.create_string_buffer(length)
    for offset, layout, value in fields.values():
        struct.pack_into("=" + layout, memory, offset, value)
    return memory


def call(domain: int, number: int, start: int, end: int, link: int) -> tuple[int, Any]:
    kind = activity.DRIVER if domain == activity.DRIVER_DOMAIN else activity.RUNTIME
    return kind, record(40, cbid=(4, "I", number), start=(8, "Q", start), end=(16, "Q", end), thread=(28, "I", 77), link=(32, "I", link))  # fmt: skip


def test_kernels_copies_and_calls_are_read_and_joined() -> None:
    name = ctypes.create_string_buffer(b"_Z3foov")
    kernel = record(160, start=(16, "Q", 100), end=(24, "Q", 150), device=(40, "I", 1), stream=(48, "I", 7), x=(52, "i", 3), y=(56, "i", 4),
                    z=(60, "i", 5), bx=(64, "i", 32), by=(68, "i", 2), bz=(72, "i", 1), link=(92, "I", 11), name=(104, "Q", ctypes.addressof(name)))  # fmt: skip
    copy = record(64, how=(4, "B", 1), source=(5, "B", 1), target=(6, "B", 3), nbytes=(8, "Q", 4096), start=(16, "Q", 10), end=(24, "Q", 20),
                  stream=(40, "I", 7), link=(44, "I", 12))  # fmt: skip
    fill = record(
        64, nbytes=(8, "Q", 64), start=(16, "Q", 30), end=(24, "Q", 31), stream=(40, "I", 7), link=(44, "I", 13)
    )
    found = activity.Found(Library(), 1000, {})
    records = [
        (activity.CONCURRENT_KERNEL, kernel),
        (activity.MEMCPY, copy),
        (activity.MEMSET, fill),
        call(2, 211, 90, 95, 11),
        call(1, 307, 91, 94, 11),  # the driver's part of the runtime's call
        call(1, 307, 200, 201, 14),
        call(1, 5, 300, 301, 15),  # says nothing that is looked for
        call(1, 279, 400, 500, 16),
    ]
    for kind, memory in records:
        found.record(kind, ctypes.addressof(memory))
    runtime, device = found.tables()
    assert runtime.name == ["cudaLaunchKernel", "cuLaunchKernel", "cuMemcpyDtoH_v2"]
    assert runtime.start_ns == [1090, 1200, 1400]
    assert runtime.thread == [77] * 3
    assert device.name == ["Memcpy HtoD (Pageable -> Device)", "Memset (Device)", "foo()"]
    assert (device.grid[2], device.block[2], device.device[2], device.stream[2]) == ("3x4x5", "32x2x1", 1, 7)
    assert (device.nbytes[0], device.start_ns[0], device.correlation) == (4096, 1010, [12, 13, 11])
