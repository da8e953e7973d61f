from __future__ import annotations

from pathlib import Path

from advisor.cli.main import COMMANDS
from advisor.cli.reference import page

COMMITTED = Path(__file__).resolve().parents[3] / "docs" / "reference" / "cli.md"


def test_the_page_is_current() -> None:
    assert COMMITTED.read_text(encoding="utf-8") == page(), "python -m advisor.cli.reference > docs/reference/cli.md"


def test_every_command_and_what_is_below_it_is_there() -> None:
    text = page()
    assert [name for name in COMMANDS if f"## advisor {name}\n" not in text] == []
    assert "## advisor rules test\n" in text
    assert "## advisor kernels verify\n" in text
    assert "--min-gain" in text


def test_the_page_does_not_depend_on_the_terminal(monkeypatch) -> None:
    first = page()
    monkeypatch.setenv("COLUMNS", "40")
    assert page() == first
