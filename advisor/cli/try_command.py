"""`advisor try`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from advisor.cli import completion, output
from advisor.cli.help import Command
from advisor.cli.parameters import (
    SCRIPT_CONTEXT,
    Duration,
    Percent,
    format_option,
    module_option,
    verbosity_options,
    words_argument,
)
from advisor.cli.progress import ProgressLine
from advisor.core.attempt import ATTEMPT_FILE, Attempt
from advisor.core.errors import AdvisorError, ExitCode
from advisor.core.storage import save


@click.command("try", cls=Command, context_settings=SCRIPT_CONTEXT)
@click.option(
    "--change", metavar="ID", shell_complete=completion.changes, help="One of advisor's changes, such as channels_last."
)
@click.option(
    "--patch",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="A unified diff of your source. It is applied to a copy.",
)
@click.option(
    "--min-gain", type=Percent(), default="1%", show_default=True, help="Smallest gain that counts as faster."
)
@click.option(
    "--max-time", type=Duration(), default="10m", show_default=True, help="Begin no further comparison after this time."
)
@click.option("-o", "--out", type=click.Path(path_type=Path, file_okay=False), help="Folder for the run.")
@format_option("text", "json")
@verbosity_options
@module_option
@words_argument
def try_(
    words: tuple[str, ...],
    *,
    module: bool,
    change: str | None,
    patch: Path | None,
    min_gain: float,
    max_time: float,
    out: Path | None,
    form: str,
    quiet: bool,
    verbose: bool,
) -> int:
    """Try one change on SCRIPT, and say whether it is right and faster.

    --change tries one of advisor's changes, as `advisor apply --only ID` does. --patch tries your change: advisor applies the diff
    to a copy of the project, and runs the copy against your script in pairs of fresh runs. Your files stay as they are either way.

    A change is kept after three checks. Effect: it was really on. Numerics: the training stays the same. Timing: it is faster
    beyond noise. The exit code is 0 for kept, 1 for not kept, 4 if noise or time left the question open.

    \b
    Examples:
      advisor try --change channels_last train.py --lr 0.1
      advisor try --change amp_bf16 --json train.py
      git diff > idea.patch; git stash
      advisor try --patch idea.patch train.py
    """
    if (change is None) == (patch is None):
        raise click.UsageError(
            "name --change ID or --patch FILE; `advisor profile` names changes as apply: ID",
            click.get_current_context(),
        )
    if not words:
        raise click.UsageError("no script to try it on", click.get_current_context())
    from advisor import pipeline

    with ProgressLine(live=True, quiet=quiet, verbose=verbose) as say:
        if patch is not None:
            found = pipeline.try_patch(
                words, patch, module=module, min_gain=min_gain, max_time_s=max_time, out=out, say=say
            )
        else:
            found = _change(words, change or "", module, min_gain, max_time, out, say)
    if form == "json":
        output.say(output.document("attempt", found, exit_code=found.exit_code), sys.stdout)
    else:
        from advisor.reporting.attempts import attempt_text

        output.say(attempt_text(found, output.width(), output.color(sys.stdout)), sys.stdout)
    return found.exit_code


def _change(
    words: tuple[str, ...],
    change: str,
    module: bool,
    min_gain: float,
    max_time: float,
    out: Path | None,
    say: ProgressLine,
) -> Attempt:
    """A search for this change alone.

    Raises:
        AdvisorError: when the script gives nothing to try it on.
    """
    from advisor import pipeline
    from advisor.trials import attempt
    from advisor.trials.options import SearchOptions

    result = pipeline.apply(
        words,
        module=module,
        options=SearchOptions(only=(change,), min_gain=min_gain, time_s=max_time),
        out=out,
        say=say,
    )
    if result.log is None:
        raise AdvisorError(
            f"the script gives nothing to try {change} on (exit code {result.exit_code})",
            fix=f"Its output is in {result.run_dir}.",
            exit_code=ExitCode.INCONCLUSIVE,
        )
    found = attempt.of_search(change, result.log, str(result.run_dir))
    save(result.run_dir / ATTEMPT_FILE, found)
    return found
