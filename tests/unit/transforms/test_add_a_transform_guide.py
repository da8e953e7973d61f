"""docs/guides/add-a-transform.md: its file and its row, put into a copy of advisor, are all that a transform needs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
GUIDE = (REPOSITORY / "docs/guides/add-a-transform.md").read_text(encoding="utf-8")
FILE, ROW = (textwrap.dedent(block) for block in re.findall(r"```python\n(.*?)```", GUIDE, flags=re.DOTALL))

RULE = """\
schema: 1
id: anomaly-mode
title: Anomaly detection is on
area: launch
severity: low
status: experimental
requires: [steps_measured]
when: {all: [{metric: steps_measured, at_least: 1, because: any step}]}
message: Anomaly detection is on.
rationale: It looks at each operation.
transform: anomaly_off
"""

# What reads a row, each asked once: supervisor and rules first, which must not need torch for it.
ASKED = """
import sys
from pathlib import Path
from types import SimpleNamespace

from advisor.analysis.predict import predict
from advisor.core.findings import Recommendation
from advisor.core.transform_table import title
from advisor.rules import load
from advisor.trials import planner, whole

(rule,) = load([Path(sys.argv[1])], shipped=False)
assert (rule.transform, rule.semantics.value) == ("anomaly_off", "exact")
names = ("channels_last", "anomaly_off", "prefetch")
ordered = planner.order([Recommendation(transform=name) for name in names])
assert [r.transform for r in ordered] == ["prefetch", "anomaly_off", "channels_last"]
assert [r.transform for r in whole.members(ordered)] == [r.transform for r in ordered]
assert title("anomaly_off + tf32").startswith("no anomaly detection and ")
assert predict(None, "anomaly_off", {}) is None

import torch

from advisor.transforms import registry

change = registry.get("anomaly_off")
training = SimpleNamespace()
assert (change.title, change.semantics.value, change.live) == ("no anomaly detection", "exact", True)
assert change.match(training, {}).reason == "anomaly detection is off"
torch.autograd.set_detect_anomaly(True)
assert change.match(training, {}).applies
undo = change.apply(training, {})
assert change.effect(training, None, None).passed
undo.run()
assert torch.is_anomaly_enabled()
print("advisor of", Path(registry.__file__).parents[2])
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A checkout in which advisor/core and advisor/transforms may be written; the rest is this one's."""
    for folder, kept in ((REPOSITORY, ("advisor",)), (REPOSITORY / "advisor", ("core", "transforms"))):
        here = tmp_path / folder.relative_to(REPOSITORY)
        here.mkdir(exist_ok=True)
        for entry in folder.iterdir():
            if entry.name not in kept and not entry.name.startswith("."):
                (here / entry.name).symlink_to(entry)
    for name in ("core", "transforms"):
        shutil.copytree(REPOSITORY / "advisor" / name, tmp_path / "advisor" / name)
    return tmp_path


def asked(copy: Path) -> subprocess.CompletedProcess[str]:
    (copy / "anomaly-mode.yaml").write_text(RULE, encoding="utf-8")
    words = [sys.executable, "-c", ASKED, str(copy / "anomaly-mode.yaml")]
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    return subprocess.run(words, cwd=copy, env=environment, capture_output=True, text=True, check=False)


def test_a_transform_is_one_file_and_one_row(copy: Path) -> None:
    (copy / "advisor/transforms/anomaly_off.py").write_text(FILE, encoding="utf-8")
    table = copy / "advisor/core/transform_table.py"
    text = table.read_text(encoding="utf-8")
    table.write_text(text.replace("_ALL = (\n", "_ALL = (\n" + textwrap.indent(ROW, "    "), 1), encoding="utf-8")
    done = asked(copy)
    assert done.stdout == f"advisor of {copy}\n", done.stderr


def test_a_file_without_a_row_is_no_transform(copy: Path) -> None:
    (copy / "advisor/transforms/anomaly_off.py").write_text(FILE, encoding="utf-8")
    assert "no transform 'anomaly_off'" in asked(copy).stderr
