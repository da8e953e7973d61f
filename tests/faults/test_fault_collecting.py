"""Faults while a step is being looked at (numbers in catalogue.yaml)."""

from __future__ import annotations

import gc
import os
import sys

import pytest
import torch
from torch.overrides import _get_current_function_mode_stack

from advisor.loop.training import RootModule
from advisor.profiling.inside.annotate import Annotator


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU())


def test_many_annotations_leave_nothing_behind(model: torch.nn.Module) -> None:
    call, x = torch.nn.Module.__call__, torch.randn(2, 1, 6, 6)

    def measure() -> None:
        annotator = Annotator([RootModule(module=model, name="model")])
        annotator.start()
        model(x)
        annotator.stop()

    measure()
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(300):
        measure()
    gc.collect()
    assert len(gc.get_objects()) < before + 300  # not one object a measurement
    assert torch.nn.Module.__call__ is call
    assert not _get_current_function_mode_stack()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_in_the_window_annotates_nothing_in_the_child(model: torch.nn.Module) -> None:
    annotator = Annotator([RootModule(module=model, name="model")])
    annotator.start()
    try:
        assert annotator.open_module(model) is not None
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(write, b"quiet" if annotator.open_module(model) is None else b"annotated")
            os._exit(0)
        os.close(write)
        assert os.read(read, 20) == b"quiet"
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        os.close(read)
    finally:
        annotator.stop()
    assert sys.getrefcount(annotator) < 20
