"""docs/guides/add-a-kernel.md: its two folders, its two rows and a line of prediction, put into a copy of advisor, are all that a family needs.

Beside these the guide has a rule, a line of pyproject.toml for the wheel (tests/repo/test_distribution.py), and what commands write: the page
of networks, the results and the dispatch table.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
OWN = (
    "advisor",
    "advisor/analysis",
    "advisor/analysis/predictions",
    "advisor/core",
    "advisor/ops",
    "kernels",
)  # of the copy; the rest is this checkout's

FAMILY = """    Family(
        id="slopes",
        replaces="prelu with a slope a channel",
        transform="fused_slopes",
        modules=("PReLU",),
    ),
"""
PREDICTION = 'fused_slopes = _kernel_family(_of(is_prelu), "PReLU")\n'
ROW = '    family("fused_slopes", "PReLU kernels once more"),\n'

ASKED = """
import torch
from emulation.device import emulated
from torch import nn

from advisor.analysis.predict import predictor
from advisor.core.findings import Recommendation
from advisor.core.transform_table import ROWS
from advisor.ops import catalog, dispatch, dispatch_table, dynamo, match, verify
from advisor.transforms import registry
from advisor.trials import planner


def test_it_is_listed_and_ordered():
    assert [row["kernel"] for row in catalog.listing()][:2] == ["slopes/slopes_backward.cu", "slopes/slopes_forward.cu"]
    ordered = planner.order([Recommendation(transform=name) for name in ("fused_slopes", "amp_bf16")])
    assert [r.transform for r in ordered] == ["amp_bf16", "fused_slopes"]
    assert registry.get("fused_slopes").title == "PReLU kernels once more"
    assert callable(predictor(ROWS["fused_slopes"].predictor))


def test_its_kernels_are_verified(emulated):
    family = catalog.get("slopes")
    case = min(family.verification, key=lambda case: sum(work.nbytes for work in case.passes.values()))
    assert verify.check(family, case, "cpu")["passed"]


def test_it_is_put_in_once_it_is_measured():
    net = nn.Sequential(nn.Conv2d(8, 8, 1), nn.PReLU(8)).to(memory_format=torch.channels_last)
    x = torch.randn(2, 8, 4, 4).contiguous(memory_format=torch.channels_last)

    def placed():
        torch._dynamo.reset()
        report = match.MatchReport()
        torch.compile(net, backend=dynamo.backend({"slopes": report}, mode=None), dynamic=False)(x)
        return report.matched

    assert placed() == {}
    measured = {"slopes": {"float32": (0.5, 0.6)}}
    with dispatch_table.instead("slopes", dispatch_table.Entries(measured=measured, taken={"slopes": {"float32"}})):
        assert placed() == {"1": "slopes"}
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A checkout in which the folders of OWN may be written."""
    for folder in (".", *OWN):
        (tmp_path / folder).mkdir(exist_ok=True)
        for entry in (REPOSITORY / folder).iterdir():
            path = (Path(folder) / entry.name).as_posix()
            if path in OWN or entry.name.startswith("."):
                continue
            if entry.is_file() and folder != ".":
                shutil.copy(entry, tmp_path / path)
            else:
                (tmp_path / path).symlink_to(entry)
    return tmp_path


def insert(file: Path, text: str, before: str) -> None:
    there = file.read_text(encoding="utf-8")
    assert there.count(before) == 1
    file.write_text(there.replace(before, text + before), encoding="utf-8")


def test_a_family_is_two_folders_and_three_lines_elsewhere(copy: Path) -> None:
    for folder, names in (("advisor/ops", ("prelu.", '"prelu"', "prelu/", "prelu_")), ("kernels", ("prelu_",))):
        (copy / folder / "slopes").mkdir()
        for file in (REPOSITORY / folder / "prelu").glob("*.*"):
            text = file.read_text(encoding="utf-8")
            for name in names:
                text = text.replace(name, name.replace("prelu", "slopes"))
            text = text.replace("advisor.ops.prelu import", "advisor.ops.slopes import")
            (copy / folder / "slopes" / file.name.replace("prelu", "slopes")).write_text(text, encoding="utf-8")
    insert(copy / "advisor/ops/catalog.py", FAMILY, '    Family(\n        id="batchnorm_max_pool",\n')
    insert(copy / "advisor/core/transform_table.py", ROW, '    family("fused_bn_max_pool"')
    insert(copy / "advisor/analysis/predictions/kernels.py", PREDICTION, "fused_prelu =")
    (copy / "test_slopes.py").write_text(ASKED, encoding="utf-8")
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--show-capture=no",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(copy),
        "test_slopes.py",
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(copy), str(copy / "tests")))}
    done = subprocess.run(words, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "3 passed" in done.stdout
