"""Defaults of the command line from `[tool.advisor]` of the nearest pyproject.toml: `[tool.advisor.profile]` with `steps = 50`.

What is typed wins. Keys are the options' names; those right below `[tool.advisor]` hold for every command that has the option.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from advisor.core.errors import AdvisorError, cause

FILE, TABLE = "pyproject.toml", "tool.advisor"


def defaults(command: click.Command, name: str, every: Mapping[str, Callable[[], click.Command]]) -> dict[str, Any]:
    """What pyproject.toml says for this command, by parameter.

    Args:
        every: all commands by name, whose tables may stand beside it; each is loaded only where a key may be its own.

    Raises:
        AdvisorError: for a file that cannot be read, and for a key that no option has.
    """
    path, table = _table()
    if not table:
        return {}
    options = _options(command)
    shared = {key: value for key, value in table.items() if key not in every}
    if shared:
        _check(shared, path, TABLE, {key: to for load in every.values() for key, to in _options(load()).items()})
    own = table.get(name, {})
    if not isinstance(own, dict):
        raise AdvisorError(f"{path}: {TABLE}.{name} is {own!r}", expected="a table of options")
    _check(own, path, f"{TABLE}.{name}", options)
    wanted = {**{key: value for key, value in shared.items() if key in options}, **own}
    return {options[key]: _value(value) for key, value in wanted.items()}


def _table() -> tuple[Path, dict[str, Any]]:
    """The nearest pyproject.toml from here upwards, and its table; an empty one where there is none."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        path = folder / FILE
        if path.is_file():
            return path, _read(path)
        if (folder / ".git").exists():
            break
    return here / FILE, {}


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise AdvisorError(f"{path} cannot be read ({cause(error)})") from None
    if f"[{TABLE}" not in text:
        return {}
    if sys.version_info < (3, 11):
        raise AdvisorError(
            f"{path} has [{TABLE}], which needs Python 3.11", fix="Give the options on the command line."
        )
    import tomllib

    try:
        found = tomllib.loads(text).get("tool", {}).get("advisor", {})
    except tomllib.TOMLDecodeError as error:
        raise AdvisorError(f"{path} is not TOML ({error})") from None
    return found if isinstance(found, dict) else {}


def _options(command: click.Command) -> dict[str, str]:
    """The long options of the command without their dashes, each with its parameter's name."""
    return {
        option[2:]: parameter.name
        for parameter in command.params
        if isinstance(parameter, click.Option) and parameter.name and parameter.expose_value
        for option in parameter.opts
        if option.startswith("--")
    }


def _check(given: dict[str, Any], path: Path, table: str, options: dict[str, str]) -> None:
    """Raises AdvisorError for a key that no option has; of shared keys any option's will do."""
    for key in given:
        if key not in options:
            near = difflib.get_close_matches(key, options, 1)
            fix = f"Did you mean {near[0]!r}?" if near else f"Options: {', '.join(sorted(options))}."
            raise AdvisorError(f"{path}: {table} has {key!r}, which is no option", fix=fix)


def _value(value: Any) -> Any:
    """As click's default map takes it: lists for repeatable options, text and numbers as typed."""
    return [str(v) for v in value] if isinstance(value, list) else value if isinstance(value, bool) else str(value)
