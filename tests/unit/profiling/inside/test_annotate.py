from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import stub_cupy
import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from advisor.loop import updates
from advisor.loop.training import RootModule
from advisor.profiling.inside import annotate
from advisor.profiling.inside.annotate import Annotator, module_names

ORIGINAL_CALL = nn.Module.__call__


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    yield
    while torch._C._len_torch_function_stack():  # a failing test must not fail the next
        torch._C._pop_torch_function_stack()
    nn.Module.__call__ = ORIGINAL_CALL


def roots(module: nn.Module, name: str = "Net") -> list[RootModule]:
    return [RootModule(module=module, name=name)]


def test_module_names_begin_with_the_root_and_skip_wrappers() -> None:
    net = nn.Sequential(nn.Conv2d(1, 1, 1), nn.Sequential(nn.ReLU()))
    names = module_names(roots(net))
    assert names[id(net)] == "Net|Sequential"
    assert names[id(net[0])] == "Net.0|Conv2d"
    assert names[id(net[1][0])] == "Net.1.0|ReLU"
    wrapped = module_names(roots(nn.DataParallel(net)))
    assert wrapped[id(net[0])] == "Net.0|Conv2d"


def test_everything_is_restored() -> None:
    call, synchronize = nn.Module.__call__, torch.cuda.synchronize
    waits = torch.cuda.Event.synchronize, torch.cuda.Stream.synchronize
    annotator = Annotator(roots(nn.Linear(1, 1)))
    annotator.start()
    assert nn.Module.__call__ is not call
    assert torch.cuda.synchronize is not synchronize
    assert len(_get_current_function_mode_stack()) == 1
    annotator.stop()
    annotator.stop()
    assert nn.Module.__call__ is call
    assert torch.cuda.synchronize is synchronize
    assert (torch.cuda.Event.synchronize, torch.cuda.Stream.synchronize) == waits
    assert _get_current_function_mode_stack() == []


def test_an_optimizers_range_is_open_in_its_update_only(monkeypatch) -> None:
    updates.optimizer_begins(object())  # no window is open
    updates.optimizer_ends()
    opened, closed = [], []

    class Range:
        def __init__(self, name):
            opened.append(name)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            closed.append(opened[-1])

    monkeypatch.setattr(annotate, "RecordFunctionFast", Range)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    annotator = Annotator()
    annotator.start()
    updates.optimizer_begins(optimizer)
    assert (opened, closed) == (["advisor:optimizer:SGD"], [])
    updates.optimizer_ends()
    assert closed == opened
    updates.optimizer_begins(optimizer)
    annotator.stop()  # a window that ends in the middle of an update
    assert len(closed) == 2
    updates.optimizer_begins(optimizer)
    assert len(opened) == 2


def test_a_later_patch_by_someone_else_survives() -> None:
    call = nn.Module.__call__
    annotator = Annotator()
    annotator.start()
    ours = nn.Module.__call__

    def theirs(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return ours(module, *args, **kwargs)

    nn.Module.__call__ = theirs
    try:
        annotator.stop()
        assert nn.Module.__call__ is theirs
        assert nn.Linear(2, 2)(torch.zeros(1, 2)).shape == (1, 2)
    finally:
        nn.Module.__call__ = call


def test_a_users_mode_that_ends_inside_the_window_takes_its_own_mode_off() -> None:
    class Theirs(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    annotator = Annotator()
    with Theirs(), torch.device("meta"):
        annotator.start()
        assert torch.zeros(1).device.type == "meta"
    assert torch.zeros(1).device.type == "cpu"
    assert [type(m).__name__ for m in _get_current_function_mode_stack()] == ["_LineMode"]
    with Theirs():
        annotator.stop()
        assert [type(m).__name__ for m in _get_current_function_mode_stack()] == ["Theirs"]
    assert _get_current_function_mode_stack() == []


def test_the_default_device_can_be_set_and_unset_inside_the_window() -> None:
    annotator = Annotator()
    torch.set_default_device("meta")
    try:
        annotator.start()
        assert torch.zeros(1).device.type == "meta"
        torch.set_default_device("cpu")
        assert torch.zeros(1).device.type == "cpu"
    finally:
        annotator.stop()
        torch.set_default_device(None)
    assert _get_current_function_mode_stack() == []


def test_errors_of_the_user_pass_through_and_close_their_ranges() -> None:
    class Broken(nn.Module):
        def forward(self) -> None:
            raise KeyError("theirs")

    annotator = Annotator()
    annotator.start()
    try:
        with pytest.raises(KeyError, match="theirs"):
            Broken()()
        with pytest.raises(RuntimeError):
            torch.zeros(2) @ torch.zeros(3)
    finally:
        annotator.stop()
    assert annotator.failure == ""


def test_a_fault_of_ours_ends_the_annotation_and_not_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise OSError("planted")

    monkeypatch.setattr(annotate, "open_range", broken)
    annotator = Annotator()
    annotator.start()
    try:
        assert torch.ones(2).sum().item() == 2
        assert nn.Identity()(3) == 3
    finally:
        annotator.stop()
    assert "planted" in annotator.failure


def test_lines_are_left_out_when_dynamo_has_compiled_something(monkeypatch: pytest.MonkeyPatch) -> None:
    class Utils:
        counters = {"stats": {"unique_graphs": 1}}  # noqa: RUF012 – as in the class it stands for

    monkeypatch.setitem(annotate.sys.modules, "torch._dynamo.utils", Utils)
    annotator = Annotator()
    annotator.start()
    try:
        assert not annotator.lines
        assert _get_current_function_mode_stack() == []
    finally:
        annotator.stop()


def _closure() -> int:
    return 7


@pytest.mark.parametrize("by_name", [False, True])
def test_a_closure_runs_inside_a_range_of_its_own_while_a_window_is_open(monkeypatch, by_name) -> None:
    log: list[str] = []

    class Range:
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            log.append(self.name)

        def __exit__(self, *_):
            log.append("end")

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    args, kwargs = ((optimizer,), {"closure": _closure}) if by_name else ((optimizer, _closure), {})
    assert updates.annotated_closure(args, kwargs) is None  # no window is open
    annotator = Annotator()
    annotator.start()
    try:
        assert updates.annotated_closure((optimizer,), {}) is None
        given = updates.annotated_closure(args, kwargs)
        assert given is not None
        assert given[0][0] is optimizer
        monkeypatch.setattr(updates, "RecordFunctionFast", Range)
        assert updates.closure_of(*given)() == 7
    finally:
        annotator.stop()
    assert log == ["advisor:closure", "end"]


def test_calls_of_cupy_beside_torch_have_their_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = stub_cupy.module()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    before = dict(vars(cupy))
    annotator = annotate.Annotator()
    with torch.autograd.profiler.profile() as prof:
        annotator.start(compiled=False)
        cupy.asnumpy(cupy.ones(3) + 1.0)
        annotator.stop()
    assert not annotator.failure
    assert vars(cupy) == before
    lines = [event.name for event in prof.function_events if event.name.startswith(annotate.LINE)]
    assert len(lines) == 3
    assert all("test_annotate.py:" in line for line in lines)
