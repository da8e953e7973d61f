"""Parts of cupyx that a script imports behind CuPy are seen, and calls of them are made in each replayed step."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import stub_cupy
from test_cupy_replay import numbers, replayed

from advisor.cupy_loops.replay.recorder import REPLAY
from advisor.profiling.inside.late_modules import LateModules


def test_a_part_of_cupyx_that_is_imported_later_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A PDE's loop takes `laplace` from cupyx behind `import cupy`, which is when calls are wrapped."""
    part = tmp_path / "cupyx" / "scipy" / "ndimage"
    part.mkdir(parents=True)
    for folder in (part.parents[1], part.parents[0]):
        (folder / "__init__.py").write_text("")
    (part / "_filters.py").write_text("def laplace(x):\n    return x[2:] - 2 * x[1:-1] + x[:-2]\n")
    (part / "__init__.py").write_text("from cupyx.scipy.ndimage._filters import laplace\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    script = ModuleType("script")
    monkeypatch.setitem(sys.modules, "script", script)
    text = """
from cupyx.scipy.ndimage import laplace
import cupyx.scipy.ndimage
def step(u):
    return cupyx.scipy.ndimage.laplace(u)
"""

    def heat(cp: Any, steps: int) -> list[Any]:
        exec(text, vars(script))
        rng, u = np.random.default_rng(0), cp.array(np.linspace(0.0, 1.0, 33) ** 2)
        for _ in range(steps):
            source = cp.array(rng.normal(size=31))
            v = script.laplace(u) + 0.1 * script.step(u)
            u[1:-1] += 0.1 * v + 0.01 * source * v.sum()
        return [u]

    plain = numbers(heat(stub_cupy.module(), 60))
    for name in [name for name in sys.modules if name.split(".")[0] == "cupyx"]:
        monkeypatch.delitem(sys.modules, name)
    found, recorder = replayed(heat, 60)
    for name in [name for name in sys.modules if name.split(".")[0] == "cupyx"]:
        monkeypatch.delitem(sys.modules, name)
    np.testing.assert_allclose(found[0], plain[0], rtol=1e-12)
    assert recorder.phase == REPLAY, recorder.why
    assert recorder.program is not None
    named = {entry.name: entry.how for entry in recorder.program.entries}
    assert named["cupyx.scipy.ndimage.laplace"] == "made"
    assert not [finder for finder in sys.meta_path if isinstance(finder, LateModules)]
