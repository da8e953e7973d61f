"""What an earlier search of the same script says for a new one."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from advisor.core.plan import Plan, PlanHashes, PlanItem
from advisor.trials import earlier, planfile, records

HERE = PlanHashes(script="s", environment="GPU torch 2", kernels="k", model="m")


def leave(
    runs: Path,
    name: str,
    *,
    age: float = 0.0,
    hashes: PlanHashes = HERE,
    argv: tuple[str, ...] = ("--lr", "1"),
    **reasons: str,
) -> None:
    items = tuple(PlanItem(transform=n, status="reverted", reason=r.replace("_", " ")) for n, r in reasons.items())
    kept = PlanItem(transform="channels_last", status="kept", reason="faster")
    (runs / name).mkdir(parents=True)
    path = runs / name / records.PLAN_FILE
    planfile.write(path, Plan(script="train.py", argv=argv, created="", items=(kept, *items), hashes=hashes))
    os.utime(path, (1e9 - age, 1e9 - age))


def refused(runs: Path) -> tuple[str, ...]:
    return earlier.refused(runs / "now", "train.py", ("--lr", "1"), HERE)


def test_what_a_change_does_counts_and_how_fast_it_was_does_not(tmp_path: Path) -> None:
    leave(tmp_path, "a", cuda_graphs="applied, but without effect: no graph was replayed", tf32="no gain above 1 %",
          amp_bf16="it changes the training: off by 3 times the bound")  # fmt: skip
    assert set(refused(tmp_path)) == {"cuda_graphs", "amp_bf16"}


def test_the_latest_counts_and_the_run_itself_does_not(tmp_path: Path) -> None:
    leave(tmp_path, "old", age=100.0, cuda_graphs="applied, but without effect")
    leave(tmp_path, "new", age=50.0, amp_bf16="it changes the training")
    leave(tmp_path, "now", tf32="it changes the training")
    assert refused(tmp_path) == ("amp_bf16",)


@pytest.mark.parametrize("other", [{"script": "t"}, {"environment": "GPU torch 3"}, {"kernels": "l"}])
def test_another_script_machine_or_kernel_says_nothing(tmp_path: Path, other: dict[str, str]) -> None:
    leave(tmp_path, "a", hashes=dataclasses.replace(HERE, **other), cuda_graphs="applied, but without effect")
    assert refused(tmp_path) == ()


def test_other_arguments_and_a_broken_file_say_nothing(tmp_path: Path) -> None:
    leave(tmp_path, "a", argv=("--lr", "2"), cuda_graphs="applied, but without effect")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / records.PLAN_FILE).write_text("{")
    assert refused(tmp_path) == ()
