"""Option types and options that several commands share."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from advisor.cli import completion

F = TypeVar("F", bound=Callable[..., Any])

SEVERITIES = ("info", "low", "medium", "high")

MOST_HOURS = 720  # a month; far below where the system's timers end
MOST_STEPS = 1_000_000

_DURATION = re.compile(r"(?:(?P<h>\d+(?:\.\d+)?)h)?(?:(?P<m>\d+(?:\.\d+)?)m)?(?:(?P<s>\d+(?:\.\d+)?)s?)?")


class Percent(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on only
    """A share: `3%`, or the fraction `0.03`. A bare number of 1 or more is refused, since it could mean either."""

    name = "percent"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the fraction, 0 to 1."""
        if isinstance(value, float):
            return value
        text = str(value).strip()
        try:
            number = float(text[:-1]) / 100 if text.endswith("%") else float(text)
        except ValueError:
            self.fail(f"{text!r} is not a share; write 3% or 0.03", param, ctx)
        if not text.endswith("%") and number >= 1:
            self.fail(f"{text!r} could mean {text}% or a factor; write {text}% or a fraction below 1", param, ctx)
        if not 0 <= number < 1 or math.isnan(number):
            self.fail(f"{text!r} is outside 0% to 100%", param, ctx)
        return number


class Part(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on only
    """One of several parts: `2/4`."""

    name = "part"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        """Return its number, from 1 on, and how many there are."""
        if isinstance(value, tuple):
            return value
        match = re.fullmatch(r"\s*(\d+)\s*/\s*(\d+)\s*", str(value))
        number, parts = map(int, match.groups()) if match else (0, 0)
        if not 1 <= number <= parts:
            self.fail(f"{value!r} is not a part; write 1/4 to 4/4", param, ctx)
        return number, parts


# Binary and decimal: "gib" and "gb".
_SIZES = {f"{prefix}{end}": base**n for n, prefix in enumerate("kmgt", 1) for end, base in (("ib", 1024), ("b", 1000))}
_SIZES |= {"": 1, "b": 1}


class Bytes(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on only
    """A size: `24GiB`, `800MB`; a bare number counts bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return bytes."""
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(value).lower())
        if match is None or match.group(2) not in _SIZES:
            self.fail(f"{value!r} is not a size; write 24GiB or 800MB", param, ctx)
        return int(float(match.group(1)) * _SIZES[match.group(2)])


class Duration(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on only
    """A time span: `90s`, `10m`, `1h30m`; a bare number counts seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return seconds, above 0."""
        if isinstance(value, float):
            return value
        text = str(value).strip().lower().replace(" ", "")
        match = _DURATION.fullmatch(text)
        seconds = (
            sum(float(match[unit] or 0) * size for unit, size in (("h", 3600), ("m", 60), ("s", 1))) if match else 0
        )
        if not seconds:
            self.fail(f"{value!r} is not a time span above zero; write 90s, 10m or 1h30m", param, ctx)
        if seconds > MOST_HOURS * 3600:
            self.fail(f"{value!r} is more than {MOST_HOURS} h", param, ctx)
        return float(seconds)


class Age(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on only
    """How long ago: `12h`, `30d`, `8w`."""

    name = "age"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return seconds, 0 or more."""
        if isinstance(value, float):
            return value
        match = re.fullmatch(r"(\d{1,6}(?:\.\d+)?)\s*([hdw])", str(value).strip().lower())
        if match is None:
            self.fail(f"{value!r} is no age; write 12h, 30d or 8w", param, ctx)
        return float(match[1]) * {"h": 3600.0, "d": 86400.0, "w": 604800.0}[match[2]]


class Override(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on only
    """`RULE.METRIC=VALUE`: another threshold for one condition of one rule."""

    name = "rule.metric=value"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        """Return (`RULE.METRIC`, `VALUE`), both as written."""
        key, equals, text = str(value).partition("=")
        rule, dot, metric = key.strip().rpartition(".")
        if not (equals and dot and rule and metric and text.strip()):
            self.fail(f"{value!r} is not RULE.METRIC=VALUE, such as launch-bound.idle_launch_frac=0.1", param, ctx)
        return key.strip(), text.strip()


SCRIPT_CONTEXT = {"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]}

# Everything after the first positional belongs to the script, untouched, options included.
words_argument = click.argument(
    "words", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGS]...", shell_complete=completion.files
)
# The same, of commands that know from an earlier run what to start.
known_words_argument = click.argument(
    "words", nargs=-1, type=click.UNPROCESSED, metavar="[SCRIPT [ARGS]...]", shell_complete=completion.files
)
# A flag, not an option with a value: with a value click would go on reading the module's own options as ours.
module_option = click.option("-m", "module", is_flag=True, help="SCRIPT is a module to run, as in `python -m`.")
run_argument = click.argument("run", metavar="[RUN]", default="last", shell_complete=completion.runs)


def rules_option(function: F) -> F:
    """`--rules DIR`, repeatable: more rules beside the bundled ones."""
    return click.option(
        "--rules",
        "rules_dirs",
        multiple=True,
        type=click.Path(exists=True, path_type=Path),
        metavar="DIR",
        help="Load more rules from this folder (repeatable).",
    )(function)


def format_option(*formats: str) -> Callable[[F], F]:
    """`--format`, of which the first in `formats` is the default, and `--json`, which is `--format json`."""

    def add(function: F) -> F:
        function = click.option(
            "--json",
            "as_json",
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_note,
            help="As --format json.",
        )(function)
        return click.option(
            "--format",
            "form",
            type=click.Choice(formats),
            default=formats[0],
            show_default=True,
            callback=_form,
            help="How to show it.",
        )(function)

    return add


_AS_JSON = "advisor.as_json"  # whether `--json` was given, for `--format`, which click asks later


def _note(context: click.Context, _: click.Parameter, given: bool) -> None:
    context.meta[_AS_JSON] = given


def _form(context: click.Context, option: click.Parameter, value: str) -> str:
    if not context.meta.get(_AS_JSON):
        return value
    written = context.get_parameter_source(option.name or "") is ParameterSource.COMMANDLINE
    if written and value != "json":
        raise click.UsageError(f"--json and --format {value} contradict each other", context)
    return "json"


def fail_on_option(function: F) -> F:
    """`--fail-on SEVERITY`."""
    return click.option(
        "--fail-on",
        type=click.Choice(SEVERITIES),
        metavar="SEVERITY",
        help="Exit with 1 when a rule of this severity or above fires: info, low, medium or high.",
    )(function)


def verbosity_options(function: F) -> F:
    """`-q` and `-v`; with both, `-q` wins."""
    function = click.option("-q", "--quiet", is_flag=True, help="No progress and no report on stderr; files only.")(
        function
    )
    return click.option("-v", "--verbose", is_flag=True, help="Every progress message on a line of its own.")(function)


def gpus_options(function: F) -> F:
    """`--gpus`, `--allow` and `--shard`."""
    function = click.option(
        "--shard",
        type=click.Choice(["zero1", "fsdp2", "hybrid", "pipeline"]),
        help="With --gpus: each rank keeps a share of the optimizer's state (zero1), or of weights and gradients too (fsdp2; hybrid: within each half of the ranks). Or it computes some of the layers for the whole batch (pipeline).",
    )(function)
    function = click.option(
        "--allow",
        type=click.Choice(["training"]),
        help="With --gpus: allow each rank to train on its part of the batch, with its own batch norms, as DistributedDataParallel does.",
    )(function)
    return click.option(
        "--gpus",
        type=click.IntRange(1, 1024),
        metavar="N",
        default=1,
        show_default=True,
        help="Train a SCRIPT for one GPU on N GPUs of this host. Each batch is divided among them.",
    )(function)
