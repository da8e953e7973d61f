"""Clears runs away: never one in progress, never one that something still needs."""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Sequence

from advisor.core import use
from advisor.core.errors import AdvisorError
from advisor.runs.listing import ListedRun
from advisor.userfiles import owners


def chosen(
    runs: Sequence[ListedRun], *, older_than_s: float | None = None, keep: int | None = None, now: float | None = None
) -> tuple[ListedRun, ...]:
    """Of `runs`, the newest first, those to remove: older than this, and behind the newest `keep`; none that is needed."""
    moment = time.time() if now is None else now
    behind = runs[keep or 0 :]
    return tuple(
        run for run in behind if not run.needed and (older_than_s is None or moment - run.ended > older_than_s)
    )


def remove(run: ListedRun) -> bool:
    """Remove a run's folder; False where a process has begun to use it meanwhile, and it stays.

    Raises:
        AdvisorError: when it cannot be removed.
    """
    with use.unused(run.folder) as free:
        if not free or owners.running(run.folder) is not None:
            return False
        # Under another name first, which no command takes for a run: one that is half gone is nobody's to read.
        going = run.folder.with_name(f".{run.folder.name[:100]}.{secrets.token_hex(4)}.gone")
        try:
            os.rename(run.folder, going)
            shutil.rmtree(going)
        except OSError as error:
            raise AdvisorError(
                f"cannot remove {run.folder} ({error.strerror})", fix="See that you may write there."
            ) from None
    return True
