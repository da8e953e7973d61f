"""A teacher that a step calls without gradients: in bf16 and NHWC, and back."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from loops import ConvNet, make_loop
from torch import nn

from advisor.core.findings import Semantics
from advisor.core.profile import KernelRow, ModelFacts, StepProfile
from advisor.loop.training import RootModule
from advisor.transforms import registry
from advisor.transforms.channels_last import ChannelsLast
from advisor.transforms.guides import GuidesBf16
from advisor.trials.numerics.gate import Gate

ANYWAY = {"cpu": "always"}


def taught():
    loop = make_loop()
    torch.manual_seed(7)
    teacher = ConvNet(16).eval().requires_grad_(False)
    loop.training.guides.append(RootModule(module=teacher, name="ConvNet#2"))
    return loop, teacher, torch.randn(4, 3, 8, 8)


def asked(teacher: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        answer: torch.Tensor = teacher(x)
        return answer


def state(teacher: nn.Module):
    return [(id(p), p.detach().clone(), p.stride()) for p in teacher.parameters()], torch.Tensor.view


def test_it_answers_in_bf16_and_is_as_it_was_afterwards() -> None:
    loop, teacher, x = taught()
    plain, before = asked(teacher, x), state(teacher)
    undo = GuidesBf16().apply(loop.training, ANYWAY)
    answer = asked(teacher, x)
    assert answer.dtype == torch.float32
    assert not torch.equal(answer, plain)
    torch.testing.assert_close(answer, plain, rtol=0.05, atol=0.05)
    assert teacher.conv1.weight.is_contiguous(memory_format=torch.channels_last)
    assert all(p.dtype == torch.float32 for p in teacher.parameters())
    undo.run()
    after = state(teacher)
    assert [(i, s) for i, _, s in before[0]] == [(i, s) for i, _, s in after[0]]
    assert all(torch.equal(a, b) for (_, a, _), (_, b, _) in zip(before[0], after[0], strict=True))
    assert before[1] is after[1]
    assert torch.equal(asked(teacher, x), plain)


def test_the_model_that_trains_is_left_alone() -> None:
    loop, plain = make_loop(), make_loop()
    loop.training.guides.append(RootModule(module=ConvNet(16).eval(), name="ConvNet#2"))
    undo = GuidesBf16().apply(loop.training, ANYWAY)
    assert loop.run(3) == plain.run(3)
    undo.run()


def test_beside_channels_last_of_the_model_in_either_order() -> None:
    loop, teacher, x = taught()
    plain, view = asked(teacher, x), torch.Tensor.view
    first = ChannelsLast().apply(loop.training, {})
    second = GuidesBf16().apply(loop.training, ANYWAY)
    loop.run(1)
    torch.testing.assert_close(asked(teacher, x), plain, rtol=0.05, atol=0.05)
    second.run()
    first.run()
    assert torch.Tensor.view is view
    assert torch.equal(asked(teacher, x), plain)


def test_a_moving_average_goes_on_into_it() -> None:
    loop, teacher, x = taught()
    student = copy.deepcopy(teacher)
    plain = copy.deepcopy(teacher)
    GuidesBf16().apply(loop.training, ANYWAY)
    with torch.no_grad():
        for target in (teacher, plain):
            for average, new in zip(target.parameters(), student.parameters(), strict=True):
                average.mul_(0.9).add_(new + 1.0, alpha=0.1)
    assert all(torch.equal(a, b) for a, b in zip(teacher.parameters(), plain.parameters(), strict=True))
    plain.load_state_dict(teacher.state_dict(), strict=True)
    torch.testing.assert_close(asked(teacher, x), asked(plain, x), rtol=0.05, atol=0.1)


def test_where_it_does_not_apply() -> None:
    loop, teacher, _ = taught()
    assert GuidesBf16().match(loop.training, ANYWAY).sites == ("ConvNet#2",)
    assert "no model" in GuidesBf16().match(dataclasses.replace(loop.training, guides=[]), ANYWAY).reason
    teacher.half()
    found = GuidesBf16().match(loop.training, ANYWAY)
    assert not found.applies
    assert "ConvNet#2: its parameters are not all fp32" in found.reason


def profile_of(*dtypes: str) -> StepProfile:
    rows = tuple(
        KernelRow(name=f"k{i}", kind="conv", module=module, dtype=dtype, time_us=10.0)
        for i, (module, dtype) in enumerate(
            zip(("ConvNet#2.conv1", "ConvNet#2.conv2", "ConvNet.conv1"), dtypes, strict=True)
        )
    )
    return dataclasses.replace(blank(), kernels=rows, model=ModelFacts(guides=("ConvNet#2",)))


def blank() -> StepProfile:
    from advisor.core.environment import Environment

    return StepProfile(
        script="", argv=(), created="", environment=Environment(), step_kind="optimizer", step_us=None, wall_us=None
    )


def test_its_effect_is_in_its_own_rows() -> None:
    loop, *_ = taught()
    transform = registry.get("guides_bf16")
    assert transform.effect(loop.training, None, None).passed is False
    undo = transform.apply(loop.training, ANYWAY)
    assert transform.effect(loop.training, None, None).passed
    assert transform.effect(loop.training, None, profile_of("bf16", "bf16", "fp32")).passed
    assert transform.effect(loop.training, None, profile_of("fp32", "fp32", "bf16")).passed is False
    undo.run()


@pytest.mark.parametrize(("factor", "passed"), [(1.0, True), (1.5, False)])
def test_the_gate_holds_what_it_gives_out_against_what_it_gave(factor: float, passed: bool) -> None:
    loop, teacher, x = taught()
    loop.run(2)
    gate = Gate(loop.training)
    gate.arm(guides=True)
    given = x.clone()
    asked(teacher, given)
    given.zero_()  # the script's to change
    loop.step()
    assert gate.captured()
    undo = None
    plain = type(teacher).forward

    def on() -> None:
        nonlocal undo
        undo = GuidesBf16().apply(loop.training, ANYWAY)
        if factor != 1.0:
            wrapped = teacher.forward
            teacher.__dict__["forward"] = lambda x: factor * wrapped(x)

    def off() -> None:
        teacher.__dict__.pop("forward", None)
        assert undo is not None
        undo.run()

    check = gate.judge(on, off, Semantics.PRECISION).check
    assert check.passed is passed, check.detail
    assert "ConvNet#2" in check.detail or passed
    assert type(teacher).forward is plain


def test_the_gate_of_other_changes_does_not_call_it() -> None:
    loop, teacher, x = taught()
    loop.run(2)
    gate = Gate(loop.training)
    gate.arm()
    calls = []
    teacher.register_forward_pre_hook(lambda *_: calls.append(1))
    asked(teacher, x)
    loop.step()
    gate.captured()
    gate.judge(lambda: None, lambda: None, Semantics.PRECISION)
    assert calls == [1]
