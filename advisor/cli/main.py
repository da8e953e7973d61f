"""The `advisor` command: a click group whose commands are imported when they are asked for."""

from __future__ import annotations

import difflib
import itertools
import os
import sys
import traceback
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any, NoReturn

import click

from advisor import __version__
from advisor.cli import settings
from advisor.cli.help import HelpGroup
from advisor.core.errors import INTERRUPTED, AdvisorError, ExitCode, first_line

# name → (module under advisor.cli, attribute, one line of help). The line stands here so that `--help` imports no command.
COMMANDS: dict[str, tuple[str, str, str]] = {
    "profile": ("profile", "profile", "Run a training script and see where a step's time goes."),
    "recommend": ("recommend", "recommend", "Show what would make a recorded run faster, and by how much."),
    "explain": ("explain", "explain", "Explain a rule, a change, or what was found in a run."),
    "apply": ("apply", "apply", "Try each change live; keep what is right and faster; write a plan."),
    "try": ("try_command", "try_", "Try one change or one patch: is it right, and is it faster?"),
    "plan": ("plan", "plan", "Show a plan; write its changes as Python, or as a diff of your script."),
    "run": ("run", "run", "Train with a proved plan. Nothing is searched."),
    "undo": ("undo", "undo", "Take back what `plan show --write` wrote into a script."),
    "report": ("report", "report", "Show a recorded run again: text, HTML, JSON, Markdown, Perfetto, SARIF."),
    "memory": ("memory", "memory", "Show which tensors hold the memory of a step, and how to use less."),
    "scale": ("scale", "scale", "Predict a step on several GPUs from a recorded run on one."),
    "conv": ("conv", "conv", "Show which algorithm runs each convolution of a recorded run."),
    "compare": ("compare", "compare", "Compare two recorded runs, with an interval for the difference."),
    "repro": ("repro", "repro", "Print a script that repeats one operator of a run, without the model."),
    "runs": ("runs", "runs", "List the runs in advisor-runs/ here, or remove them."),
    "rules": ("rules_commands", "rules", "List, show, test and lint the rules, and list their metrics."),
    "kernels": ("kernels", "kernels", "List the bundled CUDA kernels, or check them on this GPU."),
    "bench": ("bench", "bench", "Measure the bundled kernels, or whole models, on this machine."),
    "doctor": ("doctor", "doctor", "Check what can be measured here, and how to get the rest."),
}

# Words that people try in place of a command, and what does it here.
MEANT = {
    "show": "`advisor report last` shows the newest run, `advisor plan show` the plan.",
    "list": "`advisor runs` lists runs, `advisor rules list` rules, `advisor kernels list` kernels.",
    "clean": "`advisor runs clean --keep 3` removes all runs here but the newest three.",
    "optimize": "`advisor apply --auto train.py` tries changes, and keeps what helps.",
    "search": "`advisor apply --auto train.py` tries changes, and keeps what helps.",
    "train": "`advisor run train.py` trains with the proved plan.",
    "diff": "`advisor plan show --diff` prints a plan as a diff of the script, `advisor compare A B` compares two runs.",
}
CLOSED_PIPE = 128 + 13  # as a shell reports SIGPIPE


def _imported(name: str) -> click.Command:
    module, attribute, _ = COMMANDS[name]
    command = getattr(import_module(f"advisor.cli.{module}"), attribute)
    assert isinstance(command, click.Command)  # a line of COMMANDS names something else
    return command


class AdvisorGroup(HelpGroup):
    """Imports a command when it is called, and turns every failure into one line on stderr and the right exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return _imported(cmd_name) if cmd_name in COMMANDS else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            name = args[0]
            close = difflib.get_close_matches(name, COMMANDS, n=1)
            if name.endswith(".py"):
                fix = f"To profile a script: `advisor profile {name}`."
            else:
                fix = MEANT.get(name) or (f"Did you mean `advisor {close[0]}`?" if close else "See `advisor --help`.")
            raise AdvisorError(f"no command {name!r}", expected="one of " + ", ".join(COMMANDS), fix=fix)
        found = super().resolve_command(ctx, args)
        chosen, command, _ = found
        if command is not None and chosen is not None:
            # Only where a command runs: its help and its page in the docs are the same everywhere.
            every = {name: partial(_imported, name) for name in COMMANDS}
            ctx.default_map = {**(ctx.default_map or {}), chosen: settings.defaults(command, chosen, every)}
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, _, line) in COMMANDS.items()])

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> NoReturn:
        as_json = wants_json(sys.argv[1:] if args is None else args)
        try:
            result = super().main(args, prog_name or "advisor", complete_var, standalone_mode=False, **extra)
            code = result if isinstance(result, int) else ExitCode.OK
            sys.stdout.flush()
        except AdvisorError as error:
            code = _fail(str(error), error.exit_code)
            if as_json:
                _tell(error)
        except click.UsageError as error:
            command = error.ctx.command_path if error.ctx else "advisor"
            told = " ".join(error.format_message().split())  # click lists choices a line each
            if error.ctx and isinstance(error.ctx.command, click.Group) and told.startswith("Usage: "):
                click.echo(error.ctx.get_help(), err=True)  # a group without a command: click's message is its help
                code = ExitCode.USAGE
            else:
                end = "" if told.endswith("?") else "."
                code = _fail(f"{told.rstrip('.')}{end} See `{command} --help`.", ExitCode.USAGE)
                if as_json:
                    _tell(AdvisorError(told.rstrip("."), fix=f"See `{command} --help`."))
        except click.ClickException as error:
            code = _fail(error.format_message(), ExitCode.USAGE)
        except (click.Abort, KeyboardInterrupt):
            code = _fail("interrupted", INTERRUPTED)
        except SystemExit:  # click's own answer to a closed pipe (`advisor report last | head`); it has silenced stdout
            code = CLOSED_PIPE
        except OSError as error:
            if error.filename is None or isinstance(error, FileNotFoundError):
                code = _own_fault(error)
            else:  # another user's file, a name that is too long, a full disk: nothing of ours is broken
                code = _fail(f"{_shown(error.filename)} cannot be used ({error.strerror})", ExitCode.USAGE)
        except Exception as error:  # the last line of defence: users see one line, developers ask for more
            code = _own_fault(error)
            if as_json:
                _tell(AdvisorError(f"internal error: {first_line(error)}", exit_code=ExitCode.OWN_FAULT))
        sys.exit(int(code))


def wants_json(args: Sequence[str]) -> bool:
    """Whether the words before the script ask for JSON: what fails may fail before they are parsed."""
    words = list(itertools.takewhile(lambda word: word != "--" and not word.endswith(".py"), args))
    return "--json" in words or "--format=json" in words or ("--format", "json") in itertools.pairwise(words)


def _tell(error: AdvisorError) -> None:
    """The error as a document on stdout, beside the line on stderr: docs/reference/json.md."""
    from advisor.cli import output

    told = {"text": str(error), "found": error.found, "expected": error.expected, "fix": error.fix}
    output.say(output.document("error", told, exit_code=int(error.exit_code)), sys.stdout)


def _own_fault(error: Exception) -> int:
    text = str(error).splitlines()[0] if str(error) else ""
    line = f"internal error: {type(error).__name__}{': ' + text if text else ''}"
    if os.environ.get("ADVISOR_LOG") != "debug":
        return _fail(f"{line}. Set ADVISOR_LOG=debug to see the traceback.", ExitCode.OWN_FAULT)
    traceback.print_exc()
    return _fail(line, ExitCode.OWN_FAULT)


def _shown(name: object) -> str:
    """A file's name, which may be long, or not of text."""
    text = os.fsdecode(name) if isinstance(name, (str, bytes)) else str(name)
    return text if len(text) <= 200 else f"{text[:200]}…"


def _fail(line: str, code: int) -> int:
    from advisor.cli import output

    output.say(f"advisor: {line}")
    return code


@click.group(
    cls=AdvisorGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="""\b
Exit codes; `profile`, `run` and a failing script's `apply` end with its own:
  0  done
  1  findings at --fail-on, a regression, a faulty rule, a wrong kernel;
     `apply --gpus` is slower than one process, `try` does not keep the change
  2  wrong usage or bad input
  3  a fault in advisor
  4  inconclusive, or you answered no at a prompt
  5  a GPU is required
  130  interrupted""",
)
@click.version_option(__version__, "-V", "--version", message="advisor %(version)s")
def cli() -> None:
    """Make the CNN training you already have run as fast as your GPU allows, and prove it.

    \b
    advisor profile train.py --lr 0.1       look: where the time goes, what helps
    advisor apply --auto train.py --lr 0.1  do it: try changes, keep what helps
    advisor run train.py --lr 0.1           use it: train with the proved plan

    The script is not edited. Its stdout stays its own: advisor writes to stderr.
    Set ADVISOR_DISABLE=1 to switch advisor off altogether.
    """


def main() -> NoReturn:
    """Entry point of the `advisor` command and of `python -m advisor`. Ends the process."""
    cli.main()
