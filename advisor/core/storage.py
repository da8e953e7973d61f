"""Plain-data dataclasses to versioned JSON and back; files written so that a crash leaves the old or the new one."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import math
import os
import secrets
import stat
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, Union

from advisor.core.errors import AdvisorError, cause

SCHEMA_VERSION = 1
_WRITTEN = "what advisor wrote"
T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """A JSON-ready copy of a dataclass tree. NaN and infinities become None: JSON has no word for them.

    The underscore behind a field that would else be a word of Python's (`pass_`) stays behind.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {_key(f): to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(k): to_plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(v) for v in value]
    if isinstance(value, Path):
        return str(value)
    return value


def _key(field: dataclasses.Field[Any]) -> str:
    return field.name.removesuffix("_")


def from_plain(cls: type[T], data: Any, where: str = "$") -> T:
    """Rebuild `cls` from `to_plain` output, checking every type.

    Raises:
        AdvisorError: naming the JSON path of the first value that does not fit. Unknown keys are ignored, so that a
            file written by a newer minor version still loads.
    """
    return typing.cast(T, _convert(cls, data, where))


def _convert(kind: Any, data: Any, where: str) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return data
    if origin in (Union, types.UnionType):
        if data is None and type(None) in args:
            return None
        options = [a for a in args if a is not type(None)]
        for option in options[:-1]:
            try:
                return _convert(option, data, where)
            except AdvisorError:
                continue
        return _convert(options[-1], data, where)
    if origin is tuple and isinstance(data, list):
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(_convert(args[0], v, f"{where}[{i}]") for i, v in enumerate(data))
        if len(args) == len(data):
            return tuple(_convert(a, v, f"{where}[{i}]") for i, (a, v) in enumerate(zip(args, data, strict=True)))
    if origin is list and isinstance(data, list):
        return [_convert(args[0], v, f"{where}[{i}]") for i, v in enumerate(data)]
    if origin is dict and isinstance(data, dict):
        return {k: _convert(args[1], v, f"{where}.{k}") for k, v in data.items()}
    if dataclasses.is_dataclass(kind) and isinstance(data, dict):
        hints = typing.get_type_hints(kind)
        values = {}
        for field in dataclasses.fields(kind):
            key = _key(field)
            if key in data:
                values[field.name] = _convert(hints[field.name], data[key], f"{where}.{key}")
            elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                raise AdvisorError(f"{where}.{key} is missing", expected=_WRITTEN, fix="Record the run again.")
        return typing.cast(Any, kind)(**values)
    if isinstance(data, int) and abs(data) >= 1 << 63:
        raise AdvisorError(f"{where} is an integer of {data.bit_length()} bits", expected="at most 64 bits")
    if isinstance(kind, type):
        if issubclass(kind, enum.Enum):
            try:
                return kind(data)
            except ValueError:
                raise AdvisorError(
                    f"{where} is {data!r}", expected="one of " + ", ".join(str(m.value) for m in kind)
                ) from None
        if kind is float and isinstance(data, (int, float)) and not isinstance(data, bool):
            return float(data)
        if kind is float and data is None:
            return math.nan
        if isinstance(data, kind) and not (kind is int and isinstance(data, bool)):
            return data
    shown = "" if data is None else f" {str(data)[:60]!r}"
    raise AdvisorError(f"{where} is {_word(data)}{shown}", expected=_expected(kind))


def _expected(kind: Any) -> str:
    """What stands for a value of this type in JSON."""
    if dataclasses.is_dataclass(kind):
        return f"an object ({getattr(kind, '__name__', kind)})"
    words = {str: "text", bool: "true or false", int: "a whole number", float: "a number"}
    return words.get(kind) or {tuple: "a list", list: "a list", dict: "an object"}.get(
        typing.get_origin(kind), str(kind)
    )


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` through a temporary file in the same folder, flushed to disk, then renamed over it. The umask says who
    may read it; a file that is written again keeps its mode.

    What stands for the bytes of a file's name that is no UTF-8 is written as `\\udce9`, which JSON reads back as it was.

    Raises:
        AdvisorError: where it cannot be written, as on a full disk; what was at `path` is still there.
    """
    try:
        _write_text(path, text)
    except OSError as error:
        raise AdvisorError(
            f"cannot write {path} ({cause(error)})", fix="Make room there, or see that you may write there."
        ) from None


def _write_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not by mkstemp, which lets nobody else read what it makes: as any file of the user's, by the umask, or as the one replaced.
    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}.tmp")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o666)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.chmod(temporary, stat.S_IMODE(path.stat().st_mode))
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def save(path: Path, value: Any) -> None:
    """Write a dataclass tree as JSON with `schema_version` first.

    Raises:
        AdvisorError: as `write_text`.
    """
    plain = to_plain(value)
    document = {"schema_version": SCHEMA_VERSION, "type": type(value).__name__, **plain}
    write_text(path, json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def load(path: Path, cls: type[T]) -> T:
    """Read what `save` wrote.

    Raises:
        AdvisorError: when the file is missing, unreadable, not JSON, of another schema version or of another shape.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise AdvisorError(f"no {path.name} in {path.parent}", fix="Run `advisor profile` first.") from None
    except OSError as error:
        raise AdvisorError(f"{path} cannot be read ({cause(error)})", expected=_WRITTEN) from None
    except json.JSONDecodeError as error:
        found = f"{path}:{error.lineno}:{error.colno}: cut off, or no JSON ({error.msg})"
        raise AdvisorError(found, expected=_WRITTEN, fix="Record the run again.") from None
    except (ValueError, RecursionError):  # bytes that are no UTF-8, numbers without end, brackets in thousands
        raise AdvisorError(f"{path} is no JSON", expected=_WRITTEN) from None
    if not isinstance(document, dict):
        raise AdvisorError(f"{path} holds {_word(document)}", expected=_WRITTEN)
    _check_head(path, document, cls)
    return from_plain(cls, document, f"{path}: $")


def _check_head(path: Path, document: Mapping[str, Any], cls: type) -> None:
    version = document.get("schema_version")
    if version != SCHEMA_VERSION:
        newer = isinstance(version, int) and version > SCHEMA_VERSION
        raise AdvisorError(
            f"{path} has schema_version {version!r}" + (", of a newer advisor" if newer else ""),
            expected=str(SCHEMA_VERSION),
            fix=("Update advisor, or record" if newer else "Record") + " the run again with this version of advisor.",
        )
    kind = document.get("type", cls.__name__)
    if kind != cls.__name__:
        raise AdvisorError(f"{path} holds a {kind}", expected=f"a {cls.__name__}")


def _word(value: Any) -> str:
    """What JSON calls a value."""
    words = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return words.get(type(value), "a number")
