"""Test suites of their own, in folders of their own, whose steps are made up: nothing is timed and no torch is needed."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu_profile
import pytest

from advisor.testing.measured import Measured

REPO = Path(__file__).resolve().parents[2]
# The plugin by its module, whether or not an installation has registered it too.
PLUGIN = ("-p", "no:advisor", "-p", "advisor.testing.plugin", "-p", "no:cacheprovider", "-p", "no:randomly")

Run = Callable[..., pytest.RunResult]


def made_up(self: Any, step: int, *rest: Any) -> Measured:
    """In place of `Perf.measure_here`: a step on a GPU with `step` calls of an addition, and nothing else that varies."""
    profile = gpu_profile.changed(kernels=(gpu_profile.CONV, replace(gpu_profile.ADD, calls=float(step))))
    if os.environ.get("SLOWER") and profile.step_us is not None:
        profile = replace(profile, step_us=replace(profile.step_us, median=2000.0))
    if os.environ.get("ELSEWHERE"):
        profile = replace(profile, environment=replace(profile.environment, gpu_uuid="GPU-2"))
    if os.environ.get("ON_CPU"):
        profile = replace(profile, environment=replace(profile.environment, device="cpu"))
    return Measured(profile, label=rest[-1], seconds=0.1)


# The same in a process of its own, which in the end must not have loaded torch.
CONFTEST = """
import sys
import pytest
sys.path[:0] = {paths!r}
import suites
from advisor.testing.perf import Perf

Perf.measure_here = suites.made_up

@pytest.hookimpl(trylast=True)
def pytest_sessionfinish():
    assert not {{"torch", "cupy"}} & set(sys.modules)
"""
