"""cudnn.benchmark: a flag, and where it must not be set."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from loops import fingerprint, make_loop

from advisor.core.plan import PlanItem
from advisor.core.profile import KernelRow
from advisor.transforms.cudnn_benchmark import CudnnBenchmark
from advisor.trials.kept import KeptChanges


@pytest.fixture
def loop():
    loop = make_loop(steps=1)
    loop.training.device = torch.device("cuda")  # match looks at flags only
    with mock.patch.object(torch.backends.cudnn, "version", return_value=90000):
        yield loop


def test_the_flag_goes_on_and_comes_back(loop, profile) -> None:
    transform = CudnnBenchmark()
    before = fingerprint(loop)
    assert transform.match(loop.training, {}).sites == ("conv1", "conv2", "conv3")
    undo = transform.apply(loop.training, {})
    assert torch.backends.cudnn.benchmark
    assert "already on" in transform.match(loop.training, {}).reason
    old, new = (profile(KernelRow(name=name, kind="conv")) for name in ("a", "b"))
    assert transform.effect(loop.training, None, None).passed
    assert transform.effect(loop.training, old, new).passed
    assert transform.effect(loop.training, old, old).passed is False
    undo.run()
    assert fingerprint(loop) == before
    assert transform.effect(loop.training, old, new).passed is False


def test_in_a_plan_it_fits_at_the_boundary_at_which_the_layout_does(loop) -> None:
    training, found = loop.training, list(loop.training.roots)
    training.roots.clear()  # as when a script begins
    before = fingerprint(loop)
    kept = KeptChanges(training, [PlanItem(transform=t, status="kept") for t in ("cudnn_benchmark", "channels_last")])
    assert not kept.settle()
    assert not torch.backends.cudnn.benchmark
    training.roots += found
    assert kept.settle()
    assert torch.backends.cudnn.benchmark
    assert kept.left_out == {}
    kept.undo()
    assert fingerprint(loop) == before


def test_not_with_changing_shapes_or_deterministic_algorithms(loop) -> None:
    loop.training.fixed_shapes = False
    assert "shapes change" in CudnnBenchmark().match(loop.training, {}).reason
    loop.training.fixed_shapes = True
    with torch.backends.cudnn.flags(enabled=True, deterministic=True):
        assert "deterministic" in CudnnBenchmark().match(loop.training, {}).reason


def test_a_running_loop_is_no_place_to_try_it() -> None:
    assert not CudnnBenchmark().live  # shapes that have run keep the plan they had, whatever the flag says


def test_not_on_a_cpu() -> None:
    assert not CudnnBenchmark().match(make_loop(steps=0).training, {}).applies
