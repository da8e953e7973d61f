"""A CUDA device that is this machine's CPU: launches emulated kernels on CPU tensors in guarded memory."""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import struct
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

from advisor.ops import cuda_driver, dispatch, nvrtc, shared_memory, sources, tensor_map
from emulation import compiler
from emulation.compiler import EmulationError

_CLUSTER = 8  # blocks, without asking for more
_COOPERATIVE = 16  # blocks that the runtime has room for
_LIMITS = (2**31 - 1, 65535, 65535)
CHECKED = os.environ.get("EMULATION_CHECKED") == "1"  # of all tests, whatever they say themselves
_LETTERS = {"i4": "i", "i8": "q", "u4": "I", "f4": "f", "f8": "d"}  # of the module struct, for kinds of numbers
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
        ("spans", ctypes.c_void_p),
        ("own_static", ctypes.c_void_p),
        ("span_count", ctypes.c_uint),
        ("checked", ctypes.c_uint),
    )


class _Span(ctypes.Structure):
    _fields_ = (("begin", ctypes.c_void_p), ("bytes", ctypes.c_size_t), ("given", ctypes.c_void_p))


class _Buffer:
    """The device's copy of one storage for one launch."""

    def __init__(self, begin: int, size: int, checked: bool) -> None:
        self.begin, self.size, self.region, self.written = begin, size, _Region(), False
        self.names: list[str] = []
        self.given = np.full(size, not checked, dtype=np.uint8)  # 1 where a byte is of a tensor that was passed
        compiler.runtime().emulation_allocate(ctypes.c_size_t(size), ctypes.byref(self.region))
        ctypes.memmove(self.region.data, begin, size)

    def written_outside(self) -> int:
        check = compiler.runtime().emulation_written_outside
        check.restype = ctypes.c_long
        return int(check(ctypes.byref(self.region)))

    def where(self, address: int) -> str:
        """How far outside the buffer an address lies; empty when it is not near."""
        offset = address - self.region.data
        if 0 <= offset < self.size and not self.given[offset]:
            return f"the storage of {' and '.join(self.names)}, outside the tensor, {offset} bytes behind its begin"
        if 0 <= offset < self.size or not self.region.map <= address < self.region.map + self.region.map_bytes:
            return ""
        far = f"{-offset} bytes before" if offset < 0 else f"{offset - self.size} bytes behind"
        return f"{far} the {self.size} bytes of {' and '.join(self.names)}"

    def release(self) -> None:
        compiler.runtime().emulation_release(ctypes.byref(self.region))


_View = tuple[int, int, tuple[int, ...], tuple[int, ...]]  # offset in elements, bytes of one, shape, strides


def _end(view: _View) -> int:
    """Bytes from the storage's begin to the view's end."""
    offset, itemsize, shape, strides = view
    return itemsize * (offset + 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)))


class _Memory:
    """The storages whose address a launch may pass: those that were asked for it, as long as they live."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, StorageWeakRef]] = {}
        self._views: dict[int, dict[_View, None]] = {}  # of each storage

    def note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        begin = torch.UntypedStorage.data_ptr(storage)
        if begin:
            known = self._known.get(begin)
            if known is None or known[1].expired():
                self._known[begin] = storage.nbytes(), StorageWeakRef(storage)
                self._views[begin] = {}
            view = (tensor.storage_offset(), tensor.itemsize, tuple(tensor.shape), tensor.stride())
            self._views[begin][view] = None

    def bytes_at(self, begin: int, size: int, address: int) -> np.ndarray[Any, Any]:
        """1 for those bytes of a storage that are of the tensors that begin at an address; of those around it where none does."""
        views = self._views.get(begin, {})
        at = [v for v in views if begin + v[0] * v[1] == address] or [
            v for v in views if begin + v[0] * v[1] < address < begin + _end(v)
        ]
        found = np.zeros(size, dtype=np.uint8)
        for offset, itemsize, shape, strides in at:
            place = found[offset * itemsize :]
            sizes, steps = (*shape, itemsize), (*(s * itemsize for s in strides), 1)
            if all(shape):
                np.lib.stride_tricks.as_strided(place, sizes, steps)[...] = 1
        return found if at else np.ones(size, dtype=np.uint8)

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
        self._views = {begin: views for begin, views in self._views.items() if begin in self._known}


class Entry:
    """One kernel, called as ops/cuda_driver's: `f(grid, block, arguments, shared_bytes, stream, cooperative=...)`."""

    def __init__(self, device: Device, module: compiler.Module, name: str) -> None:
        if name not in module.entries:
            raise EmulationError(f"no entry {name}; the source has {', '.join(module.entries)}")
        self._device, self._module, self.name = device, module, name
        self._parameters = module.parameters(name)
        self.types = "".join(_LETTERS.get(kind, sources.ADDRESS) for kind in self._parameters)
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
                fits = _is_number(value, kind) if dtype is None else f"{dtype.kind}{dtype.itemsize}" == kind
                expected = f"a number {kind}"
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
                    values.append(np.array(value, dtype=None if hasattr(value, "dtype") else kind))
                    for field, (of, _) in (values[-1].dtype.fields or {}).items():  # a struct's addresses
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
            buffers[begin] = _Buffer(begin, size, self._module.checked)
        buffer = buffers[begin]
        buffer.names.append(name)
        buffer.written |= written
        if self._module.checked:
            buffer.given |= self._device.memory.bytes_at(begin, size, address)
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
        spans = (_Span * len(buffers))(*((b.region.data, b.size, b.given.ctypes.data) for b in buffers))
        section = (library.emulated_shared_end() or 0) - (library.emulated_shared_begin() or 0)
        own = np.zeros(section, dtype=np.uint8)
        for begin, size in self._module.shared_arrays(self.name) if self._module.checked else ():
            own[begin : begin + size] = 1
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
            spans=ctypes.addressof(spans),
            own_static=own.ctypes.data,
            span_count=len(buffers),
            checked=self._module.checked,
        )
        status = compiler.runtime().emulation_launch(ctypes.byref(launch))
        if status == 0:
            return
        address = launch.fault_address or 0
        near = next((text for buffer in buffers if (text := buffer.where(address))), "")
        if status < 0:
            what, behind, thread = message.value.decode().partition(" (block")
            if what in ("reads", "writes"):
                what += f" {near}" if near else f" at {address:#x}, where no tensor is"
            line = self._module.line_at(launch.fault_code - 1) if launch.fault_code else ""
            raise EmulationError(f"{self.name}: {what}{behind}{thread}" + (f", near: {line}" if line else ""))
        if signal.Signals(status) in (signal.SIGSEGV, signal.SIGBUS):
            what = f"reads or writes {near}" if near else f"reads or writes at {address:#x}, where no tensor is"
        elif signal.Signals(status) == signal.SIGFPE:
            what = "divides an integer by zero"
        else:
            what = "leaves a local or shared array, or reads or writes a vector at a misaligned address"
        line = self._module.line_at(launch.fault_code or 0)
        at = f"block {tuple(launch.fault_block)}, thread {launch.fault_thread}"
        raise EmulationError(f"{self.name} {what} ({at})" + (f", near: {line}" if line else ""))


def _is_number(value: Any, kind: str) -> bool:
    """Whether a Python number is one of this kind: an int with its size, or a float of any."""
    try:
        struct.pack(_LETTERS[kind], value)
    except (KeyError, struct.error):
        return False
    return isinstance(value, int) or kind[0] == "f"


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
        self.checked = CHECKED

    def use(
        self,
        *,
        sm_count: int | None = None,
        arch: int | None = None,
        seed: int | None = None,
        checked: bool | None = None,
    ) -> None:
        """Be a device of this size from here on. With few SMs small tensors take the paths of many blocks and passes.

        With `checked` every access of a kernel is looked at (include/checker.h), which takes about ten times as long.
        """
        self.checked = self.checked if checked is None else checked
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
        found = Entry(self, compiler.module(name, tuple(sorted(defines)), self.checked), entry)
        found.most_dynamic = most_dynamic
        read = sources.parameters(name, entry, defines)
        if read != found.types:
            raise EmulationError(f"{entry} takes {found.types}, and is read as taking {read}")
        return found

    def compiled(self, source: str, entry: str, defines: Mapping[str, int] | None = None) -> Entry:
        """A kernel from its text: for tests of kernels that are no file."""
        return Entry(self, compiler.Module(source, defines or {}, self.checked), entry)


def forget_launches() -> None:
    """Drop what operations cached for the device they saw before."""
    for name, module in list(sys.modules.items()):
        if name.startswith("advisor.ops."):
            for value in list(vars(module).values()):
                if callable(getattr(value, "cache_clear", None)):
                    value.cache_clear()


def _refused(address: int, made_of: tensor_map.Description) -> str:
    """Why the driver would make no map of this (cuTensorMapEncodeTiled); empty when it would."""
    offset, sizes, strides, box, swizzle = made_of
    if (address + offset) % 16:
        return f"a map's tensor begins at no multiple of 16 bytes: {address + offset:#x}"
    if any(stride % 16 or stride >= 2**40 for stride in strides):
        return f"a map's strides are no multiples of 16 bytes below 2^40: {strides}"
    if not all(1 <= size <= 2**32 for size in sizes):
        return f"no map has sizes of {sizes}"
    if not all(1 <= size <= 256 for size in box):
        return f"no map has a box of {' x '.join(map(str, reversed(box)))}"
    if 2 * box[0] != {2: 64, 3: 128}[swizzle]:
        return f"a line of {2 * box[0]} bytes is not what swizzle {swizzle} swaps"
    return ""


def emulated_boxes(
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
    if 2 * channels not in (64, 128):
        raise EmulationError(f"no swizzle is of lines of {2 * channels} bytes")
    for made_of in tensor_map.descriptions(n, c, h, w, channels, columns, rows, groups, tuple(parts), step):
        if reason := _refused(torch.Tensor.data_ptr(x), made_of):
            raise EmulationError(reason)
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
        patch.setattr(dispatch, "times_forced", 0)
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
    monkeypatch.setattr(tensor_map, "boxes", emulated_boxes)
    with dispatch.everything():
        yield device
    monkeypatch.undo()
    forget_launches()
