"""Which plan is meant by `last`, and the copy of a run's plan in the working directory."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from advisor.core.errors import AdvisorError
from advisor.core.plan import Plan
from advisor.core.verdict import Status
from advisor.trials import planfile
from advisor.trials.records import PLAN_FILE


def last(files: Sequence[Path], script: str, serves: Callable[[Plan], bool]) -> tuple[Path, Plan] | None:
    """The plan that is meant by `last`, with its file; None where there is none.

    One that does not serve takes no earlier one's place, and one of another script none of this script's.

    Args:
        files: the newest first.
        script: as the user named it; "" for whichever it is.
    """
    found = [(file, planfile.read(file)) for file in files]
    return min(
        found,
        key=lambda one: (bool(script) and bool(planfile.another_script(one[1], script)), not serves(one[1])),
        default=None,
    )


def is_one(file: Path) -> bool:
    """Whether this file is a plan of advisor's, perhaps with a fault that its reader has made: other programs write `plan.yaml` too."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return "schema_version:" in text and "items:" in text


def beside(plan: Plan, run_dir: Path, here: Path) -> tuple[Path, str]:
    """Write the plan that this run has proved into the folder `here` as well, where people look for it and commit it.

    Only where nothing of theirs is lost: a file there gives way if it is the plan of the same script, as a run left it.

    Returns:
        The file to name from now on, and what to tell about it: "" where nothing was to be written.
    """
    theirs, ours = here / PLAN_FILE, run_dir / PLAN_FILE
    if not any(item.status == Status.KEPT for item in plan.items):
        return ours, ""
    if theirs.exists():
        try:
            known = planfile.read(theirs)
        except AdvisorError:
            return (
                ours,
                f"{theirs.name} here is left as it is: another version of advisor wrote it; the new plan is {ours}",
            )
        if other := planfile.another_script(known, planfile.script_of(plan)):
            return ours, f"{theirs.name} here is left as it is: {other}; the new plan is {ours}"
        if not _as_written(theirs, Path(known.run) / PLAN_FILE):
            return ours, f"{theirs.name} here is left as it is, because it was edited; the new plan is {ours}"
    try:
        shutil.copyfile(ours, theirs)
    except OSError as error:
        return ours, f"{theirs.name} could not be written here ({error.strerror}); the plan is {ours}"
    return theirs, ""


def _as_written(copy: Path, original: Path) -> bool:
    """Whether nobody has changed the copy of a run's plan; no, where the run is gone, and nobody can tell."""
    try:
        return copy.read_bytes() == original.read_bytes()
    except OSError:
        return False
