"""Fixtures for the kernels' tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from emulation.device import emulated

from advisor.ops import catalog, dispatch
from advisor.ops.sites import install, native

__all__ = ["emulated"]

PLANTED = 2  # faults of a file's kernels that every run plants; the others are planted by `make test-long`


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What shows that the tests see faults takes a sixth of their time."""
    seen: Counter[object] = Counter()
    for item in items:
        if "fault_planted" in item.name and item.path.parent.name == "kernels" and not item.get_closest_marker("long"):
            seen[item.path] += 1
            if seen[item.path] > PLANTED:
                item.add_marker(pytest.mark.long)


@pytest.fixture(scope="session")
def sites() -> None:
    """Calls are replayed (ops/sites). Where there is no cache they are compiled for this, for half a minute, and not when tests are collected."""
    if reason := native.unavailable():
        pytest.skip(reason)


@pytest.fixture
def readable_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs call the operations' own functions, and no sites that stand for them (ops/sites)."""
    monkeypatch.setattr(install, "install", lambda graph: None)


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if no family had a measurement on file."""
    for family in catalog.FAMILIES:
        monkeypatch.setattr(family.spec, "wins", lambda *_, **__: dispatch.UNMEASURED)
    _forget_refusals()
    yield
    _forget_refusals()


# Of what CUDA's autocast runs in fp32 (AT_FORALL_FP32 in ATen/autocast_mode.h) that which the CPU's leaves in half precision.
_FP32_ON_CUDA = ("upsample_bilinear2d", "upsample_nearest2d", "_upsample_nearest_exact2d")


@pytest.fixture
def cuda_autocast() -> Iterator[None]:
    """Autocast on the CPU treats upsampling as autocast on CUDA does."""
    library = torch.library.Library("aten", "IMPL")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def widened(name: str) -> None:
        operation = getattr(torch.ops.aten, name).vec

        def run(x: torch.Tensor, *rest: object) -> torch.Tensor:
            with torch._C._ExcludeDispatchKeyGuard(keys):
                result: torch.Tensor = operation(x.float(), *rest)
            return result

        library.impl(f"{name}.vec", run, "AutocastCPU")

    for name in _FP32_ON_CUDA:
        widened(name)
    yield
    library._destroy()


def _forget_refusals() -> None:
    for family in catalog.FAMILIES:
        for member in vars(family.module("api")).values():
            if callable(clear := getattr(member, "cache_clear", None)):
                clear()
