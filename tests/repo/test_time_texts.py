"""Times and sizes are told in one way on every page: by core/units.py, in the unit that suits them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import advisor

ROOT = Path(advisor.__file__).parent
UNIT = re.compile(r" (ns|us|µs|ms|bytes|KB|MB|GB|KiB|MiB|GiB)\b")
# Tables of one unit, what developers read, and limits that are whole numbers of their unit.
OWN = (
    "bench/",
    "ops/",
    "core/units.py",
    "profiling/machine/clock.py",
    "trials/planfile.py",
    "rules/yaml_nodes.py",
)
TOLD = (
    "profiling/beside/sampler.py",
    "analysis/roofline.py",
    "reporting/charts.py",
)  # "one sample 12 ms beside", "measured bytes"


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each unit that stands right behind a value in a formatted string."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            for value, text in zip(node.values, node.values[1:], strict=False):
                if isinstance(value, ast.FormattedValue) and isinstance(text, ast.Constant) and UNIT.match(text.value):
                    yield node.lineno, f"{{{ast.unparse(value.value)}}}{text.value}"


def test_no_time_or_size_is_told_in_a_unit_of_its_own() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in sorted(ROOT.rglob("*.py"))
        if not path.relative_to(ROOT).as_posix().startswith((*OWN, *TOLD))
        for line, text in texts(path)
    ]
    assert found == []


def test_a_raw_unit_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text('f"{step:.0f} us a step, {size} MB, {count} steps"')
    assert [text for _, text in texts(tmp_path / "a.py")] == ["{step} us a step, ", "{size} MB, "]
