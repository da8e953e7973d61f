from __future__ import annotations

import io

import pytest
import screen

from advisor.cli.progress import BAR, ProgressLine


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_counting_messages_are_sparse_without_a_terminal():
    stream = io.StringIO()
    with ProgressLine(stream, live=True) as say:
        for i in range(20):
            say(f"timing step {i} of 20")
        say("tracing\n3 steps")
    assert stream.getvalue() == "[advisor] timing step 0 of 20\n[advisor] tracing 3 steps\n"


def test_counting_messages_come_again_after_a_while(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    stream = io.StringIO()
    say = ProgressLine(stream)
    say("step 1")
    now[0] += 5
    say("step 2")
    now[0] += 6
    say("step 3")
    assert stream.getvalue().splitlines() == ["[advisor] step 1", "[advisor] step 3"]


def test_live_line_is_replaced_and_ended(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "30")
    stream = Terminal()
    with ProgressLine(stream, live=True) as say:
        say("pair 1 of 6")
        say("pair 2 of 6")
        say("trying something with a very long name indeed")
    lines = stream.getvalue().split("\n")
    assert lines[0] == "\r\x1b[2K[advisor] pair 1 of 6\r\x1b[2K[advisor] pair 2 of 6"
    cut, whole = lines[1].removeprefix("\r\x1b[2K").split("\r\x1b[2K")
    assert len(cut) < 30  # while it may change it fits on a line
    whole = [whole, *lines[2:-1]]  # what stays is whole, and tears no word apart
    assert " ".join(line.strip() for line in whole) == "[advisor] trying something with a very long name indeed"
    assert max(map(len, whole)) <= 30
    assert stream.getvalue().endswith("\n")


def test_verbose_says_all_and_quiet_nothing():
    loud, still = Terminal(), Terminal()
    for i in range(3):
        ProgressLine(loud, verbose=True)(f"step {i}")
        ProgressLine(still, quiet=True)(f"step {i}")
    assert loud.getvalue().count("\n") == 3
    assert still.getvalue() == ""


def test_a_closed_stream_stops_nothing():
    stream = io.StringIO()
    say = ProgressLine(stream)
    stream.close()
    say("step 1")
    say.close()


def test_a_terminal_tears_no_word_apart_and_a_log_has_one_line_for_one_message(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    terminal, log = Terminal(), io.StringIO()
    text = "what native libraries write, and what is sent elsewhere, is not put back within 12 s"
    for stream in (terminal, log):
        ProgressLine(stream)(text)
    assert log.getvalue() == f"[advisor] {text}\n"
    lines = screen.laid_out(terminal.getvalue().replace("\n", "\r\n"), 40)[:-1]
    assert len(lines) > 1
    assert max(map(len, lines)) <= 40
    assert " ".join(line.strip() for line in lines) == f"[advisor] {text}"
    assert lines[-1].startswith(" " * 10)


@pytest.mark.parametrize("columns", [80, 200])
def test_a_bar_of_the_scripts_stays_whole_and_nothing_stands_behind_it(monkeypatch, columns):
    """tqdm leaves its cursor behind the bar, and begins the next by going back to the line's start. The size of stdout, which may be
    a file, is not the terminal's.
    """
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with screen.terminal(columns) as (stream, master):
        with ProgressLine(stream) as say:
            say("running train.py")
            for number in range(4):
                for done in (2 * number, 2 * number + 1):
                    stream.write(f"\r{done:3}%|{'#' * done:<{columns - 20}}| {done}/8")
                say(f"step {number} of 4" if number % 2 else f"phase {number} of 4")
            # The script is stopped here: its bar is never closed.
        stream.write("the report\n")
        stream.flush()
        lines = screen.shown(master, columns)
    assert max(map(len, lines)) <= columns
    assert lines[0] == "[advisor] running train.py"
    ours = [line for line in lines if "[advisor]" in line or "report" in line]
    assert ours == [
        "[advisor] running train.py", "[advisor] phase 0 of 4", "[advisor] step 1 of 4", "[advisor] phase 2 of 4",
        "[advisor] step 3 of 4", "the report",
    ]  # fmt: skip
    bars = [line for line in lines if line.endswith("/8")]
    assert [bar[-3] for bar in bars] == ["1", "3", "5", "7"]
    assert not [line for line in lines if line not in (*ours, *bars, "")]
    assert "" not in lines[: len(ours) + len(bars)]  # and where the script has left none, no line is blank


def test_a_line_that_the_script_has_ended_leaves_no_blank_one():
    with screen.terminal(40) as (stream, master):
        with ProgressLine(stream) as say:
            for text in ("running train.py", "reading the trace"):
                stream.write("x" * 40 + "\n")  # as wide as the terminal
                say(text)
        stream.write("the report\n")
        stream.flush()
        lines = screen.shown(master, 40)
    assert lines == ["x" * 40, "[advisor] running train.py", "x" * 40, "[advisor] reading the trace", "the report", ""]


def test_what_takes_long_says_how_long_it_still_takes(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    loud = Terminal()
    say = ProgressLine(loud, verbose=True)
    for done, passed in ((2, 0), (3, 2), (6, 6), (10, 8)):
        now[0] = 100.0 + passed
        say(f"timed: {done} of 10 steps")
    told = [line for line in loud.getvalue().replace("\r\x1b[K", "\n").splitlines() if "timed" in line]
    assert [line.partition(" steps")[2] for line in told] == ["", ", about 14 s left", ", about 6 s left", ""]


def test_what_is_short_does_not(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    stream = Terminal()
    say = ProgressLine(stream, verbose=True)
    for done in range(4):
        now[0] += 0.1
        say(f"timed: {done} of 10 steps")
    assert "left" not in stream.getvalue()


class Encoded(Terminal):
    encoding = "utf-8"


@pytest.mark.parametrize("no_color", ["", "1"])
def test_a_message_that_counts_on_has_a_bar_while_it_may_change(monkeypatch, no_color):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", no_color)
    stream = Encoded()
    with ProgressLine(stream, live=True) as say:
        say("measuring pool: case 1 of 4")
        say("measuring pool: case 3 of 4")
    first, second, last = stream.getvalue().removeprefix("\r\x1b[2K").split("\r\x1b[2K")
    assert ("\x1b[" in second) is (not no_color)
    if no_color:  # the bar is as long as what is done
        assert (first.count("━"), second.count("━")) == (BAR // 4, 3 * BAR // 4)
    assert first.startswith("[advisor] measuring pool: case 1 of 4  ")
    assert last == "[advisor] measuring pool: case 3 of 4\n"  # and gone when the line stays


def test_a_stream_that_has_no_such_characters_gets_no_bar(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    stream = Terminal()  # of no known encoding
    with ProgressLine(stream, live=True) as say:
        say("case 1 of 4")
    assert stream.getvalue() == "\r\x1b[2K[advisor] case 1 of 4\n"
