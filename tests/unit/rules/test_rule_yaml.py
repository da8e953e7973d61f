"""The loader takes plain YAML only, and says where and why it refuses the rest."""

from __future__ import annotations

import re
import sys
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advisor.core.errors import AdvisorError
from advisor.rules import yaml_nodes
from advisor.rules.yaml_nodes import Mapping, RuleError, Scalar, Sequence, parse


def test_nodes_know_their_place():
    document = parse(b"a: 1\nb:\n  - x\n  - true\n", "f.yaml")
    assert isinstance(document.root, Mapping)
    (_, first), (key, second) = document.root.entries
    assert isinstance(first, Scalar)
    assert (first.text, first.kind, first.mark.line, first.mark.column) == ("1", "int", 1, 4)
    assert key.mark.line == 2
    assert isinstance(second, Sequence)
    assert [item.kind for item in second.items if isinstance(item, Scalar)] == ["text", "bool"]


@pytest.mark.parametrize(
    ("word", "kind"),
    [("on", "bool"), ("No", "bool"), ("12:30", "int"), ("1e3", "text"), ("1.0e+3", "float"), ("010", "int"),
     ("~", "null"), ("2026-01-01", "date"), ('"on"', "text"), ("15 %", "text"), ("1_000", "int")],
)  # fmt: skip
def test_what_yaml_takes_a_bare_word_for_is_kept_beside_the_word(word, kind):
    document = parse(f"x: {word}\n".encode(), "f.yaml")
    assert isinstance(document.root, Mapping)
    value = document.root.entries[0][1]
    assert isinstance(value, Scalar)
    assert (value.text, value.kind) == (word.strip('"'), kind)


@pytest.mark.parametrize(
    ("data", "line", "column", "words"),
    [
        (b"a: 1\nb: 2\na: 3\n", 3, 1, "'a' stands twice; first on line 1"),
        (b"a: {b: 1, b: 2}\n", 1, 11, "'b' stands twice"),
        (b"a: !!python/object/apply:os.system ['id']\n", 1, 4, "tag"),
        (b"a: !!str 1\n", 1, 4, "tag"),
        (b"a: !include x\n", 1, 4, "tag"),
        (b"a: !%1bc x\n", 1, 4, "the tag '!\\x1bc'"),
        (b"a: &x [1]\nb: 2\n", 1, 4, "anchor &x"),
        (b"b: *x\n", 1, 4, "alias"),
        (b"a: 1\n---\nb: 2\n", 3, 1, "second document"),
        (b"? [1]\n: 2\n", 1, 3, "as a key"),
        (b"a:\n\tb: 1\n", 2, 1, "tab"),
        (b"a: \x00\n", 1, 4, "control character"),
        (b'a: "\\e[2J"\n', 1, 4, "control character '\\x1b' in a text"),
        (b'a: ["x", "\\x9b2J"]\n', 1, 10, "control character '\\x9b' in a text"),
        (b'"\\r": 1\n', 1, 1, "control character '\\r' in a text"),
        (b"\xef\xbb\xbfa: 1\n", 1, 1, "byte order mark"),
        ("a: 1\n".encode("utf-16"), 1, 1, "byte order mark"),
        (b"a: 1\nb: \xff\n", 2, 1, "UTF-8"),
        (b"", 1, 1, "empty"),
        (b"# only a comment\n", 1, 1, "empty"),
        (b"a: b: c\n", 1, 5, "quotes"),
        (b"a: [1\n", 2, 1, "not YAML"),
        (b"a: @x\n", 1, 4, "quotes"),
        (b"x" * (yaml_nodes.MAX_BYTES + 1), 1, 1, "larger than 256 KiB"),
    ],
)
def test_faults_are_named_with_their_place(data, line, column, words):
    with pytest.raises(RuleError) as caught:
        parse(data, "rules/f.yaml")
    text = str(caught.value)
    assert re.match(rf"rules/f\.yaml:{line}:{column}: ", text), text
    assert words in text
    assert "\n" not in text
    if caught.value.excerpt:
        assert caught.value.excerpt.splitlines()[1].index("^") == column + 1


def test_an_alias_bomb_is_refused_at_its_first_anchor():
    bomb = "a: &a [x, x]\n" + "".join(
        f"{chr(98 + i)}: &{chr(98 + i)} [*{chr(97 + i)}, *{chr(97 + i)}]\n" for i in range(20)
    )
    with pytest.raises(RuleError, match="anchor &a"):
        parse(bomb.encode(), "bomb.yaml")


@pytest.mark.parametrize("data", [b"[" * 5000, b"a: " + b"{b: " * 5000, b"- " * 3000 + b"x"])
def test_deep_nesting_is_refused_fast(data):
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        with pytest.raises(RuleError, match="nested deeper than 20"):
            parse(data, "deep.yaml")
    finally:
        sys.setprofile(None)
    assert calls < 2000  # of Python's functions, for some thousand levels


def test_too_many_values_are_refused():
    with pytest.raises(RuleError, match="more than 20000 values"):
        parse(b"[" + b"1," * 30_000 + b"1]", "wide.yaml")


def test_windows_line_ends_are_as_good_as_others():
    assert parse(b"a: 1\r\nb: 2\r\n", "f").root == parse(b"a: 1\nb: 2\n", "f").root


def test_a_missing_file_is_one_clear_line(tmp_path):
    with pytest.raises(AdvisorError, match="cannot be read"):
        yaml_nodes.read(tmp_path / "none.yaml")


def test_the_slow_parser_gives_the_same_tree_and_the_same_refusals(monkeypatch):
    import yaml

    good, bad = b"a: [1, {b: 'c'}]\n", b"a: 1\na: 2\n"
    fast = parse(good, "f").root
    monkeypatch.setattr(yaml_nodes, "LOADER", yaml.SafeLoader)
    assert parse(good, "f").root == fast
    with pytest.raises(RuleError, match="f:2:1: 'a' stands twice"):
        parse(bad, "f")


@settings(max_examples=200)
@given(st.binary(max_size=80) | st.text(alphabet="ab:-[]{},&*!|>'\"#%@?~ \n\t0", max_size=80).map(str.encode))
def test_any_bytes_are_read_or_refused_never_worse(data):
    with suppress(RuleError):
        parse(data, "f.yaml")


def test_an_excerpt_gives_a_terminal_no_orders():
    with pytest.raises(RuleError) as raised:
        parse(b"a: \x1b[2J\n", "f.yaml")
    assert raised.value.excerpt.splitlines()[0] == "  a: \N{REPLACEMENT CHARACTER}[2J"
    assert parse(b'a: "one\\n\\ttwo"\n', "f.yaml").root.entries[0][1].text == "one\n\ttwo"
