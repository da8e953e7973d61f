"""CUPTI's activity records, bound by ctypes: kernels, copies and CUDA calls of a process without a profiler of torch's.

Record layouts: cupti_activity.h of CUDA 12.6 to 13.5. Newer releases append fields to a record; all that is read here lies before them.
"""

from __future__ import annotations

import ctypes
import struct
import time
from collections.abc import Callable
from ctypes import CFUNCTYPE, POINTER, byref, c_char_p, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p
from functools import lru_cache
from typing import Any

from advisor.core.errors import AdvisorError
from advisor.core.trace import DeviceTable, RuntimeTable
from advisor.profiling.machine import cupti
from advisor.profiling.trace.hostcalls import is_allocation, is_launch, is_load, is_wait

# CUpti_ActivityKind
MEMCPY, MEMSET, KERNEL, DRIVER, RUNTIME, CONCURRENT_KERNEL = 1, 2, 3, 4, 5, 10
KINDS = (MEMCPY, MEMSET, CONCURRENT_KERNEL, DRIVER, RUNTIME)
DRIVER_DOMAIN, RUNTIME_DOMAIN = 1, 2  # CUpti_CallbackDomain
FORCED = 1  # CUPTI_ACTIVITY_FLAG_FLUSH_FORCED
BUFFER_BYTES, ALIGNMENT = 8 << 20, 8

_KERNEL = struct.Struct("=QQQIIIiiiiii16xIqQ")  # from byte 16: start … correlationId, gridId, name
_COPY = struct.Struct("=BBBBQQQIIII")  # from byte 4
_SET = struct.Struct("=IQQQIIII")  # from byte 4
_CALL = struct.Struct("=IQQIII")  # from byte 4

# CUpti_ActivityMemcpyKind, CUpti_ActivityMemoryKind; named as Kineto names them, which analysis reads
_COPIES = {1: "HtoD", 2: "DtoH", 3: "HtoA", 4: "AtoH", 8: "DtoD", 9: "HtoH", 10: "PtoP"}
_MEMORY = {1: "Pageable", 2: "Pinned", 3: "Device", 4: "Array", 5: "Managed"}

_REQUESTED = CFUNCTYPE(None, POINTER(c_void_p), POINTER(c_size_t), POINTER(c_size_t))
_COMPLETED = CFUNCTYPE(None, c_void_p, c_uint32, c_void_p, c_size_t, c_size_t)


class ActivityUnavailable(AdvisorError):
    """CUPTI gives no activity records here; the text says why."""


class _Buffers:
    """CUPTI's buffers of this process. It takes one pair of callbacks, once, so there is one of these."""

    def __init__(self, library: Any) -> None:
        self.library = library
        self.filled: list[tuple[int, int]] = []  # address, valid bytes
        self._memory: dict[int, Any] = {}
        self._callbacks = (_REQUESTED(self._request), _COMPLETED(self._complete))
        check(library, "cuptiActivityRegisterCallbacks", *self._callbacks)

    def _request(self, buffer: Any, size: Any, records: Any) -> None:
        memory = ctypes.create_string_buffer(BUFFER_BYTES + ALIGNMENT)
        address = (ctypes.addressof(memory) + ALIGNMENT - 1) & -ALIGNMENT
        self._memory[address] = memory
        buffer[0], size[0], records[0] = address, BUFFER_BYTES, 0

    def _complete(self, context: int, stream: int, buffer: int, size: int, valid: int) -> None:
        self.filled.append((buffer, valid))

    def take(self, each: Callable[[int, int], None]) -> None:
        """Call `each(kind, address)` for every record, and free the buffers."""
        record = c_void_p()
        filled, self.filled = self.filled, []
        for address, valid in filled:
            record.value = None
            while self.library.cuptiActivityGetNextRecord(c_void_p(address), c_size_t(valid), byref(record)) == 0:
                each(c_uint32.from_address(record.value or 0).value, record.value or 0)
            self._memory.pop(address, None)


class Activity:
    """Records what the device does and which CUDA calls the host makes, from `start` to `stop`.

    Raises:
        ActivityUnavailable: no CUPTI, or another profiler holds it.
    """

    _buffers: _Buffers | None = None

    def __init__(self) -> None:
        try:
            loaded = cupti.load()
        except cupti.CountersUnavailable as error:
            raise ActivityUnavailable(error.found, fix=error.fix) from None
        self._library = loaded.library
        if Activity._buffers is None:
            Activity._buffers = _Buffers(self._library)
        self._store: _Buffers = Activity._buffers
        self.offset_ns = 0  # CLOCK_REALTIME less CUPTI's clock
        self._names: dict[tuple[int, int], str] = {}

    def start(self) -> None:
        """Records are kept from here on."""
        self._store.filled.clear()
        enabled = []
        try:
            for kind in KINDS:
                check(self._library, "cuptiActivityEnable", c_uint32(kind))
                enabled.append(kind)
        except ActivityUnavailable:
            for kind in enabled:
                self._library.cuptiActivityDisable(c_uint32(kind))
            raise
        stamp = c_uint64()
        before = time.time_ns()
        check(self._library, "cuptiGetTimestamp", byref(stamp))
        self.offset_ns = (before + time.time_ns()) // 2 - stamp.value

    def stop(self) -> tuple[RuntimeTable, DeviceTable]:
        """What was recorded, on CLOCK_REALTIME. The device must have done all its work by now."""
        for kind in KINDS:
            self._library.cuptiActivityDisable(c_uint32(kind))
        check(self._library, "cuptiActivityFlushAll", c_uint32(FORCED))
        found = Found(self._library, self.offset_ns, self._names)
        self._store.take(found.record)
        return found.tables()


class Found:
    """Records as they are read; `tables` has them as a trace does."""

    def __init__(self, library: Any, offset_ns: int, names: dict[tuple[int, int], str]) -> None:
        self._library, self._offset, self._names = library, offset_ns, names
        self._calls: list[tuple[int, int, str, int, int, bool]] = []  # start, end, name, thread, correlation, driver
        self._device: list[tuple[int, int, str, int, int, str, str, int, int]] = []

    def record(self, kind: int, address: int) -> None:
        """One record."""
        if kind in (DRIVER, RUNTIME):
            self._call(kind, address)
        elif kind in (KERNEL, CONCURRENT_KERNEL):
            self._kernel(address)
        elif kind == MEMCPY:
            how, source, target, _, nbytes, start, end, device, _, stream, link = _unpack(_COPY, address + 4)
            where = f"{_MEMORY.get(source, 'Unknown')} -> {_MEMORY.get(target, 'Unknown')}"
            name = f"Memcpy {_COPIES.get(how, 'DtoD')} ({where})"
            self._device.append((start, end, name, stream, link, "", "", nbytes, device))
        elif kind == MEMSET:
            _, nbytes, start, end, device, _, stream, link = _unpack(_SET, address + 4)
            self._device.append((start, end, "Memset (Device)", stream, link, "", "", nbytes, device))

    def _kernel(self, address: int) -> None:
        start, end, _, device, _, stream, gx, gy, gz, bx, by, bz, link, _, name = _unpack(_KERNEL, address + 16)
        text = ctypes.string_at(name).decode(errors="replace") if name else ""
        self._device.append(
            (start, end, demangled(text), stream, link, f"{gx}x{gy}x{gz}", f"{bx}x{by}x{bz}", 0, device)
        )

    def _call(self, kind: int, address: int) -> None:
        number, start, end, _, thread, link = _unpack(_CALL, address + 4)
        name = self._name(DRIVER_DOMAIN if kind == DRIVER else RUNTIME_DOMAIN, number)
        if (
            kind == RUNTIME
            or is_launch(name)
            or is_wait(name)
            or is_allocation(name)
            or is_load(name)
            or "Memcpy" in name
        ):
            self._calls.append((start, end, name, thread, link, kind == DRIVER))

    def _name(self, domain: int, number: int) -> str:
        if (domain, number) not in self._names:
            text = c_char_p()
            known = self._library.cuptiGetCallbackName(c_uint32(domain), c_uint32(number), byref(text)) == 0
            name = (text.value or b"").decode() if known else f"call {number}"
            # Runtime calls carry the release they came with: cudaLaunchKernel_v7000.
            head, _, tail = name.rpartition("_v")
            self._names[domain, number] = head if head and tail.isdigit() and len(tail) > 1 else name
        return self._names[domain, number]

    def tables(self) -> tuple[RuntimeTable, DeviceTable]:
        """Both tables, by start. What the runtime asks of the driver is the runtime's call alone."""
        by_runtime = {link for *_, link, driver in self._calls if not driver}
        runtime, device = RuntimeTable(), DeviceTable()
        for start, end, name, thread, link, driver in sorted(self._calls):
            if driver and link in by_runtime:
                continue
            runtime.name.append(name)
            runtime.start_ns.append(start + self._offset)
            runtime.end_ns.append(end + self._offset)
            runtime.thread.append(thread)
            runtime.correlation.append(link)
        for start, end, name, stream, link, grid, block, nbytes, number in sorted(self._device):
            device.name.append(name)
            device.start_ns.append(start + self._offset)
            device.end_ns.append(end + self._offset)
            device.stream.append(stream)
            device.correlation.append(link)
            device.op.append(0)
            device.grid.append(grid)
            device.block.append(block)
            device.nbytes.append(nbytes)
            device.device.append(number)
        return runtime, device


def _unpack(layout: struct.Struct, address: int) -> tuple[Any, ...]:
    return layout.unpack_from((c_uint8 * layout.size).from_address(address))


@lru_cache(maxsize=4096)
def demangled(name: str) -> str:
    """A C++ kernel's name as people know it; the name itself where it is none, or no demangler is there."""
    if not name.startswith("_Z"):
        return name
    try:
        demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    except (OSError, AttributeError):
        return name
    demangle.restype = c_void_p
    found = demangle(name.encode(), None, None, None)
    if not found:
        return name
    text = ctypes.string_at(found).decode(errors="replace")
    ctypes.CDLL(None).free(c_void_p(found))
    return text


def check(library: Any, name: str, *arguments: Any) -> None:
    """Call a function of libcupti.

    Raises:
        ActivityUnavailable: it refused.
    """
    result = int(getattr(library, name)(*arguments))
    if result:
        refused = cupti.refused(name, result)
        raise ActivityUnavailable(refused.found, fix=refused.fix)
