"""docs/networks.md says what its command finds: all rows are those on record, and some networks are captured anew."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import fake_gpu
import networks_page
import pytest
import torch
from networks import LIBRARIES, Library

from advisor.ops import catalog

BY_ID = {library.id: library for library in LIBRARIES}
# A second or two each; with the long ones all families but two take something.
QUICK = (("torchvision", "squeezenet1_1"), ("torchvision", "vgg16_bn"), ("examples", "gan.py's discriminator"))
LONG = (
    ("torchvision", "convnext_tiny"),
    ("torchvision", "densenet121"),
    ("torchvision", "regnet_y_400mf"),
    ("torchvision", "resnet50"),
    ("timm", "lcnet_100"),
)


def test_the_page_is_what_is_on_record() -> None:
    text = networks_page.PAGE.read_text(encoding="utf-8")
    assert text == networks_page.page(), "run `python tests/kernels/networks_page.py`"


def test_every_table_has_a_column_a_family_of_the_catalogue() -> None:
    text = networks_page.PAGE.read_text(encoding="utf-8")
    headers = re.findall(r"^\| network \| (.*) \|$", text, re.MULTILINE)
    assert len(headers) == len(LIBRARIES)
    captured = [family.id for family in catalog.FAMILIES if family.captured]
    for header in headers:
        assert header.replace("`", "").split(" | ") == captured


@pytest.mark.parametrize(
    ("library", "name"), [*QUICK, *(pytest.param(*network, marks=pytest.mark.long) for network in LONG)]
)
def test_a_network_captured_anew_is_as_on_record(library: str, name: str) -> None:
    if missing := BY_ID[library].missing():
        pytest.skip(missing)
    seen = networks_page.observed(BY_ID[library].network(name))
    assert seen == networks_page.on_record(BY_ID[library])["networks"][name]
    assert networks_page.row(name, seen) in networks_page.PAGE.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: str(library.id))
def test_no_rewrite_has_failed(library: Library) -> None:
    found = networks_page.on_record(library)["networks"]
    reasons = [reason for seen in found.values() for left in seen["left"].values() for reason in left]
    assert [reason for reason in reasons if "the rewrite failed" in reason] == []


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The page and the records, where a test may change them."""
    monkeypatch.setattr(networks_page, "PAGE", tmp_path / "networks.md")
    monkeypatch.setattr(networks_page, "RECORDS", tmp_path)
    return tmp_path


def test_nothing_is_captured_where_a_library_is_missing(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Library, "missing", lambda library: "needs monai: gone" if library.id == "monai" else "")
    monkeypatch.setattr(networks_page, "record", lambda library: pytest.fail(f"{library.id} was captured"))
    with pytest.raises(SystemExit, match="monai needs monai: gone"):
        networks_page.main(["--capture"])
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("fault", ["nothing", "a family", "a network"])
def test_no_page_lacks_a_table_a_column_or_a_row(elsewhere: Path, fault: str) -> None:
    for library in LIBRARIES:
        nets: dict[str, Any] = {name: {"graphs": 1, "found": {}, "left": {}} for name in library.names}
        families = [family.id for family in networks_page.families()]
        if library.id == "timm" and fault == "a family":
            families.pop()
        if library.id == "timm" and fault == "a network":
            nets.popitem()
        if library.id != "timm" or fault != "nothing":
            found = {"date": "2026-01-01", "versions": {}, "families": families, "networks": nets}
            (elsewhere / f"{library.id}.json").write_text(networks_page.written(found), encoding="utf-8")
    with pytest.raises(SystemExit, match="--capture timm"):
        networks_page.main([])
    assert not networks_page.PAGE.exists()


def test_reasons_that_differ_in_numbers_alone_are_one() -> None:
    left = {"pooling": {"12 MB: too little": 2, "40 MB: too little": 1, "5 x 5 taps": 1}}
    found = {"networks": {"a": {"left": left}, "b": {"left": {"pooling": {"7 MB: too little": 1}}}}}
    rows = networks_page._aggregated([found], "left", "reason")[2:]
    assert rows == ["| `pooling` | 7–40 MB: too little | 4 | a, b |", "| `pooling` | 5 x 5 taps | 1 | a |"]


class _Cut(torch.nn.Module):
    """Reads a part of a value, writes into another, and lets the two halves change places."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = torch.nn.Conv2d(3, 16, 3), torch.nn.BatchNorm2d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.conv(x))
        y[:, 0] = 0.0
        return torch.cat([y[:, 8:], y[:, :8]], 1).contiguous()


def test_a_network_is_seen_as_under_autocast_on_a_gpu() -> None:
    (graph,) = fake_gpu.capture(_Cut(), (4, 3, 8, 8))
    assert list(graph["first_conv"].matched) == ["conv"]  # which takes no fp32
    assert list(graph["batchnorm_act"].matched) == ["norm"]
    assert not torch.is_autocast_enabled("cuda")
