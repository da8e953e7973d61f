"""`advisor profile`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from advisor.cli import output
from advisor.cli.help import Command
from advisor.cli.parameters import (
    MOST_STEPS,
    SCRIPT_CONTEXT,
    fail_on_option,
    format_option,
    module_option,
    rules_option,
    verbosity_options,
    words_argument,
)
from advisor.cli.progress import ProgressLine
from advisor.core.errors import ExitCode

if TYPE_CHECKING:
    from advisor.pipeline import ProfileResult


HELP = """Run a training SCRIPT and see where a step's time goes.

The script runs unchanged, with its own interpreter, arguments and stdout. advisor finds the steps by itself, at
`Optimizer.step`, or at `advisor.step()` in the script. After the measurement advisor stops the script. The exit code is the
script's own. With --fail-on it is 1 if the script ended well and a rule fired; the last line says so.

advisor moves away what the script wrote and puts your files back, on Ctrl-C and after a crash too. Experiment trackers stay
offline. `advisor apply --help` says what cannot be put back. With --keep-running the run is yours: nothing is put back.

\b
Examples:
  advisor profile train.py --lr 0.1
  advisor profile --steps 50 -o runs/base -m mypackage.train --epochs 1
  advisor profile -- torchrun --nproc-per-node 4 train.py
  advisor profile --precision train.py
  advisor profile --trace rank0.pt.trace.json.gz

The report goes to stderr; with `--format json` or `md` it goes to stdout after the script's own output.
"""


@click.command(cls=Command, context_settings=SCRIPT_CONTEXT, help=HELP)
@click.option("-o", "--out", type=click.Path(path_type=Path, file_okay=False), help="Folder for the run.")
@click.option(
    "--warmup",
    type=click.IntRange(0, MOST_STEPS),
    metavar="N",
    default=10,
    show_default=False,  # click would put it in brackets; so below
    help="Warm-up steps, not timed (default 10).",
)
@click.option(
    "--steps",
    type=click.IntRange(1, MOST_STEPS),
    metavar="N",
    default=20,
    show_default=False,
    help="Steps to time, without a profiler (default 20).",
)
@click.option(
    "--detail-steps",
    type=click.IntRange(1, 50),
    metavar="N",
    default=3,
    show_default=False,
    help="Steps to trace, 1 to 50 (default 3).",
)
@click.option(
    "--keep-running",
    is_flag=True,
    help="Let the script train to its end. By default advisor stops it after the measurement.",
)
@click.option("--no-counters", is_flag=True, help="Do not read hardware counters. DRAM bytes are then modelled.")
@click.option(
    "--precision",
    is_flag=True,
    help="Measure the error of each convolution and linear layer against fp64 in one more step, also for other precisions.",
)
@click.option(
    "--trace",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Run nothing: read a trace that torch.profiler wrote elsewhere.",
)
@rules_option
@fail_on_option
@format_option("text", "json", "md")
@verbosity_options
@module_option
@words_argument
def profile(
    words: tuple[str, ...],
    *,
    module: bool,
    out: Path | None,
    warmup: int,
    steps: int,
    detail_steps: int,
    keep_running: bool,
    no_counters: bool,
    precision: bool,
    trace: Path | None,
    rules_dirs: tuple[Path, ...],
    fail_on: str | None,
    form: str,
    quiet: bool,
    verbose: bool,
) -> int:
    """What HELP says."""
    if bool(words) == (trace is not None):
        told = "a script and a trace exclude each other; name one" if words else "no script to profile"
        raise click.UsageError(told, click.get_current_context())
    from advisor import pipeline

    with ProgressLine(quiet=quiet, verbose=verbose) as say:
        if trace is not None:
            result = pipeline.profile_trace(trace, out=out, rules_dirs=rules_dirs, say=say)
        else:
            result = pipeline.profile(
                words,
                module=module,
                out=out,
                warmup=warmup,
                steps=steps,
                detail_steps=detail_steps,
                keep_running=keep_running,
                counters=not no_counters,
                precision=precision,
                rules_dirs=rules_dirs,
                say=say,
            )
    try:
        _show(result, form, quiet)
    except Exception as error:
        if result.exit_code == 0:
            raise
        # The script has failed: its exit code says more than a fault in our report.
        output.say(f"advisor: the report could not be made ({type(error).__name__}). The run is in {result.run_dir}.")
    if result.exit_code == 0 and output.fails(result.findings, fail_on):
        return ExitCode.FINDINGS
    output.own_exit(result.exit_code)
    return int(result.exit_code)


def _show(result: ProfileResult, form: str, quiet: bool) -> None:
    stream = sys.stderr if form == "text" else sys.stdout
    if result.profile is not None and not (quiet and form == "text"):
        output.say(output.run_text(form, result.profile, result.findings, None, stream=stream), stream)
        if form == "text" and (audit := output.precision_text(result.run_dir, result.profile)):
            output.say(f"\n{audit}", stream)
    if not quiet:
        output.say(output.files_text(result.run_dir))
