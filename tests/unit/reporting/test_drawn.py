"""Tables drawn for a terminal: they fit its width, and say what the plain text says."""

from __future__ import annotations

import io
import re

import pytest
import samples

from advisor.cli import output
from advisor.reporting import drawn, terminal, terminal_trials
from advisor.reporting.compare import compare_profiles
from advisor.reporting.page import Page

ANSI = re.compile(r"\x1b\[[\d;]*m")


def pages(width: int, color: bool) -> list[str]:
    profile, findings, trials = samples.resnet50(), samples.findings(), samples.trials()
    return [
        terminal.profile_text(profile, findings, width, color, trials=trials, drawn=True),
        terminal_trials.trials_text(trials, width, color, drawn=True),
        terminal.comparison_text(compare_profiles(profile, samples.cpu_run()), width, color, drawn=True),
    ]


@pytest.mark.parametrize("width", [72, 80, 160])
def test_no_line_is_wider_than_the_terminal(width: int):
    for text in pages(width, True):
        plain = ANSI.sub("", text)
        assert "╭" in plain or (plain.startswith("Proved") and width < terminal_trials.WIDE)
        assert [line for line in plain.splitlines() if len(line) > width and not line.startswith("  advisor ")] == []


def test_without_colours_nothing_but_the_colours_is_gone():
    for plain, painted in zip(pages(100, False), pages(100, True), strict=True):
        assert "\x1b" not in plain
        assert ANSI.sub("", painted) == plain


def test_every_number_of_the_plain_text_is_in_the_table():
    trials = samples.trials()
    words = set(re.findall(r"\S+", terminal_trials.trials_text(trials, 160)))
    told = terminal_trials.trials_text(trials, 160, drawn=True)
    assert "╭" in told
    assert sorted(word for word in words if any(c.isdigit() for c in word) and word not in told) == []


def test_a_long_word_is_folded_in_its_column_and_a_name_cannot_drive_the_terminal():
    lines = drawn.table(Page(40, False), ("a", "b"), [("x" * 60, "1.23 ms")], right={1})
    assert "".join(re.findall("x+", "\n".join(lines))) == "x" * 60
    assert max(map(len, lines)) <= 40
    assert sum("1.23 ms" in line for line in lines) == 1


@pytest.mark.parametrize(("tty", "term", "no_color", "drawn_", "coloured"), [
    (True, "xterm", "", True, True), (True, "xterm", "1", True, False),
    (True, "dumb", "", False, False), (False, "xterm", "", False, False),
])  # fmt: skip
def test_tables_are_drawn_on_terminals_alone(monkeypatch, tty, term, no_color, drawn_, coloured):
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("NO_COLOR", no_color)
    stream = type("Stream", (), {"isatty": lambda self: tty})()
    assert (output.on_terminal(stream), output.color(stream)) == (drawn_, coloured)


def test_a_terminal_too_narrow_for_reasons_in_a_column_has_them_below_their_line():
    """At 80 columns the reasons stood in a column of 15, over seven lines each."""
    told = terminal_trials.trials_text(samples.trials(), 80, drawn=True)
    assert told == terminal_trials.trials_text(samples.trials(), 80)


def test_what_advisor_says_is_wrapped_at_words_on_a_terminal_alone(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    text = "advisor: no folder here; expected a run folder, or `last`. `advisor runs` lists them."
    for tty, most in ((True, 40), (False, len(text))):
        stream = io.StringIO()
        stream.isatty = lambda tty=tty: tty
        output.say(text, stream)
        assert max(map(len, stream.getvalue().splitlines())) <= most
        assert stream.getvalue().split() == text.split()


def test_the_verdict_comes_first():
    profile, findings, trials = samples.resnet50(), samples.findings(), samples.trials()
    assert terminal.profile_text(profile, findings).startswith(
        "This step runs at 37 % of this GPU's limit. First to fix:"
    )
    assert terminal.profile_text(profile, findings, trials=trials).startswith("Proved: 3.10×")
    assert terminal_trials.trials_text(trials).startswith("Proved: 3.10×")
    assert terminal_trials.trials_text(trials, headline=False).startswith("Trials")
