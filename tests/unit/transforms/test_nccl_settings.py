"""NCCL's settings: in the environment before it connects the ranks, and never in the place of the user's."""

from __future__ import annotations

import os

import pytest
import torch
from torch import distributed

from advisor.core.plan import PlanItem
from advisor.loop.training import Training
from advisor.transforms import nccl_settings, registry
from advisor.trials.kept import KeptChanges

SETTING = {"NCCL_MAX_CTAS": "8"}


@pytest.fixture(autouse=True)
def nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "is_nccl_available", lambda: True)
    monkeypatch.delenv("NCCL_MAX_CTAS", raising=False)


def test_it_is_on_from_the_start_and_taken_back() -> None:
    training, change = Training(device=torch.device("cpu")), registry.get("nccl_settings")
    assert change.match(training, SETTING).sites == ("NCCL_MAX_CTAS=8",)
    undo = change.apply(training, SETTING)
    assert os.environ["NCCL_MAX_CTAS"] == "8"
    undo.run()
    assert "NCCL_MAX_CTAS" not in os.environ


def test_what_the_user_has_set_stays_and_the_plan_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_MAX_CTAS", "16")
    item = PlanItem(transform="nccl_settings", status="kept", parameters=SETTING)
    kept = KeptChanges(Training(device=torch.device("cpu")), [item])
    while not kept.settle():
        pass
    assert os.environ["NCCL_MAX_CTAS"] == "16"
    assert kept.left_out["nccl_settings"] == "NCCL_MAX_CTAS is set to 16 already"


def test_it_comes_too_late_once_the_ranks_are_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    class Connected:
        def _get_backend(self, device: torch.device) -> Connected:
            assert device.type == "cuda"
            return self

        def _is_initialized(self) -> bool:
            return True

    monkeypatch.setattr(nccl_settings.ranks, "in_group", lambda: True)
    monkeypatch.setattr(distributed.group, "_WORLD", None, raising=False)
    monkeypatch.setattr(type(distributed.group), "WORLD", property(lambda _: Connected()))
    with pytest.raises(RuntimeError, match="connected the ranks already"):
        registry.get("nccl_settings").apply(Training(device=torch.device("cuda")), SETTING)
    assert "NCCL_MAX_CTAS" not in os.environ


@pytest.mark.usefixtures("process_group")
def test_another_backend_is_not_in_its_way() -> None:
    assert registry.get("nccl_settings").match(Training(device=torch.device("cpu")), SETTING).applies
