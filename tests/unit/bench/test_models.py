"""`bench models`: what is on file after each of its runs. The runs themselves are apply's and need a GPU to be worth a row."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from advisor import pipeline
from advisor.bench import models


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that is not there, and a search that found nothing in 1 s."""
    profile = SimpleNamespace(step_us=SimpleNamespace(median=2000.0), model=SimpleNamespace(batch_size=8))
    log = SimpleNamespace(stack=None, verdicts=(), seconds=1.0)
    found = SimpleNamespace(profile=profile, log=log, run_dir=Path("run"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "no GPU at all")
    monkeypatch.setattr(pipeline, "apply", lambda *_, **__: found)


def test_a_baseline_that_is_interrupted_costs_no_row(
    searched: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fresh(words: Any, items: tuple[str, ...], *_: Any) -> float:
        if "compile" in items:
            raise KeyboardInterrupt
        return 1.5

    monkeypatch.setattr(models, "_fresh", fresh)
    target = tmp_path / "models.json"
    with pytest.raises(KeyboardInterrupt):
        models.run(pattern="cifar", json_out=target, baselines=("eager", "compile"), say=lambda _: None)
    (row,) = json.loads(target.read_text())["rows"]
    assert row["name"] == "cifar_resnet18_b128"
    assert (row["plain_ms"], row["hand_tuned_ms"], row["hand_tuned_compiled_ms"]) == (2.0, 1.5, None)
