"""The kernels under DistributedDataParallel, emulated: two processes over gloo. On two GPUs: test_ddp_gpu.py."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import clocks
import data_parallel
import pytest
import torch
from torch import distributed

WAYS: dict[str, dict[str, Any]] = {
    "no_sync, views, unused parameters": {
        "accumulate": True,
        "gradient_as_bucket_view": True,
        "find_unused_parameters": True,
    },
    "static graph": {"static_graph": True},
}
# In fp32, on shapes that the emulator can go through.
RUN = {
    "batchnorm_act", "batchnorm_max_pool", "bias_act", "depthwise", "group_norm", "layer_norm", "pooling", "squeeze_excite", "upsample",
}  # fmt: skip


def train(rank: int, folder: Path) -> Iterator[tuple[str, Any]]:
    """One way of the two: the folder has its name."""
    from emulation import device

    patch = pytest.MonkeyPatch()
    running = device.emulated.__wrapped__(patch)
    next(running)
    distributed._DEFAULT_FIRST_BUCKET_BYTES = 1024  # a bucket a layer: Dynamo would cut graphs there
    yield folder.name, data_parallel.trained(torch.device("cpu"), steps=2, bucket_cap_mb=1 / 1024, **WAYS[folder.name])


@pytest.mark.parametrize(
    "way", ["no_sync, views, unused parameters", pytest.param("static graph", marks=pytest.mark.long)]
)
def test_a_training_with_kernels_is_pytorchs_and_the_same_on_both_ranks(tmp_path: Path, way: str) -> None:
    folder = tmp_path / way
    folder.mkdir()
    ways, why = data_parallel.in_two_processes(train, folder, backend="gloo")
    assert way in ways, why
    for rank in ways[way]:
        assert rank["same_on_all_ranks"]
        assert rank["ranks_saw_other_data"]
        assert rank["error"] <= 1.4 * rank["plain_error"] + 1e-4
        assert rank["buffers"] <= 1.4 * rank["plain_buffers"] + 1e-4
        assert set(rank["matched"]) >= RUN
        assert set(rank["engaged"]) >= RUN
        assert not rank["fell_back"]
        assert rank["graphs"] == 1, "the captured graph was cut"


def hang_for_good(rank: int, folder: Path) -> Iterator[tuple[str, Any]]:
    yield "before", rank
    if rank:
        time.sleep(10**6)
    distributed.barrier()


def test_a_rank_that_waits_for_ever_is_killed_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests on GPUs rest on: a deadlock fails, and keeps what was found before it."""

    class Clock(clocks.Clock):
        """Time is up once both have said what comes before it."""

        def monotonic(self) -> float:
            self.seconds += 1e6 * (len(list(tmp_path.glob("*-before.json"))) == 2)
            return self.seconds

    monkeypatch.setattr(data_parallel, "time", Clock())
    found, why = data_parallel.in_two_processes(hang_for_good, tmp_path, backend="gloo", limit_s=1000.0)
    assert found == {"before": [0, 1]}
    assert "hung" in why
