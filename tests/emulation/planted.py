"""A fault planted in a kernel's source, and whether the checks of `advisor kernels verify` still pass with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from advisor.ops import sources, verify
from advisor.ops.family import Case, Family
from emulation import compiler


def passes_with(monkeypatch: pytest.MonkeyPatch, family: Family, case: Case, before: str, after: str) -> bool:
    """Whether `case` passes under the emulator with `before` replaced by `after` in every source it compiles.

    Call it under the fixture `emulated`. A fault that the emulator itself stops at counts as found.

    Raises:
        AssertionError: when no compiled source holds `before`, so that nothing was planted.
    """
    whole = sources.inlined
    planted: list[bool] = []

    def inlined(*where: Path) -> str:
        text = whole(*where)
        planted.append(before in text)
        return text.replace(before, after)

    monkeypatch.setattr(sources, "inlined", inlined)
    compiler.module.cache_clear()
    try:
        row: dict[str, Any] = verify.check(family, case, "cpu")
        passed = bool(row["passed"])
    except compiler.EmulationError:
        passed = False
    finally:
        compiler.module.cache_clear()
    assert any(planted)
    return passed
