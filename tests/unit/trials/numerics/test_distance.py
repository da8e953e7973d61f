"""How far apart two results are, where there is nothing to measure by."""

from __future__ import annotations

import pytest
import torch

from advisor.trials.numerics.distance import distance
from advisor.trials.numerics.replay import Result


def result(**groups: list[float]) -> Result:
    return Result({name.replace("_", " "): [torch.tensor(values)] for name, values in groups.items()}, (), 0.0)


@pytest.mark.parametrize("group", ["output", "gradient_of_weight", "buffer_updates_of_norm"])
def test_what_was_zero_and_is_not_any_more_is_off_by_all_of_it(group: str) -> None:
    base = result(**{"output": [1.0, 2.0], group: [0.0, 0.0]})
    found = distance(result(**{"output": [1.0, 2.0], group: [0.5, -0.5]}), base)
    assert found.l2[group.replace("_", " ")] >= 1.0
    assert not found.broken
    assert distance(base, base).largest == 0.0
