"""YAML as a tree of nodes that know their line and column, read without ever building a Python object from the file.

Rules come from strangers too, so the loader accepts the plain part of YAML only: one document, no tags, no anchors or
aliases, no key twice, bounded size, depth and node count. Everything else is an error that names file, line, column,
what stands there and what to write instead.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from yaml.resolver import Resolver

from advisor.core.errors import AdvisorError

# A shipped rule is about 3 kB with depth 5; the limits leave a hundredfold and stop alias bombs and nesting attacks.
MAX_BYTES = 256 * 1024
MAX_DEPTH = 20
MAX_NODES = 20_000

# libyaml is about ten times faster; both give the same events.
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# What libyaml says, since PyYAML 6.0.4, of brackets that it reads ahead: a thousand levels, before it tells of the first.
_TOO_DEEP_FOR_LIBYAML = "exceeded maximum nesting depth"
_RESOLVER = Resolver()
_TAG_KINDS = {
    "tag:yaml.org,2002:bool": "bool",
    "tag:yaml.org,2002:int": "int",
    "tag:yaml.org,2002:float": "float",
    "tag:yaml.org,2002:null": "null",
    "tag:yaml.org,2002:timestamp": "date",
}


# What a terminal takes as an order: rules are shown in one. A line's end and a tab are text.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True, slots=True)
class YamlMark:
    """A place in a file; line and column count from 1."""

    line: int
    column: int


class RuleError(AdvisorError):
    """A fault in a rule file. `str()` is one line that starts with `file:line:col:`; `excerpt` is that line with a caret."""

    def __init__(
        self, path: str, mark: YamlMark, found: str, *, expected: str = "", fix: str = "", line: str = ""
    ) -> None:
        self.path, self.mark = path, mark
        visible = _CONTROL.sub("\N{REPLACEMENT CHARACTER}", line.replace("\t", " "))[:160]
        self.excerpt = f"  {visible}\n  {' ' * (mark.column - 1)}^" if visible.strip() and mark.column <= 160 else ""
        super().__init__(f"{path}:{mark.line}:{mark.column}: {found}", expected=expected, fix=fix)


@dataclass(frozen=True, slots=True)
class Scalar:
    """One value as written. `kind` is what YAML 1.1 takes a bare word for: text, bool, int, float, null, date."""

    text: str
    kind: str
    mark: YamlMark


@dataclass(frozen=True, slots=True)
class Sequence:
    """A list."""

    items: tuple[Node, ...]
    mark: YamlMark


@dataclass(frozen=True, slots=True)
class Mapping:
    """Keys and values in file order; keys are unique."""

    entries: tuple[tuple[Scalar, Node], ...]
    mark: YamlMark


Node = Scalar | Sequence | Mapping


@dataclass(frozen=True, slots=True)
class YamlDocument:
    """One file: its name for messages, its lines for carets, its tree."""

    path: str
    lines: tuple[str, ...]
    root: Node

    def error(self, mark: YamlMark, found: str, *, expected: str = "", fix: str = "") -> RuleError:
        """The error to raise or collect for this place."""
        return _error(self.path, self.lines, mark, found, expected=expected, fix=fix)


def read(path: Path, name: str = "") -> YamlDocument:
    """Read one file; `name` stands in messages for its path.

    Raises:
        RuleError: when the file is not the plain YAML described above.
        AdvisorError: when it cannot be read.
    """
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise AdvisorError(
            f"{name or path} cannot be read ({error.strerror or error})", expected="a rule file"
        ) from None
    return parse(data, name or str(path))


def parse(data: bytes, name: str) -> YamlDocument:
    """Build the tree from a file's bytes. See `read`."""
    start = YamlMark(1, 1)
    if len(data) > MAX_BYTES:
        raise RuleError(name, start, f"the file is larger than {MAX_BYTES // 1024} KiB", expected="a single rule")
    if data.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
        raise RuleError(name, start, "the file starts with a byte order mark", expected="UTF-8 without one")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise RuleError(
            name, YamlMark(line, 1), f"byte {error.start} is not UTF-8", expected="a UTF-8 text file"
        ) from None
    text = text.replace("\r\n", "\n")
    lines = tuple(text.split("\n"))
    for number, content in enumerate(lines, 1):
        if tab := re.match(r" *\t", content):
            raise _error(name, lines, YamlMark(number, tab.end()), "a tab in the indentation", expected="spaces")
        if control := _CONTROL.search(content):
            mark = YamlMark(number, control.start() + 1)
            raise _error(name, lines, mark, f"control character {control.group()!r}", expected="a text file")
    return YamlDocument(name, lines, _Builder(name, lines).build(text))


def _error(
    path: str, lines: tuple[str, ...], mark: YamlMark, found: str, *, expected: str = "", fix: str = ""
) -> RuleError:
    line = lines[mark.line - 1] if 0 < mark.line <= len(lines) else ""
    return RuleError(path, mark, found, expected=expected, fix=fix, line=line)


class _Builder:
    """Turns parser events into nodes, refusing on the first event that is not allowed."""

    def __init__(self, name: str, lines: tuple[str, ...]) -> None:
        self.name, self.lines, self.count = name, lines, 0

    def fail(self, mark: YamlMark, found: str, expected: str = "", fix: str = "") -> RuleError:
        return _error(self.name, self.lines, mark, found, expected=expected, fix=fix)

    def too_deep(self, mark: YamlMark) -> RuleError:
        return self.fail(mark, f"nested deeper than {MAX_DEPTH} levels")

    def build(self, text: str) -> Node:
        events = yaml.parse(text, Loader=LOADER)
        root: Node | None = None
        try:
            for event in events:
                if isinstance(event, (yaml.ScalarEvent, yaml.CollectionStartEvent, yaml.AliasEvent)):
                    if root is not None:
                        raise self.fail(_mark(event), "a second document", "one rule a file")
                    root = self.node(event, events, 1)
        except yaml.MarkedYAMLError as error:
            raw = error.problem_mark or error.context_mark
            mark = YamlMark(raw.line + 1, raw.column + 1) if raw else YamlMark(1, 1)
            if error.problem == _TOO_DEEP_FOR_LIBYAML:
                raise self.too_deep(mark) from None
            raise self.fail(
                mark, f"not YAML: {error.problem or error.context}", fix=_hint(str(error.problem))
            ) from None
        except yaml.YAMLError as error:
            raise self.fail(YamlMark(1, 1), f"not YAML: {str(error).splitlines()[0]}") from None
        if root is None:
            raise self.fail(YamlMark(1, 1), "the file is empty", "a rule")
        return root

    def node(self, event: Any, events: Any, depth: int) -> Node:
        mark = _mark(event)
        self.count += 1
        if depth > MAX_DEPTH:
            raise self.too_deep(mark)
        if self.count > MAX_NODES:
            raise self.fail(mark, f"more than {MAX_NODES} values in one file")
        if isinstance(event, yaml.AliasEvent):
            raise self.fail(mark, f"the alias *{event.anchor}", "no aliases in rules", "Write the value out.")
        if event.anchor is not None:
            raise self.fail(mark, f"the anchor &{event.anchor}", "no anchors in rules", "Write the value out.")
        if event.tag is not None:
            raise self.fail(
                mark, f"the tag {event.tag!r}", "no tags in rules", "Remove it; every field has its own type."
            )
        if isinstance(event, yaml.ScalarEvent):
            if control := _CONTROL.search(event.value):  # written as an escape, as "\e"
                raise self.fail(mark, f"control character {control.group()!r} in a text", "text to read")
            return Scalar(event.value, _kind(event), mark)
        if isinstance(event, yaml.SequenceStartEvent):
            items = []
            while not isinstance(event := next(events), yaml.SequenceEndEvent):
                items.append(self.node(event, events, depth + 1))
            return Sequence(tuple(items), mark)
        entries: list[tuple[Scalar, Node]] = []
        first: dict[str, YamlMark] = {}
        while not isinstance(event := next(events), yaml.MappingEndEvent):
            key = self.node(event, events, depth + 1)
            if not isinstance(key, Scalar):
                raise self.fail(key.mark, "a list or mapping as a key", "a field name")
            if key.text in first:
                before = first[key.text]
                raise self.fail(key.mark, f"{key.text!r} stands twice; first on line {before.line}", fix="Keep one.")
            first[key.text] = key.mark
            entries.append((key, self.node(next(events), events, depth + 1)))
        return Mapping(tuple(entries), mark)


def _mark(event: Any) -> YamlMark:
    return YamlMark(event.start_mark.line + 1, event.start_mark.column + 1)


def _kind(event: Any) -> str:
    if not event.implicit[0]:
        return "text"
    tag = _RESOLVER.resolve(yaml.ScalarNode, event.value, (True, False))
    return _TAG_KINDS.get(tag, "text")


def _hint(problem: str) -> str:
    if "mapping values are not allowed" in problem:
        return "Put text that holds ': ' in quotes."
    if "cannot start any token" in problem:
        return "Put the text in quotes."
    return ""
