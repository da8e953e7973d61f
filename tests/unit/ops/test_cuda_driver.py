"""What a launch hands to the driver, read back by the driver's own definitions (cuda.h)."""

from __future__ import annotations

import ctypes
import sys
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from advisor.core.errors import AdvisorError
from advisor.ops import cuda_driver


class Attribute(ctypes.Structure):  # CUlaunchAttribute
    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint * 16))


class Config(ctypes.Structure):  # CUlaunchConfig
    _fields_ = (
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("count", ctypes.c_uint),
    )


@dataclass
class Driver:
    """Reads a launch's parameters as the kernel's signature has them."""

    signature: tuple[Any, ...] = ()
    statuses: list[int] = field(default_factory=list)
    launches: list[tuple[Any, ...]] = field(default_factory=list)

    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: Any, extra: None) -> int:
        if self.statuses and (status := self.statuses.pop(0)):
            return status
        given = Config.from_buffer_copy(config)
        at = [(given.attributes[i].id, given.attributes[i].value[0]) for i in range(given.count)]
        values = tuple(
            kind.from_address(parameters[i]).value if kind is not Blob else bytes(Blob.from_address(parameters[i]))
            for i, kind in enumerate(self.signature)
        )
        sizes = (given.gx, given.gy, given.gz), (given.bx, given.by, given.bz), given.shared
        self.launches.append((function.value, *sizes, given.stream, at, values))
        return 0

    def cuGetErrorString(self, status: Any, text: Any) -> int:
        ctypes.cast(text, ctypes.POINTER(ctypes.c_char_p))[0] = b"out of luck"
        return 0


Blob = ctypes.c_ubyte * 128
GRID, BLOCK = (3, 2, 1), (128, 1, 1)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()
    monkeypatch.setattr(cuda_driver, "load", lambda: found)
    return found


def kernel(types: str = "", *, overlapping: bool = False) -> cuda_driver.Kernel:
    return cuda_driver.Kernel(SimpleNamespace(ptr=0x1234), "sums", types, overlapping=overlapping)


def test_the_driver_finds_every_value_at_its_place(cuda: Driver) -> None:
    cuda.signature = (
        ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float, Blob, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_double,
    )  # fmt: skip
    made = np.arange(128, dtype=np.uint8)
    run = kernel("PiqfPPId")
    for address, number in ((2**48, -5), (2**47 + 1, 7)):
        blob = made.view(np.dtype((np.void, 128)))[0] if number < 0 else made.reshape(1, 128)
        values = (address, number, 2**40, 0.5, blob, 16, 2**31, 0.1)
        run(GRID, BLOCK, values, 70_000, 0x77)
        expected = (address, number, 2**40, 0.5, made.tobytes(), 16, 2**31, 0.1)
        assert cuda.launches[-1] == (0x1234, GRID, BLOCK, 70_000, 0x77, [], expected)


def test_the_default_stream_and_a_null_pointer_are_zero(cuda: Driver) -> None:
    cuda.signature = (ctypes.c_void_p,)
    kernel("P")(GRID, BLOCK, (0,), 0, 0)
    assert cuda.launches == [(0x1234, GRID, BLOCK, 0, None, [], (None,))]


@pytest.mark.parametrize(
    ("overlapping", "cooperative", "attributes"),
    [(False, False, []), (True, False, [(6, 1)]), (False, True, [(2, 1)]), (True, True, [(2, 1)])],
)
def test_how_it_is_launched_is_an_attribute(
    cuda: Driver, overlapping: bool, cooperative: bool, attributes: list[tuple[int, int]]
) -> None:
    kernel(overlapping=overlapping)(GRID, BLOCK, (), 0, 1, cooperative=cooperative)
    assert cuda.launches[0][5] == attributes


def test_threads_do_not_mix_their_values(cuda: Driver) -> None:
    cuda.signature = (ctypes.c_int64,) * 8
    run = kernel("q" * 8)

    def launch(number: int) -> None:
        for _ in range(300):
            run((number, 1, 1), BLOCK, (number,) * 8, number, number)

    threads = [threading.Thread(target=launch, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(cuda.launches) == 1200
    for _, grid, _, shared, stream, _, values in cuda.launches:
        assert {grid[0], shared, stream, *values} == {shared}


def test_every_watcher_is_told_of_a_launch_though_another_thread_s_goes_meanwhile(
    cuda: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(cuda_driver, "watchers", [])

    def leaves(*_: object) -> None:
        cuda_driver.watchers.remove(leaves)

    cuda_driver.watchers += [leaves, lambda launched, *_: told.append(launched.name)]
    kernel()(GRID, BLOCK, (), 0, 1)
    assert told == ["sums"]


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The devices that were current, the present one last."""
    seen = [0]
    runtime = SimpleNamespace(getDevice=lambda: seen[-1], setDevice=seen.append)
    monkeypatch.setitem(sys.modules, "cupy.cuda", SimpleNamespace(runtime=runtime))
    return seen


@pytest.mark.parametrize(
    "status", [201, 400], ids=["a thread without a context", "a script that moved its model to cuda:1"]
)
def test_the_kernels_device_is_made_current_where_it_is_not(cuda: Driver, current: list[int], status: int) -> None:
    cuda.statuses = [status, 0]
    run = cuda_driver.Kernel(SimpleNamespace(ptr=0x1234), "sums", "", device=1)
    run(GRID, BLOCK, (), 0, 1)
    assert (len(cuda.launches), current) == (1, [0, 1, 0])
    run(GRID, BLOCK, (), 0, 1)
    assert (len(cuda.launches), len(current)) == (2, 3)


@pytest.mark.parametrize(("statuses", "number"), [([700], 700), ([201, 201], 201)])
def test_a_refused_launch_is_told_with_the_drivers_reason(
    cuda: Driver, current: list[int], statuses: list[int], number: int
) -> None:
    cuda.statuses = statuses
    with pytest.raises(AdvisorError, match=rf"refuses to launch sums: out of luck \({number}\)"):
        kernel()(GRID, BLOCK, (), 0, 1)
    assert current[-1] == 0


def test_a_machine_whose_driver_cannot_launch_says_so(monkeypatch: pytest.MonkeyPatch, cuda: Driver) -> None:
    assert cuda_driver.unavailable() == ""
    monkeypatch.setattr(cuda_driver, "load", lambda: SimpleNamespace())
    assert cuda_driver.unavailable() == "the CUDA driver is older than 11.8"

    def missing() -> None:
        raise OSError("libcuda.so.1: no such file")

    monkeypatch.setattr(cuda_driver, "load", missing)
    assert cuda_driver.unavailable() == "the CUDA driver's library cannot be loaded (libcuda.so.1: no such file)"
