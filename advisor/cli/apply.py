"""`advisor apply`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from advisor.cli import ask, completion, output
from advisor.cli.help import Command
from advisor.cli.parameters import (
    SCRIPT_CONTEXT,
    Bytes,
    Duration,
    Percent,
    format_option,
    gpus_options,
    known_words_argument,
    module_option,
    rules_option,
    verbosity_options,
)
from advisor.cli.plan import show_diff
from advisor.cli.progress import ProgressLine
from advisor.core.gpus import Gpus

if TYPE_CHECKING:
    from advisor.pipeline import ApplyResult


HELP = """Try each change in the running training of SCRIPT. Keep what is right and faster. Write plan.yaml.

A change is kept only if it took effect, left the training right, and is faster beyond noise. advisor writes the plan here and
into the run's folder. Without --auto it asks before each change: yes, no, all that follow, or quit. With --auto and no SCRIPT
it searches the last profiled script.

The search throws its training away and leaves your files as they were. That includes files of Python subprocesses, and
files that shell commands name. Three kinds of output cannot be put back: files that native libraries write (ITK, Arrow), files
that programs write under names that are not on their command line, and data that the script sends elsewhere (uploads,
databases).

With --plan there is no search. The plan runs against the plain script in at least four fresh runs: about a minute.
Use it after another torch or driver, or on another machine. What no longer holds is removed from the plan.

With --gpus a SCRIPT written for one GPU is started as N ranks, unedited. Each rank takes its part of each batch. First
advisor proves that N ranks train as one process does. Then it searches one process, and proves the result in all of them.
`advisor run --gpus N` trains with that plan. A SCRIPT that starts its processes itself is searched in all of them.

\b
Examples:
  advisor apply --auto train.py --lr 0.1
  advisor apply --auto              the script that was profiled last
  advisor apply --dry-run train.py
  advisor apply --only channels_last --only amp_bf16 --min-gain 2% train.py
  advisor apply --plan last         the newest plan here, with its own script
  advisor apply --auto --goal memory train.py --lr 0.1
  advisor apply --auto --gpus 4 train.py --lr 0.1
  advisor apply --auto -- torchrun --nproc-per-node 4 train.py
"""


@click.command(cls=Command, context_settings=SCRIPT_CONTEXT, help=HELP)
@click.option("--auto", is_flag=True, help="Try every change without asking; keep what is proved.")
@click.option("--dry-run", is_flag=True, help="List the changes that would be tried, in order. Try nothing.")
@click.option(
    "--only", multiple=True, metavar="ID", shell_complete=completion.changes, help="Try only this change (repeatable)."
)
@click.option(
    "--skip",
    multiple=True,
    metavar="ID",
    shell_complete=completion.changes,
    help="Do not try this change (repeatable).",
)
@click.option("--min-gain", type=Percent(), default="1%", show_default=True, help="Keep a change only above this gain.")
@click.option(
    "--max-time",
    type=Duration(),
    default="10m",
    show_default=True,
    help="End the search after this time, from the script's first step on. The final comparison may take longer, at most as long again.",
)
@click.option(
    "--max-pairs",
    type=click.IntRange(min=3, max=20),
    metavar="N",
    default=20,
    show_default=False,  # click would put it in brackets
    help="Compare at most N pairs, 3 to 20 (default 20). Fewer pairs finish sooner, but can only confirm large gains.",
)
@click.option(
    "--plan",
    type=click.Path(path_type=Path),
    metavar="PLAN",
    help="Prove this plan again without a search: a file, a run's folder, or `last`.",
)
@click.option(
    "--diff", is_flag=True, help="At the end, print the kept changes as a diff of the script. See `advisor plan show`."
)
@click.option("-o", "--out", type=click.Path(path_type=Path, file_okay=False), help="Folder for the run.")
@click.option(
    "--goal",
    type=click.Choice(["speed", "memory"]),
    default="speed",
    show_default=True,
    help="What to improve. `memory` recomputes activations where that costs least time.",
)
@click.option(
    "--memory",
    type=Bytes(),
    default="0",
    metavar="SIZE",
    help="With --goal memory: memory that a step may use, such as 24GiB.",
)
@click.option(
    "--max-cost",
    type=Percent(),
    default="5%",
    show_default=True,
    help="With --goal memory: how much slower the step may become.",
)
@gpus_options
@rules_option
@format_option("text", "json", "md")
@verbosity_options
@module_option
@known_words_argument
def apply(
    words: tuple[str, ...],
    *,
    module: bool,
    auto: bool,
    dry_run: bool,
    only: tuple[str, ...],
    skip: tuple[str, ...],
    min_gain: float,
    max_time: float,
    max_pairs: int,
    plan: Path | None,
    diff: bool,
    out: Path | None,
    goal: str,
    memory: int,
    max_cost: float,
    gpus: int,
    allow: str | None,
    shard: str | None,
    rules_dirs: tuple[Path, ...],
    form: str,
    quiet: bool,
    verbose: bool,
) -> int:
    """What HELP says."""
    _check(click.get_current_context())
    if not auto and not dry_run and plan is None:
        ask.terminal()  # nobody to answer: said before any work
    from advisor import pipeline
    from advisor.trials.options import SearchOptions

    asked = Gpus(count=gpus, allow=allow is not None, shard=shard or "")
    options = SearchOptions(
        only=only, skip=skip, min_gain=min_gain, max_pairs=max_pairs, time_s=max_time, rules_dirs=rules_dirs
    )
    with ProgressLine(live=auto or plan is not None, quiet=quiet, verbose=verbose) as say:
        common: dict[str, Any] = {"module": module, "out": out, "say": say}
        if goal == "memory" and gpus > 1:
            result = pipeline.reach_memory_on_ranks(words, gpus, cost=max_cost, limit_bytes=memory, **common)
        elif goal == "memory":
            result = pipeline.reach_memory(words, cost=max_cost, limit_bytes=memory, **common)
        elif gpus > 1:
            result = pipeline.apply_on_ranks(words, asked, plan=plan, options=options, **common)
        elif plan is not None:
            result = pipeline.prove(words, plan=plan, options=options, **common)
        else:
            asks = None if auto or dry_run else ask.ask
            result = pipeline.apply(words, options=options, ask=asks, dry_run=dry_run, **common)
    _show(result, form=form, quiet=quiet, dry_run=dry_run)
    if diff and result.plan is not None:
        show_diff(result.plan)
    if not quiet:
        output.say(output.files_text(result.run_dir, plan=result.plan_file))
    return int(result.exit_code)


def _check(context: click.Context) -> None:
    """Options that do not go together.

    Raises:
        click.UsageError: for the first such pair.
    """
    given = context.params
    words, auto, dry_run, plan = (given[name] for name in ("words", "auto", "dry_run", "plan"))
    if plan is not None:
        _alone(context)
    memory, both = given["goal"] == "memory", sorted(set(given["only"]) & set(given["skip"]))
    wrong = (
        (
            not (words or auto or dry_run or plan is not None),
            "no script; name one, or use --auto for the last profiled script",
        ),
        (memory and (not words or not auto or plan is not None), "--goal memory needs --auto and a SCRIPT"),
        (memory and (given["shard"] or given["allow"]), "--goal memory chooses what ranks share, by itself"),
        (
            given["gpus"] > 1 and (not words or dry_run or not (auto or plan is not None)),
            "--gpus needs a SCRIPT, and --auto or --plan",
        ),
        (both, f"{next(iter(both), '')} is in both --only and --skip"),
    )
    if told := next((text for is_so, text in wrong if is_so), ""):
        raise click.UsageError(told, context)


def _alone(context: click.Context) -> None:
    """`--plan` and what belongs to a search do not go together.

    Raises:
        click.UsageError: naming the first such option that was given.
    """
    for option in context.command.params:
        given = context.get_parameter_source(option.name or "") is ParameterSource.COMMANDLINE
        if given and option.name in ("dry_run", "min_gain", "max_pairs", "rules_dirs"):
            raise click.UsageError(f"--plan does not search, so {option.opts[0]} has no meaning with it", context)


def _show(result: ApplyResult, *, form: str, quiet: bool, dry_run: bool) -> None:
    """What came of it: on stdout in another form than text."""
    stream = sys.stderr if form == "text" else sys.stdout
    if form != "text" and result.profile is not None:
        output.say(output.run_text(form, result.profile, result.findings, result.log, stream=stream), stream)
    elif form != "text" and result.log is not None:
        output.say(output.proof_text(form, result.log, run_dir=result.run_dir, stream=stream), stream)
    elif (dry_run and result.profile is not None) or (not quiet and result.log is not None):
        output.say(
            output.apply_text(
                result.profile,
                result.findings,
                result.log,
                run_dir=result.run_dir,
                plan=result.plan_file,
                dry_run=dry_run,
                stream=stream,
            )
        )
