"""A CUDA device that is this machine's CPU: launches emulated kernels on CPU tensors in guarded memory."""

from __future__ import annotations

import ctypes
import itertools
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from advisor.ops import cuda_driver, dispatch, nvrtc, shared_memory, tensor_map
from emulation import compiler
from emulation.compiler import EmulationError

_CLUSTER = 8  # blocks, without asking for more
_COOPERATIVE = 16  # blocks that the runtime has room for
_LIMITS = (2**31 - 1, 65535, 65535)
_READ = ("from",)  # fields of a struct whose addresses a kernel only reads


class _Region(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("map", "pages", "data")),
        *((name, ctypes.c_size_t) for name in ("map_bytes", "page_bytes", "bytes")),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        ("entry", ctypes.c_void_p),
        ("arguments", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("cluster", ctypes.c_uint),
        ("cooperative", ctypes.c_uint),
        ("dynamic_bytes", ctypes.c_size_t),
        ("shared_begin", ctypes.c_void_p),
        ("shared_end", ctypes.c_void_p),
        ("seed", ctypes.c_uint64),
        ("message", ctypes.c_char_p),
        ("message_size", ctypes.c_size_t),
        ("fault_address", ctypes.c_void_p),
        ("fault_code", ctypes.c_void_p),
        ("fault_block", ctypes.c_uint * 3),
        ("fault_thread", ctypes.c_uint),
    )


class _Buffer:
    """The device's copy of one storage for one launch."""

    def __init__(self, begin: int, size: int) -> None:
        self.begin, self.size, self.region, self.written = begin, size, _Region(), False
        self.names: list[str] = []
        compiler.runtime().emulation_allocate(ctypes.c_size_t(size), ctypes.byref(self.region))
        ctypes.memmove(self.region.data, begin, size)

    def written_outside(self) -> int:
        check = compiler.runtime().emulation_written_outside
        check.restype = ctypes.c_long
        return int(check(ctypes.byref(self.region)))

    def where(self, address: int) -> str:
        """How far outside the buffer an address lies; empty when it is not near."""
        offset = address - self.region.data
        if 0 <= offset < self.size or not self.region.map <= address < self.region.map + self.region.map_bytes:
            return ""
        far = f"{-offset} bytes before" if offset < 0 else f"{offset - self.size} bytes behind"
        return f"{far} the {self.size} bytes of {' and '.join(self.names)}"

    def release(self) -> None:
        compiler.runtime().emulation_release(ctypes.byref(self.region))


class _Memory:
    """The storages whose address a launch may pass: those that were asked for it, as long as they live."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, StorageWeakRef]] = {}

    def note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        begin = torch.UntypedStorage.data_ptr(storage)
        if begin:
            self._known[begin] = storage.nbytes(), StorageWeakRef(storage)

    def holding(self, address: int) -> tuple[int, int]:
        """Begin and size of the storage around an address.

        Raises:
            EmulationError: when no tensor has it, or the one that had it is gone.
        """
        gone = False
        for begin, (size, storage) in self._known.items():
            if begin <= address < begin + size:
                if not storage.expired():
                    return begin, size
                gone = True
        reason = "the tensor it belonged to was freed" if gone else "it belongs to no tensor"
        raise EmulationError(f"a launch passes the address {address:#x}, but {reason}")

    def sweep(self) -> None:
        self._known = {begin: known for begin, known in self._known.items() if not known[1].expired()}


class Entry:
    """One kernel, called as ops/cuda_driver's: `f(grid, block, arguments, shared_bytes, stream, cooperative=...)`."""

    def __init__(self, device: Device, module: compiler.Module, name: str) -> None:
        if name not in module.entries:
            raise EmulationError(f"no entry {name}; the source has {', '.join(module.entries)}")
        self._device, self._module, self.name = device, module, name
        self._parameters = module.parameters(name)
        self._static = module.static_shared(name)
        self.most_dynamic = 0  # bytes of dynamic shared memory that were asked for

    def _check(
        self, grid: Sequence[int], block: Sequence[int], arguments: Sequence[Any], shared: int, cooperative: bool
    ) -> None:
        if len(arguments) != len(self._parameters):
            raise EmulationError(f"{self.name} has {len(self._parameters)} parameters, {len(arguments)} were passed")
        if not all(1 <= n <= limit for n, limit in zip(grid, _LIMITS, strict=False)):
            raise EmulationError(f"{self.name}: no grid can be {tuple(grid)}")
        if grid[0] % self._module.cluster:
            raise EmulationError(f"{self.name}: a grid of {tuple(grid)} is no whole clusters of {self._module.cluster}")
        if not 1 <= self._module.cluster <= _CLUSTER:
            raise EmulationError(f"{self.name}: no cluster has {self._module.cluster} blocks")
        if not 1 <= np.prod(block) <= 1024 or any(n < 1 for n in block) or (*block, 1, 1)[2] > 64:
            raise EmulationError(f"{self.name}: no block can be {tuple(block)}")
        if cooperative and (np.prod(grid) > min(self._device.sm_count(0), _COOPERATIVE) or self._module.cluster > 1):
            raise EmulationError(f"{self.name}: not all of {tuple(grid)} blocks run at the same time")
        used = shared + self._static
        arch = self._device.arch(0)
        if not 0 <= shared <= used <= shared_memory.of_a_block(arch):
            raise EmulationError(f"{self.name}: no block of sm_{arch} has {used} bytes of shared memory")
        if used > shared_memory.WITHOUT_ASKING and shared > self.most_dynamic:
            raise EmulationError(f"{self.name}: {shared} bytes of dynamic shared memory were not asked for")
        for number, (kind, value) in enumerate(zip(self._parameters, arguments, strict=True)):
            if kind[0] in "pc":
                fits, expected = type(value) is int, "an address as int"
            else:
                dtype = getattr(value, "dtype", None)
                fits, expected = dtype is not None and f"{dtype.kind}{dtype.itemsize}" == kind, f"a numpy scalar {kind}"
            if not fits:
                raise EmulationError(f"{self.name}: argument {number} is {value!r}; expected {expected}")

    def __call__(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        arguments: Sequence[Any],
        shared: int = 0,
        stream: int = 0,
        *,
        cooperative: bool = False,
    ) -> None:
        """Run to the end. The tensors' own memory is written only when nothing was wrong.

        Raises:
            EmulationError: for a wrong argument, an access outside a tensor, a barrier that not all threads reach …
        """
        self._check(grid, block, arguments, shared, cooperative)
        device = self._device
        buffers: dict[int, _Buffer] = {}
        values: list[Any] = []  # what the pointers in `argv` point to
        try:
            for number, (kind, value) in enumerate(zip(self._parameters, arguments, strict=True)):
                if kind[0] not in "pc":
                    values.append(np.array(value))
                    for field, (of, _) in (value.dtype.fields or {}).items():  # a struct's addresses
                        if of.base == np.uint64:
                            table, written = values[-1][field], field not in _READ
                            for place, address in np.ndenumerate(table):
                                table[place] = self._copied(buffers, int(address), f"{field}{[*place[1:]]}", written)
                    continue
                name = f"argument {number}"
                values.append(np.array(self._copied(buffers, value, name, kind[0] == "p"), dtype=np.uint64))
            self._run(grid, block, values, shared, cooperative, list(buffers.values()))
            for buffer in buffers.values():
                if offset := buffer.written_outside():
                    raise EmulationError(f"{self.name} writes {buffer.where(buffer.region.data + offset)}")
            for buffer in buffers.values():
                if buffer.written:
                    ctypes.memmove(buffer.begin, buffer.region.data, buffer.size)
        finally:
            for buffer in buffers.values():
                buffer.release()
        device.memory.sweep()
        device.launches[self.name] += 1
        with _disable_current_modes():  # nobody who watches the caller sees this
            tickets, exchange = bool(device.counters.any()), device.exchanged is None or _ready(device.exchanged)
        if tickets:
            raise EmulationError(f"{self.name} leaves a ticket that is not zero")
        if not exchange:
            raise EmulationError(f"{self.name} leaves the exchange so that the next launch finds what is not its own")
        for watcher in tuple(cuda_driver.watchers):
            watcher(self, grid, block, arguments, shared, stream, cooperative)

    def addresses(self, cooperative: bool) -> tuple[int, int, int, int]:
        """None: it is launched from Python alone."""
        return 0, 0, 0, 0

    def _copied(self, buffers: dict[int, _Buffer], address: int, name: str, written: bool) -> int:
        """Where the storage at this address lies for the launch. The null pointer stays what it is."""
        if address == 0:
            return 0
        begin, size = self._device.memory.holding(address)
        if begin not in buffers:
            buffers[begin] = _Buffer(begin, size)
        buffer = buffers[begin]
        buffer.names.append(name)
        buffer.written |= written
        return int(buffer.region.data) + address - begin

    def _run(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        values: list[Any],
        shared: int,
        cooperative: bool,
        buffers: list[_Buffer],
    ) -> None:
        library = self._module.library
        argv = (ctypes.c_void_p * len(values))(*(value.ctypes.data for value in values))
        message = ctypes.create_string_buffer(512)
        launch = _Launch(
            entry=ctypes.cast(getattr(library, f"emulated_{self.name}"), ctypes.c_void_p).value,
            arguments=ctypes.addressof(argv),
            grid=(*grid, 1, 1)[:3],
            block=(*block, 1, 1)[:3],
            cluster=int(np.prod(grid)) if cooperative else self._module.cluster,
            cooperative=cooperative,
            dynamic_bytes=shared,
            shared_begin=library.emulated_shared_begin(),
            shared_end=library.emulated_shared_end(),
            seed=next(self._device.seeds),
            message=ctypes.addressof(message),
            message_size=len(message),
        )
        status = compiler.runtime().emulation_launch(ctypes.byref(launch))
        if status == 0:
            return
        if status < 0:
            raise EmulationError(f"{self.name}: {message.value.decode()}")
        address = launch.fault_address or 0
        near = next((text for buffer in buffers if (text := buffer.where(address))), "")
        if signal.Signals(status) in (signal.SIGSEGV, signal.SIGBUS):
            what = f"reads or writes {near}" if near else f"reads or writes at {address:#x}, where no tensor is"
        elif signal.Signals(status) == signal.SIGFPE:
            what = "divides an integer by zero"
        else:
            what = "leaves a local or shared array, or reads or writes a vector at a misaligned address"
        line = self._module.line_at(launch.fault_code or 0)
        at = f"block {tuple(launch.fault_block)}, thread {launch.fault_thread}"
        raise EmulationError(f"{self.name} {what} ({at})" + (f", near: {line}" if line else ""))


def _ready(exchange: torch.Tensor) -> bool:
    """Whether nobody is counted as leaving, and the half that the next launch takes holds nothing yet."""
    state, halves = exchange[: nvrtc.EXCHANGE_STATE], exchange[nvrtc.EXCHANGE_STATE :].view(2, -1)
    return not state[0] and bool((halves[int(state[1]) % 2] == nvrtc.ABSENT).all())


class Device:
    """What stands in for the GPU while the `emulated` fixture is active. `launches` counts per kernel entry."""

    def __init__(self) -> None:
        self.memory = _Memory()
        self.launches: Counter[str] = Counter()
        self.counters = torch.zeros(1024, dtype=torch.int32)
        self.exchanged: torch.Tensor | None = None
        self.seeds = itertools.count(1)
        self._sm_count, self._arch = 3, 90

    def use(self, *, sm_count: int | None = None, arch: int | None = None, seed: int | None = None) -> None:
        """Be a device of this size from here on. With few SMs small tensors take the paths of many blocks and passes."""
        self._sm_count = self._sm_count if sm_count is None else sm_count
        self._arch = self._arch if arch is None else arch
        self.seeds = self.seeds if seed is None else itertools.count(seed)
        forget_launches()

    def sm_count(self, device: int) -> int:
        return self._sm_count

    def arch(self, device: int) -> int:
        return self._arch

    def tickets(self, device: torch.device) -> int:
        return self.counters.data_ptr()

    def exchange(self, device: torch.device, half: int) -> int:
        """As nvrtc's, of one stream."""
        if self.exchanged is None or len(self.exchanged) != nvrtc.EXCHANGE_STATE + 2 * half:
            (self.exchanged,) = nvrtc.new_exchanges(1, half)
            self.memory.note(self.exchanged)
        return self.exchanged.data_ptr()

    def keeps(self, address: int) -> bool:
        kept = [t for t in (self.counters, self.exchanged) if t is not None]
        return any(0 <= address - torch.Tensor.data_ptr(t) < t.untyped_storage().nbytes() for t in kept)

    def function(
        self, name: str, entry: str, defines: tuple[tuple[str, int], ...], device: int, most_dynamic: int = 0
    ) -> Entry:
        found = Entry(self, compiler.module(name, tuple(sorted(defines))), entry)
        found.most_dynamic = most_dynamic
        return found

    def compiled(self, source: str, entry: str, defines: Mapping[str, int] | None = None) -> Entry:
        """A kernel from its text: for tests of kernels that are no file."""
        return Entry(self, compiler.Module(source, defines or {}), entry)


def forget_launches() -> None:
    """Drop what operations cached for the device they saw before."""
    for name, module in list(sys.modules.items()):
        if name.startswith("advisor.ops."):
            for value in list(vars(module).values()):
                if callable(getattr(value, "cache_clear", None)):
                    value.cache_clear()


def _boxes(
    x: torch.Tensor,
    channels: int,
    columns: int,
    rows: int,
    groups: int = 1,
    parts: Sequence[tuple[int, int]] = ((0, 0),),
    step: int = 1,
) -> Any:
    """What tensor_map.cuh's twin takes for maps."""
    n, c, h, w = x.shape
    words = np.zeros((len(parts), 32), dtype=np.int32)
    for at, (row, column) in enumerate(parts):
        words[at, :11] = c // groups, groups, w, h, n, channels, columns, rows, step, column, row
    return words.reshape(-1).view(np.dtype((np.void, 128 * len(parts))))


def _poisoned(make: Any) -> Any:
    """`make`, but what it leaves uninitialised is NaN, so that an element that no kernel writes is seen."""

    def empty(*args: Any, **kwargs: Any) -> Any:
        tensor = make(*args, **kwargs)
        if type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.numel():
            ctypes.memset(tensor.untyped_storage().data_ptr(), 0xFF, tensor.untyped_storage().nbytes())
        return tensor

    return empty


@contextmanager
def only_what_wins() -> Iterator[None]:
    """Inside, a call runs the kernels where they win, though `emulated` has them run everywhere.

    Undone at its own end: with the `monkeypatch` that `emulated` itself uses, it would be undone behind the end of that fixture's
    forcing, and leave all kernels forced for the tests that follow.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "_forced", 0)
        yield


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`advisor.ops` runs its kernels on CPU tensors, emulated, whether they win or not. Yields the `Device`: 3 SMs of sm_90."""
    if compiler.COMPILER is None:
        pytest.skip("kernels are emulated with a C++ compiler, and there is none")
    from torch._dynamo.trace_rules import get_torch_obj_rule_map
    from torch.utils._device import _device_constructors

    device = Device()
    address = torch.Tensor.data_ptr

    def data_ptr(tensor: torch.Tensor) -> int:
        found = address(tensor)
        device.memory.note(tensor)
        return found

    forget_launches()
    get_torch_obj_rule_map()  # Dynamo looks torch's functions up once a process: not while stand-ins are in their place
    _device_constructors()  # nor those that `with torch.device(...)` means
    monkeypatch.setattr(torch.Tensor, "data_ptr", data_ptr)
    makers = ((torch, ("empty", "empty_like", "empty_strided")), (torch.Tensor, ("new_empty", "new_empty_strided")))
    for owner, name in ((owner, name) for owner, names in makers for name in names):
        monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))
    monkeypatch.setattr(nvrtc, "unavailable", lambda: "")
    monkeypatch.setattr(nvrtc, "on_device", nvrtc.out_of_reach)
    monkeypatch.setattr(nvrtc, "refused", lambda name: "")
    monkeypatch.setattr(nvrtc, "stream", lambda device: None)
    for name in ("function", "sm_count", "arch", "tickets", "exchange", "keeps"):
        monkeypatch.setattr(nvrtc, name, getattr(device, name))
    monkeypatch.setattr(tensor_map, "unavailable", lambda: "")
    monkeypatch.setattr(tensor_map, "boxes", _boxes)
    with dispatch.everything():
        yield device
    monkeypatch.undo()
    forget_launches()
