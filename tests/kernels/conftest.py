"""Fixtures for the kernels' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from emulation.device import emulated

from advisor.ops import catalog, dispatch

__all__ = ["emulated"]


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if no family had a measurement on file."""
    for family in catalog.FAMILIES:
        monkeypatch.setattr(family.spec, "wins", lambda *_, **__: dispatch.UNMEASURED)
    _forget_refusals()
    yield
    _forget_refusals()


def _forget_refusals() -> None:
    for family in catalog.FAMILIES:
        for member in vars(family.module("api")).values():
            if callable(clear := getattr(member, "cache_clear", None)):
                clear()
