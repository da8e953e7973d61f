"""TF32 flags: both interfaces stay in agreement and come back exactly."""

from __future__ import annotations

import multiprocessing

import pytest
import torch
from loops import make_loop

from advisor.transforms.tf32 import Tf32, new_interface, switched_off

OPERATIONS = ("all", "matmul", "conv", "rnn")


def state() -> tuple:
    newer = tuple(torch._C._get_fp32_precision_getter("cuda", op) for op in OPERATIONS) if new_interface() else ()
    legacy = []
    for read in (torch._C._get_cublas_allow_tf32, torch._C._get_cudnn_allow_tf32, torch.get_float32_matmul_precision):
        try:
            legacy.append(read())
        except RuntimeError:
            legacy.append("mixed")
    return (*newer, *legacy)


STARTS = {
    "default": "",
    "legacy off": "torch.backends.cudnn.allow_tf32 = False; torch.backends.cuda.matmul.allow_tf32 = False",
    "precision high": "torch.set_float32_matmul_precision('high'); torch.backends.cudnn.allow_tf32 = False",
    "new ieee": "torch.backends.cuda.matmul.fp32_precision = 'ieee'; torch.backends.cudnn.conv.fp32_precision = 'ieee'",
    "new all ieee": "torch.backends.cudnn.fp32_precision = 'ieee'",
    "new tf32": "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
}


def check(start: str) -> None:
    exec(start, {"torch": torch})
    before = state()
    undo = Tf32().apply(make_loop(steps=0).training, {})
    assert not switched_off(), switched_off()
    during = state()
    assert during.count("mixed") <= before.count("mixed"), (before, during)
    undo.run()
    undo.run()
    assert state() == before, (before, during, state())


@pytest.mark.parametrize("start", STARTS)
def test_flags_agree_while_on_and_come_back(start: str) -> None:
    if start.startswith("new") and not new_interface():
        pytest.skip("torch has one interface only")
    # A process of its own: some of these states cannot be left again.
    child = multiprocessing.get_context("fork").Process(target=check, args=(STARTS[start],))
    child.start()
    child.join()
    assert child.exitcode == 0


def test_a_cpu_has_no_tf32() -> None:
    match = Tf32().match(make_loop(steps=0).training, {})
    assert not match.applies
    assert "CUDA" in match.reason


def test_nvidias_own_switch_rules_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    training = make_loop(steps=0).training
    training.device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert Tf32().match(training, {}).reason == "NVIDIA_TF32_OVERRIDE=0 in the environment rules it out"
