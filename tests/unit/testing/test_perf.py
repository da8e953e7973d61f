"""The object behind the `perf` fixture: what it refuses, and what becomes of a comparison that noise leaves open."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_profile import PROFILE, changed
from torch import nn

from advisor.core.errors import AdvisorError
from advisor.core.profile import ProfilerCost
from advisor.profiling.machine import environment
from advisor.testing import baselines
from advisor.testing.judged import CannotJudge
from advisor.testing.marker import Marked
from advisor.testing.measured import Measured
from advisor.testing.options import FAIL, SKIP, WARN, Options, Threshold
from advisor.testing.perf import Inconclusive, Perf

SHORT = {"warmup": 4, "steps": 2, "detail_steps": 1}


class Skipped(Exception):
    """In place of pytest's own, which would skip this test."""


def perf(inconclusive: str = WARN, storage: Path = Path("nowhere"), **marks: Any) -> Perf:
    def skip(reason: str) -> None:
        raise Skipped(reason)

    options = Options(storage=storage, inconclusive=inconclusive)
    return Perf("test.py::test", options, Marked(**{"maxima": {}, **marks}), skip)


class Undecidable:
    """Blocks that say one thing and its contrary by turns."""

    def __init__(self) -> None:
        self.blocks = 0

    def times(self, step: Callable[[], object], count: int) -> list[float]:
        self.blocks += 1
        return [1e3 if self.blocks % 3 else 3e3] * count


def ask(found: Perf) -> None:
    found.compare(lambda: None, lambda: None, stopwatch=Undecidable()).assert_faster(by="10 %")


def test_a_comparison_that_noise_leaves_open_is_a_warning_a_failure_or_a_skip() -> None:
    with pytest.warns(Inconclusive, match="too noisy"):
        ask(perf(WARN))
    with pytest.raises(AssertionError, match="inconclusive: too noisy"):
        ask(perf(FAIL))
    with pytest.raises(Skipped, match="too noisy"):
        ask(perf(SKIP))


def test_a_comparison_shows_in_the_records() -> None:
    class Steady:
        def times(self, step: Callable[[], float], count: int) -> list[float]:
            return [step()] * count

    found = perf()
    found.compare(lambda: 2e3, lambda: 1e3, stopwatch=Steady()).assert_faster(by="40 %")
    (record,) = found.records()
    assert record.gain == pytest.approx((0.5, 0.5, 0.5))
    assert record.pairs == 6
    assert record.entry is None
    assert record.budgets[0].passed


@pytest.mark.parametrize(
    ("arguments", "options", "told"),
    [
        (("train.py",), {"batch": 1}, "a script takes arguments only"),
        ((lambda: None, "--lr"), {}, "arguments are for a script"),
        ((nn.Linear(2, 2),), {}, "a module alone"),
        ((nn.Linear(2, 2),), {"batch": torch.ones(1, 2)}, "go together"),
        ((lambda: None,), {"batch": torch.ones(1, 2), "loss": torch.sum}, "go together"),
        (("no-such-script.py",), {}, "no-such-script.py"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: tuple[Any, ...], options: dict[str, Any], told: str) -> None:
    with pytest.raises(AdvisorError, match=told):
        perf().measure(*arguments, **options)


def test_a_limit_on_what_is_not_known_any_more_is_no_pass(tmp_path: Path) -> None:
    known = Measured(PROFILE)
    baselines.save(tmp_path, "main", known.machine, {"test": [known.entry]}, update=False)
    limits = {"syncs": Threshold(amount=0, absolute=True)}
    options = Options(storage=tmp_path, compare="main", compare_fail=limits)
    found = Perf("test", options, Marked(maxima={}), pytest.skip)
    found.measured = [known]
    found.check()
    found.measured = [Measured(changed(cost=ProfilerCost()))]
    with pytest.raises(
        AssertionError, match="host synchronisations is not known: nothing was traced; it is in baseline"
    ):
        found.check()


def test_a_module_with_a_batch_and_a_loss_is_measured_and_held_to_the_marker() -> None:
    found = perf(maxima={"kernels": 1.0}, no_sync=True)
    with pytest.raises(AdvisorError, match="measured nothing"):
        found.check()
    result = found.measure(nn.Linear(3, 2), batch=(torch.ones(4, 3), torch.zeros(4, 2)), loss=nn.MSELoss(), **SHORT)
    assert result.profile.model.roots == ("Linear",)
    with pytest.raises(AssertionError, match="kernel count") as raised:
        found.check()
    assert "host synchronisations" not in str(raised.value)
    assert [budget.title for budget in result.budgets] == ["kernel count", "host synchronisations"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder; the machine's rates are not measured for this."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(environment, "probe", environment.host_facts)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def test_a_script_is_measured_in_a_process_of_its_own(folder: Path) -> None:
    Path("train.py").write_text(
        """
import sys
import torch
torch.set_num_threads(1)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]))
for _ in range(500):
    optimizer.zero_grad()
    loss = model(torch.ones(3, 4)).square().mean()
    loss.backward()
    optimizer.step()
    loss.item()  # the line
"""
    )
    found = perf().measure("train.py", "0.1", warmup=4, steps=3, detail_steps=1)
    found.assert_kernel("addmm")
    with pytest.raises(CannotJudge, match=r"aten::_local_scalar_dense  train\.py:12"):
        found.assert_no_host_sync(allow=["train.py:12"])  # what it reads in other ways nobody has seen
    with pytest.raises(AssertionError, match=r"\[resident memory of the script's process\]"):
        found.assert_memory(max="1 KiB")
    assert list(folder.iterdir()) == [folder / "train.py"]


def test_a_script_that_fails_is_an_error(folder: Path) -> None:
    Path("train.py").write_text("raise SystemExit(3)")
    with pytest.raises(AdvisorError, match=r"train\.py could not be measured"):
        perf().measure("train.py")
