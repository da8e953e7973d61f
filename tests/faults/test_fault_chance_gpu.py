"""What chance keeps and what it hides, by many trials of a device's own steps (numbers in catalogue.yaml). Minutes each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from repeated_trials import tried

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
TRIALS = 200


@pytest.mark.timeout(1500)
def test_nothing_is_kept_when_nothing_changed_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    found = tried(tmp_path, monkeypatch, "nothing", TRIALS)
    record_property("told", f"{found.statuses['kept']} of {found.statuses.total()} kept")
    assert found.statuses.total() == TRIALS, (found.statuses, found.output[-2000:])
    assert set(found.statuses) <= {"kept", "reverted", "inconclusive"}, found.statuses
    assert found.statuses["kept"] <= 0.01 * TRIALS


@pytest.mark.timeout(1500)
def test_three_per_cent_is_found_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    found = tried(tmp_path, monkeypatch, "spares", TRIALS, share=0.03)
    middle = sorted(found.gains)[len(found.gains) // 2] if found.gains else 0.0
    record_property(
        "told", f"{found.statuses['kept']} of {found.statuses.total()} kept, {100 * middle:.1f} % in the middle"
    )
    assert found.statuses.total() == TRIALS, (found.statuses, found.output[-2000:])
    assert 0.025 <= middle <= 0.035  # the plant is what it is said to be
    assert found.statuses["kept"] >= 0.95 * TRIALS, found.statuses
