"""A fault planted in a kernel's source, and whether the checks of `advisor kernels verify` still pass with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from advisor.ops import sources, verify
from advisor.ops.family import Case, Family
from emulation import compiler


@contextmanager
def planted(monkeypatch: pytest.MonkeyPatch, before: str, after: str) -> Iterator[None]:
    """Inside, every source that is compiled has `after` in place of `before`.

    Call it under the fixture `emulated`.

    Raises:
        AssertionError: at the end, when no compiled source held `before`, so that nothing was planted.
    """
    whole = sources.inlined
    found: list[bool] = []

    def inlined(*where: Path) -> str:
        text = whole(*where)
        found.append(before in text)
        return text.replace(before, after)

    with monkeypatch.context() as patch:
        patch.setattr(sources, "inlined", inlined)
        compiler.module.cache_clear()
        try:
            yield
        finally:
            compiler.module.cache_clear()
    assert any(found)


def passes_with(monkeypatch: pytest.MonkeyPatch, family: Family, case: Case, before: str, after: str) -> bool:
    """Whether `case` passes under the emulator with `before` replaced by `after` in every source it compiles.

    Call it under the fixture `emulated`. A fault that the emulator itself stops at counts as found.

    Raises:
        AssertionError: when no compiled source holds `before`, so that nothing was planted.
    """
    with planted(monkeypatch, before, after):
        try:
            row: dict[str, Any] = verify.check(family, case, "cpu")
        except compiler.EmulationError:
            return False
    return bool(row["passed"])
