"""The guide names everything that a user can write, and its example does what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from suites import PLUGIN, REPO

from advisor.testing import marker, options, plugin
from advisor.testing.comparing import Comparison
from advisor.testing.measured import Measured
from advisor.testing.quantities import BY_KEY

GUIDE = (REPO / "docs" / "guides" / "pytest.md").read_text(encoding="utf-8")


def names() -> set[str]:
    asserted = {name for owner in (Measured, Comparison) for name in vars(owner) if name.startswith("assert_")}
    flags = set(re.findall(r'"(--perf[\w-]+)"', Path(options.__file__).read_text(encoding="utf-8")))
    return asserted | flags | plugin.FIXTURES | {*marker.KEYWORDS} | {f"`{key}`" for key in BY_KEY}


def test_everything_that_can_be_written_is_in_the_guide() -> None:
    assert len(names()) > 60
    assert sorted(name for name in names() if name not in GUIDE) == []


def test_the_recipes_use_flags_that_exist_and_limits_that_can_be_read() -> None:
    commands = re.findall(r"pytest (--perf[^\n`]*)", GUIDE)
    assert len(commands) >= 4
    for command in commands:
        for word in command.split():
            flag, _, value = word.partition("=")
            if flag.startswith("--perf"):
                assert flag in names(), command
            if flag == "--perf-compare-fail":
                assert options.limits_of(value)


@pytest.mark.parametrize("reads", [pytest.param(False, marks=pytest.mark.long), True])
def test_the_readmes_example_does_what_it_says(pytester: pytest.Pytester, reads: bool) -> None:
    text = (REPO / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(def test_training_step.*?)```", text, re.DOTALL)
    pytester.makepyfile(
        f"""
import torch
from torch import nn
torch.set_num_threads(1)

def make_training_step():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 4))
    images, labels = torch.randn(4, 3, 8, 8), torch.randint(0, 4, (4,))
    def step():
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        if {reads}:
            print(loss.item())  # the line
    return step

{example}
"""
    )
    result = pytester.runpytest_subprocess(*PLUGIN)
    result.assert_outcomes(passed=int(not reads), failed=int(reads))
    if reads:
        shown = re.search(r"```text\n(E +AssertionError.*?)```", text, re.DOTALL)
        assert shown is not None
        for line in shown[1].splitlines():
            pattern = re.escape(line).replace(r"test_training\.py:17", r"test_\w+\.py:\d+")
            assert re.search(pattern, result.stdout.str()), line
