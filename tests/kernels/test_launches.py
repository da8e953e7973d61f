"""Launches at the sizes that are benchmarked: what no emulator has the memory for."""

from __future__ import annotations

import re
from types import SimpleNamespace

import launches
import pytest

from advisor.ops import catalog, dispatch
from advisor.ops.family import Case, Family


def errors(device: launches.Device, family: Family, case: Case) -> list[str]:
    """What was raised in the place of a launch."""
    return [line for line in launches.traced(device, family, case) if line.split(":")[0].lower().endswith("error")]


# Casts are an operation of PyTorch's dispatcher where something looks on (ops/casts/api.py), as `launches` does: it has a fake kernel.
LAUNCHING = [family for family in catalog.FAMILIES if family.id != "casts"]


@pytest.mark.parametrize("family", LAUNCHING, ids=lambda family: family.id)
def test_every_launch_has_what_its_kernel_takes(family: Family) -> None:
    with launches.device() as device, dispatch.everything():
        for case in family.benchmark:
            before = device.launched
            assert not errors(device, family, case), case.label
            assert device.launched > before or not case.kind, case.label


@pytest.mark.parametrize("vectors", [2**31, 0.5])
def test_a_number_that_is_none_of_the_kernels_is_seen(monkeypatch: pytest.MonkeyPatch, vectors: float) -> None:
    family = catalog.get("padding")
    geometry = SimpleNamespace(column_tiles=1, channel_tiles=1, row_tiles=1, block=(32, 1, 1), vectors=vectors)
    with launches.device() as device, dispatch.everything():
        monkeypatch.setattr(family.module("cuda"), "geometry", lambda *_: geometry)
        assert errors(device, family, family.verification[0])


def test_addresses_are_told_by_the_tensors_that_have_them() -> None:
    family = catalog.get("bias_add")
    with launches.device() as device, dispatch.everything():
        told = launches.traced(device, family, family.benchmark[-1])  # with a residual
    forward, backward = (line.partition(": ")[2] for line in told if line.startswith("bias_add/"))
    assert re.findall(r"(\w+)\[", forward) == ["argument0", "argument1", "argument2", "scratch0"]
    assert backward.startswith("above0[")
    assert " tickets " in backward
