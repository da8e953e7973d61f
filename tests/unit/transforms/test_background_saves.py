"""Checkpoints written by a process of their own: the same bytes, whole at any time."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from advisor.loop.training import Training
from advisor.transforms import registry
from advisor.transforms.background_saves import Saves

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def switched_on() -> Iterator[None]:
    undo = registry.get("background_saves").apply(Training(device=torch.device("cpu")), {})
    yield
    undo.run()
    assert not Saves.writing


def state() -> dict[str, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.randn(2, 3, 8, 8)).mean().backward()
    optimizer.step()
    whole = torch.arange(8.0)
    return {
        "net": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "views": [whole[:3], whole[2:]],
        "channels_last": torch.ones(1, 2, 3, 3).to(memory_format=torch.channels_last),
        "parameter": net[0].weight,
        "epoch": 3,
    }


def test_the_bytes_are_those_of_the_plain_call(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    torch.save.__wrapped__(state(), tmp_path / "plain" / "net.pt")
    torch.save(state(), tmp_path / "net.pt")
    assert (tmp_path / "net.pt").read_bytes() == (tmp_path / "plain" / "net.pt").read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["net.pt", "plain"]


def test_who_reads_copies_or_looks_at_it_waits_until_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "net.pt"
    torch.save(state(), path)
    assert os.path.exists(path)
    torch.save(state(), path)
    shutil.copyfile(path, tmp_path / "best.pt")
    torch.save({**state(), "epoch": 4}, path)
    os.replace(path, tmp_path / "last.pt")
    assert torch.load(tmp_path / "best.pt")["epoch"] == 3
    assert torch.load(tmp_path / "last.pt")["epoch"] == 4
    views = torch.load(tmp_path / "last.pt")["views"]
    views[0][2] = 7.0
    assert views[1][0] == 7.0, "they share their storage"


def test_what_is_saved_is_what_was_there_then(tmp_path: Path) -> None:
    values = torch.zeros(1000)
    torch.save({"values": values}, tmp_path / "net.pt")
    values += 1
    assert torch.load(tmp_path / "net.pt")["values"].sum() == 0


def test_a_folder_that_is_not_there_is_the_plain_error_and_files_are_saved_as_ever(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="none"):
        torch.save(state(), tmp_path / "none" / "net.pt")
    with open(tmp_path / "net.pt", "wb") as stream:
        torch.save(state(), stream)
    assert torch.load(tmp_path / "net.pt")["epoch"] == 3
    begun = Saves.begun
    torch.save({"sparse": torch.eye(3).to_sparse()}, tmp_path / "sparse.pt")
    assert Saves.begun == begun
    assert torch.load(tmp_path / "sparse.pt")["sparse"].is_sparse
