"""Kept changes go on in their turn, and are taken back, all of them, whatever one of them says."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from advisor.core.errors import AdvisorError
from advisor.core.plan import PlanItem
from advisor.transforms.base import Match, Undo
from advisor.transforms.cudnn_benchmark import CudnnBenchmark
from advisor.trials.kept import PATIENCE, KeptChanges


def changes(back: list[str]) -> KeptChanges:
    def change(name: str) -> SimpleNamespace:
        def take_back() -> None:
            back.append(name)
            if name == "stuck":
                raise ValueError("stuck")

        def apply(training: object, parameters: object) -> Undo:
            undo = Undo()
            undo.push(take_back)
            return undo

        match = Match(applies=True)
        return SimpleNamespace(id=name, title=name, live=True, waits_for=(), match=lambda *_: match, apply=apply)

    names = ("first", "stuck", "last")
    return KeptChanges(None, [PlanItem(transform=name, status="kept") for name in names], change)


def test_one_that_cannot_be_taken_back_does_not_leave_the_others_on() -> None:
    back: list[str] = []
    kept = changes(back)
    assert kept.settle()
    assert [standing.transform.id for standing in kept.standing] == ["first", "stuck", "last"]
    with pytest.raises(ValueError, match="stuck"):
        kept.undo()
    assert back == ["last", "stuck", "first"]
    assert kept.standing == []
    kept.undo()
    assert len(back) == 3


NEVER = PATIENCE + 1


class Beside:
    """cudnn_benchmark in a plan with others, each of which fits from the boundary named for it on, as what needs the model does."""

    def __init__(self, *names: str, **since: int) -> None:
        self.since, self.boundary = since, -1
        self.matched_with_flag: dict[str, bool] = {}  # by the others, when they fit
        self.kept = KeptChanges(None, [PlanItem(transform=name, status="kept") for name in names], self.find)

    def find(self, name: str) -> CudnnBenchmark | SimpleNamespace:
        def match(*_: object) -> Match:
            fits = self.boundary >= self.since[name]
            if fits:
                self.matched_with_flag[name] = torch.backends.cudnn.benchmark
            return Match(applies=fits, reason="not yet")

        if name == "cudnn_benchmark":
            return CudnnBenchmark()
        if name not in self.since:
            raise AdvisorError(f"no transform {name!r}")
        return SimpleNamespace(id=name, title=name, live=True, waits_for=(), match=match, apply=lambda *_: Undo())

    def settle(self) -> list[bool]:
        """The flag after each boundary, from attach on."""
        flags = []
        for self.boundary in range(PATIENCE + 1):
            settled = self.kept.settle()
            flags.append(torch.backends.cudnn.benchmark)
            if settled:
                break
        return flags


@pytest.fixture
def flag_off(monkeypatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setattr(CudnnBenchmark, "match", lambda *_: Match(applies=True, sites=("conv",)))


@pytest.mark.usefixtures("flag_off")
@pytest.mark.parametrize(
    "names", [*itertools.permutations(("cuda_graphs", "channels_last", "amp_bf16", "cudnn_benchmark"))], ids="-".join
)
def test_cudnn_times_nothing_before_dtype_and_layout_are_final(names: tuple[str, ...]) -> None:
    plan = Beside(*names, cuda_graphs=1, channels_last=1, amp_bf16=3)
    assert plan.settle() == [False, False, False, True]
    assert plan.kept.left_out == {}
    assert {standing.transform.id for standing in plan.kept.standing} == set(names)


@pytest.mark.usefixtures("flag_off")
def test_cudnn_is_to_time_the_first_forward_that_another_change_runs() -> None:
    plan = Beside("amp_bf16", "channels_last", "conv_bias", "cudnn_benchmark", amp_bf16=1, channels_last=1, conv_bias=1)
    assert plan.settle() == [False, True]
    assert plan.matched_with_flag == {"amp_bf16": False, "channels_last": False, "conv_bias": True}


@pytest.mark.parametrize("since", [1, 2, NEVER])
def test_what_looks_at_the_plain_forward_is_on_before_what_captures_it(since: int) -> None:
    """CycleGAN's plan: biases before instance norms were left out of each fresh run, "the model is compiled or captured already"."""
    names = ("cuda_graphs", "channels_last", "fused_group_norm", "conv_bias", "compile")
    plan = Beside(*names, cuda_graphs=0, channels_last=0, fused_group_norm=0, conv_bias=since, compile=0)
    plan.settle()
    behind = ["cuda_graphs", "fused_group_norm", "compile"]
    assert [s.transform.id for s in plan.kept.standing] == [
        "channels_last", *(["conv_bias"] if since != NEVER else []), *behind
    ]  # fmt: skip
    assert list(plan.kept.left_out) == (["conv_bias"] if since == NEVER else [])


@pytest.mark.usefixtures("flag_off")
@pytest.mark.parametrize("names", [("cudnn_benchmark",), ("cuda_graphs", "tf32", "cudnn_benchmark")])
def test_the_plans_of_the_plain_first_steps_are_timed_where_they_stay(names: tuple[str, ...]) -> None:
    assert Beside(*names, cuda_graphs=1, tf32=1).settle()[0]


@pytest.mark.usefixtures("flag_off")
def test_what_is_left_out_is_not_waited_for() -> None:
    plan = Beside("cudnn_benchmark", "channels_last", "amp_bf16", channels_last=1, amp_bf16=NEVER)
    assert plan.settle() == [False] * PATIENCE + [True]
    assert plan.kept.left_out == {"amp_bf16": "not yet"}


@pytest.mark.usefixtures("flag_off")
def test_what_waited_goes_on_again_in_its_turn_and_is_taken_back() -> None:
    plan = Beside("cudnn_benchmark", "channels_last", "conv_bias", channels_last=2, conv_bias=2)
    assert plan.settle() == [False, False, True]
    plan.kept.follow()
    assert torch.backends.cudnn.benchmark
    assert [s.transform.id for s in plan.kept.standing] == ["channels_last", "cudnn_benchmark", "conv_bias"]
    plan.kept.undo()
    assert not torch.backends.cudnn.benchmark


@pytest.mark.usefixtures("flag_off")
def test_undone_while_it_waits_it_stays_off() -> None:
    plan = Beside("channels_last", "cudnn_benchmark", channels_last=NEVER)
    plan.kept.settle()
    plan.kept.undo()
    assert plan.kept.settle()
    assert not torch.backends.cudnn.benchmark


def test_an_item_of_a_name_that_nobody_knows_is_left_out() -> None:
    plan = Beside("of another version", "channels_last", channels_last=1)
    plan.settle()
    assert [standing.transform.id for standing in plan.kept.standing] == ["channels_last"]
    assert "no transform" in plan.kept.left_out["of another version"]
