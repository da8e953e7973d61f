"""Launches compiled kernels through the driver's own call: CuPy compiles and loads them, but knows no launch attributes.

What one needs is laid out once a kernel, and each launch writes its values over the last one's: 3 to 5 us less of the host than CuPy's
launch (docs/notes/host-cost-of-a-call.md).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from threading import Lock
from typing import Any, NoReturn

import numpy as np

from advisor.core.errors import AdvisorError

# Of a launch in a thread whose current device is another than the kernel's, or that has none yet: CUDA_ERROR_INVALID_CONTEXT, _INVALID_HANDLE.
_ELSEWHERE = (201, 400)
# CUlaunchConfig: grid, block, bytes of dynamic shared memory, stream, attributes and their number.
CONFIG = struct.Struct("@7IPPI0P")
# CUlaunchAttribute: what it is, and a union of 64 bytes that begins with its value.
_ATTRIBUTE = struct.Struct("@i4xi60x")
# CU_LAUNCH_ATTRIBUTE_COOPERATIVE and CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, switched on.
_COOPERATIVE, _OVERLAPPING = (ctypes.create_string_buffer(_ATTRIBUTE.pack(number, 1)) for number in (2, 6))

# Told of each launch that went well, in its thread: while a call is recorded (ops/sites).
watchers: list[Callable[..., None]] = []


@lru_cache(maxsize=1)
def load() -> Any:
    """The CUDA driver's library.

    Raises:
        OSError: when this machine has none.
    """
    return ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")


def unavailable() -> str:
    """Why the driver here launches nothing; empty when it does."""
    try:
        return "" if hasattr(load(), "cuLaunchKernelEx") else "the CUDA driver is older than 11.8"
    except OSError as error:
        return f"the CUDA driver's library cannot be loaded ({error})"


class Kernel:
    """A compiled kernel: call as `f(grid, block, arguments, shared_bytes, stream)`, from any thread.

    Arguments are addresses and numbers, or structs as numpy arrays or voids, which stand in the same places from call to call.

    Attributes:
        types: of the arguments, a letter each as the module `struct` has them, an address's for a struct too.
    """

    def __init__(self, function: Any, name: str, types: str, *, device: int = 0, overlapping: bool = False) -> None:
        """`function`: CuPy's, loaded on `device`; launches need not find that current.

        `overlapping`: the source waits for the kernel ahead itself (include/overlap.cuh), so its blocks may come before that has ended.
        """
        self.name, self.types, self.device = name, types, device
        self._loaded = function  # as long as it lives, the module stays on the device
        self._function = ctypes.c_void_p(function.ptr)
        # Address and number of its attributes, launched cooperatively or not.
        self._attributes = {
            True: (ctypes.addressof(_COOPERATIVE), 1),
            False: (ctypes.addressof(_OVERLAPPING), 1) if overlapping else (0, 0),
        }
        self._config = ctypes.create_string_buffer(CONFIG.size)
        self._lock = Lock()  # two threads would write over each other's values
        self._layout: struct.Struct | None = None
        self._blobs: tuple[int, ...] = ()
        self._launch = load().cuLaunchKernelEx

    def _lay_out(self, arguments: Sequence[Any]) -> struct.Struct:
        letters = [
            f"{argument.nbytes}s" if isinstance(argument, (np.void, np.ndarray)) else letter
            for argument, letter in zip(arguments, self.types, strict=True)
        ]
        self._blobs = tuple(i for i, letter in enumerate(letters) if letter.endswith("s"))
        layout = self._layout = struct.Struct("@" + "".join(letters))
        self._values = ctypes.create_string_buffer(max(layout.size, 1))
        base = ctypes.addressof(self._values)
        # Native alignment pads ahead of a value, never behind the last: its own size back from the end it begins.
        ends = [struct.calcsize("@" + "".join(letters[: i + 1])) for i in range(len(letters))]
        places = [base + end - struct.calcsize("@" + letter) for end, letter in zip(ends, letters, strict=True)]
        self._places = (ctypes.c_void_p * max(len(places), 1))(*places)
        return layout

    def __call__(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        arguments: Sequence[Any],
        shared_bytes: int,
        stream: int,
        *,
        cooperative: bool = False,
    ) -> None:
        """Launch on `stream`, the address of one. `cooperative`: all blocks run at once, or the driver refuses the launch.

        Raises:
            AdvisorError: when the driver refuses the launch; its reason is shown.
        """
        with self._lock:
            layout = self._layout or self._lay_out(arguments)
            packed = arguments
            if self._blobs:
                packed = list(arguments)
                for place in self._blobs:
                    packed[place] = packed[place].tobytes()
            layout.pack_into(self._values, 0, *packed)
            CONFIG.pack_into(self._config, 0, *grid, *block, shared_bytes, stream, *self._attributes[cooperative])
            status = self._launch(self._config, self._function, self._places, None)
            if status in _ELSEWHERE:
                with self.current():
                    status = self._launch(self._config, self._function, self._places, None)
        if status:
            self.refuse(status)
        if watchers:
            for watcher in tuple(watchers):  # another thread's may go meanwhile, and the next one would not be told
                watcher(self, grid, block, arguments, shared_bytes, stream, cooperative)

    def current(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the kernel's device is current in this thread."""
        return _current(self.device)

    def refuse(self, status: int) -> NoReturn:
        """Raise what the driver said."""
        raise AdvisorError(f"the driver refuses to launch {self.name}: {reason(status)}", fix="Run `advisor doctor`.")

    def addresses(self, cooperative: bool) -> tuple[int, int, int, int]:
        """Of the driver's launch, of the kernel and of its attributes, and how many those are: for who launches without Python."""
        attributes, number = self._attributes[cooperative]
        return ctypes.cast(self._launch, ctypes.c_void_p).value or 0, self._function.value or 0, attributes, number


@contextlib.contextmanager
def _current(device: int) -> Iterator[None]:
    """Inside, this thread's current context is the device's, whatever `torch.cuda.set_device` said.

    Scripts that only move a model to `cuda:1` leave device 0 current; and a thread of autograd's may launch a kernel before it has called
    the runtime.
    """
    from cupy.cuda import runtime

    before = runtime.getDevice()
    runtime.setDevice(device)
    try:
        yield
    finally:
        runtime.setDevice(before)


def reason(status: int) -> str:
    text = ctypes.c_char_p()
    load().cuGetErrorString(ctypes.c_int(status), ctypes.byref(text))
    return f"{(text.value or b'unknown').decode()} ({status})"
