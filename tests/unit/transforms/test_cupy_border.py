"""What goes between CuPy and PyTorch by way of the host stays on the device, where nothing else sees it. CuPy's arrays are NumPy's here."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from advisor.loop.training import Training
from advisor.transforms import cupy_border
from advisor.transforms.border import TO_CUPY, TO_TORCH
from advisor.transforms.cupy_border import CupyBorder, made

Hook = Callable[[], None]
HOST: list[str] = []  # ways by the host
DEVICE = torch.device("cpu")
cupy = types.ModuleType("cupy")


class Array(np.ndarray):
    """Stands for `cupy.ndarray`."""

    def get(self) -> np.ndarray:
        HOST.append("down")
        return np.array(self)


def asarray(value: Any, dtype: Any = None) -> Array:
    if type(value) is np.ndarray:
        HOST.append("up")
    return np.array(value, dtype=dtype).view(Array)


@pytest.fixture(autouse=True)
def _cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    cupy.ndarray, cupy.asarray, cupy.array = Array, asarray, asarray
    cupy.asnumpy = lambda value: value.get()
    cupy.from_dlpack = lambda tensor: np.from_dlpack(tensor).view(Array)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(cupy_border, "on_device", lambda tensor: True)
    plain = torch._C._nn._parse_to
    monkeypatch.setattr(torch._C._nn, "_parse_to", lambda *a, **k: (torch.device("cuda"), *plain(*a, **k)[1:]))
    yield
    HOST.clear()


def source() -> Array:
    return np.arange(12.0, dtype="f4").reshape(3, 4).view(Array)


def at_once(hook: Hook) -> Any:
    found = torch.from_numpy(cupy.asnumpy(source())).float().to(DEVICE)
    hook()
    return found


def by_names(hook: Hook) -> Any:
    x = source()
    host = x.get()
    tensor = torch.from_numpy(host)
    found = tensor.to(DEVICE, non_blocking=True)
    hook()
    return found


def as_tensor(hook: Hook) -> Any:
    found = torch.as_tensor(cupy.asnumpy(source()), dtype=torch.float64)
    hook()
    return found


def back(hook: Hook) -> Any:
    tensor = torch.ones(2, 3)
    found = cupy.asarray(tensor.detach().cpu().numpy(), dtype="f8")
    hook()
    return found


def helper() -> Any:
    return torch.from_numpy(cupy.asnumpy(source())).to(DEVICE)


def in_a_function(hook: Hook) -> Any:
    found = helper()
    hook()
    return found


def printed(hook: Hook) -> Any:
    host = cupy.asnumpy(source())
    found = torch.from_numpy(host).to(DEVICE)
    hook()
    return found, host.sum()


def kept_on_host(hook: Hook) -> Any:
    found = torch.from_numpy(cupy.asnumpy(source()))
    hook()
    return found


def two_on_a_line(hook: Hook) -> Any:
    found = torch.from_numpy(cupy.asnumpy(source())).to(DEVICE), cupy.asnumpy(source())
    hook()
    return found


def changed(step: Callable[[Hook], Any]) -> tuple[Any, Any]:
    """A step's results before the change and with it; everything is as before behind it."""
    before = dict(vars(cupy)), torch.from_numpy, torch.as_tensor, dict(vars(Array))
    change, training, undo = CupyBorder(), Training(device=DEVICE), []

    def hook() -> None:
        if change.match(training, {}).applies:
            undo.append(change.apply(training, {}))

    plain = step(hook)
    HOST.clear()
    try:
        found = step(lambda: None)
    finally:
        for each in undo:
            each.run()
    assert (dict(vars(cupy)), torch.from_numpy, torch.as_tensor, dict(vars(Array))) == before
    assert "cpu" not in vars(torch.Tensor)
    return plain, found


@pytest.mark.parametrize("step", [at_once, by_names, in_a_function, back])
def test_what_nobody_sees_stays_on_the_device(step: Callable[[Hook], Any]) -> None:
    plain, found = changed(step)
    assert HOST == []
    assert made[TO_CUPY if step is back else TO_TORCH] == 1
    assert (type(found), found.dtype) == (type(plain), plain.dtype)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(plain))
    assert CupyBorder().effect(Training(device=DEVICE), None, None).passed


@pytest.mark.parametrize("step", [as_tensor, printed, kept_on_host, two_on_a_line])
def test_what_somebody_may_see_goes_by_the_host(step: Callable[[Hook], Any]) -> None:
    plain, found = changed(step)
    assert "down" in HOST
    for a, b in zip(plain, found, strict=True):
        np.testing.assert_array_equal(np.asarray(b), np.asarray(a))


def test_a_copy_is_a_copy() -> None:
    x = source()

    def step(hook: Hook) -> Any:
        found = torch.from_numpy(cupy.asnumpy(x)).to(DEVICE)
        hook()
        return found

    plain, found = changed(step)
    x += 1
    np.testing.assert_array_equal(found.numpy(), plain.numpy())


def test_what_numpy_refuses_is_refused_as_ever() -> None:
    def step(hook: Hook) -> Any:
        tensor = torch.ones(2, requires_grad=len(calls) > 0)
        calls.append(1)
        found = cupy.asarray(tensor.cpu().numpy())
        hook()
        return found

    calls: list[int] = []
    with pytest.raises(RuntimeError, match="requires grad"):
        changed(step)


def test_without_cupy_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "cupy")
    assert "not imported CuPy" in CupyBorder().match(Training(device=DEVICE), {}).reason
