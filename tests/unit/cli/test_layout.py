"""Markdown in a terminal."""

from advisor.cli.layout import rendered, table

TEXT = "### launch-bound\n\n**The GPU waits** for `cudaLaunchKernel`.\n- one\n  - two"


def test_marks_become_styles_where_colours_are_on():
    shown = rendered(TEXT, color=True)
    assert "\x1b[1mlaunch-bound\x1b[0m" in shown
    assert "\x1b[1mThe GPU waits\x1b[0m for \x1b[36mcudaLaunchKernel\x1b[0m." in shown
    assert shown.endswith("• one\n  • two")


def test_pipes_get_the_text_as_it_is():
    assert rendered(TEXT, color=False) == TEXT


def test_of_a_table_too_wide_the_last_columns_go_below_their_row():
    rows = [("change", "status", "why"), ("compile", "kept", "12 % saved " * 8)]
    lines = "\n".join(table(rows, 60, below=1)).splitlines()
    assert lines[:3] == ["  change   status", "      why", "  compile  kept"]
    assert max(map(len, lines)) <= 60
    assert table(rows, 200, below=1)[0] == "  change   status  why"
