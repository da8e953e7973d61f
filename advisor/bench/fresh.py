"""One fresh run of a training with changes as people make them by hand: `python -m advisor.bench.fresh --out FOLDER SCRIPT …`.

A process of its own, so that it can stand before a script in somebody else's runner, as `advisor apply` does.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from advisor.core import storage
from advisor.core.errors import INTERRUPTED, AdvisorError, ExitCode
from advisor.core.plan import PlanItem
from advisor.core.verdict import Status
from advisor.loop.session import Session
from advisor.profiling.beside.command import ScriptCommand
from advisor.profiling.beside.launcher import launch
from advisor.trials import records
from advisor.userfiles import restore

# What a knowing user writes by hand; torch.compile is one line more.
HAND_TUNED = ("amp_bf16", "channels_last", "cudnn_benchmark", "fused_optimizer")
WARMUP, STEPS = 15, 40
TIMEOUT_S = 240.0


def measure(
    words: Sequence[str],
    items: Sequence[str],
    folder: Path,
    say: Callable[[str], None],
    *,
    warmup: int = WARMUP,
    steps: int = STEPS,
    longest_s: float = TIMEOUT_S,
) -> records.Measurement:
    """What a fresh process with these transforms on measured: nothing, where it came to no end. The script's files are put back.

    Raises:
        KeyboardInterrupt: when the user has ended it.
    """
    say(f"fresh run with {', '.join(items)}" if items else "fresh run as written")
    command = ScriptCommand.parse(tuple(words))
    session = Session(
        mode="measure",
        run_dir=str(folder),
        script=command.words[0],
        argv=command.words[1:],
        warmup=warmup,
        steps=steps,
        kept=tuple(PlanItem(transform=item, status=Status.KEPT) for item in items),
        protect_files=True,
    )
    folder.mkdir(parents=True)
    try:
        ended = launch(command, session, timeout_s=longest_s, output=folder / "script-output.log")
    finally:
        restore.restore(folder)
    if ended.interrupted:
        raise KeyboardInterrupt
    try:
        return storage.load(folder / records.MEASURE_FILE, records.Measurement)
    except AdvisorError:
        return records.Measurement()


def main(words: Sequence[str]) -> int:
    """What it measured is in the folder named; 4 where that is nothing."""
    parser = argparse.ArgumentParser(prog="python -m advisor.bench.fresh", allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="a folder that is not there yet")
    parser.add_argument("--with", dest="items", default="", metavar="A,B", help="ids of changes")
    parser.add_argument("--warmup", type=int, default=WARMUP)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("script", nargs=argparse.REMAINDER)
    asked = parser.parse_args(words)
    items = tuple(filter(None, asked.items.split(",")))
    try:
        found = measure(
            asked.script,
            items,
            asked.out,
            lambda text: print(text, file=sys.stderr),
            warmup=asked.warmup,
            steps=asked.steps,
        )
    except AdvisorError as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)
    except KeyboardInterrupt:
        return INTERRUPTED
    return int(ExitCode.OK if found.step_us else ExitCode.INCONCLUSIVE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
