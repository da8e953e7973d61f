"""`launch` for processes of a script that come one after another: the next one is started while one runs.

A process imports torch, and what every training of torch imports, before it has done anything of its own: 3 to 6 s, about half of what it
takes to its first timed step, and a search starts some twenty. Started ahead of its orders it does that in the meantime and waits
behind it for its turn (bootstrap/sitecustomize.py). What the script does before it imports torch is done ahead as well; where that is more
than reading, the process ends before it does it, and the search starts its processes one by one (userfiles/guard.py). While a short
process times its steps nothing is imported beside it.
"""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from advisor.loop.records import SESSION_FILE
from advisor.loop.session import STANDBY_VARIABLE, TIMING_FILE, Session, disabled
from advisor.profiling.beside.command import ScriptCommand
from advisor.profiling.beside.launcher import Exit, child_environment, launch
from advisor.profiling.beside.tree import end_tree
from advisor.profiling.machine import hostload
from advisor.userfiles.guard import UNFIT

# What is imported ahead of orders. An optimizer's first call imports dynamo, half of all that is, in any case.
AHEAD = ("torch._dynamo", "advisor.pipeline")
LEAST_CORES = 4  # with fewer, one process's imports would take from the other's steps


class Standby:
    """A process of the script that waits for its orders, and ends when this process does."""

    def __init__(
        self, command: ScriptCommand, session: Session, environment: Mapping[str, str], output: Path | None
    ) -> None:
        orders, self._orders = os.pipe()
        self._waits = True
        variables = child_environment(command, session, environment)
        variables[STANDBY_VARIABLE] = ",".join((str(orders), *AHEAD))
        try:
            with open(output or os.devnull, "ab") as stream:
                self.child = subprocess.Popen(
                    command.argv, env=variables, stdout=stream, stderr=subprocess.STDOUT, pass_fds=(orders,)
                )
        except BaseException:
            self._close()
            raise
        finally:
            os.close(orders)

    def take(self, orders: Path) -> subprocess.Popen[Any] | None:
        """The process, which from now on goes by these orders; None when it has ended before."""
        try:
            os.write(self._orders, f"{orders.resolve()}\n".encode())
        except BrokenPipeError:
            pass
        finally:
            self._close()
        return self.child if self.child.poll() is None else None

    def end(self) -> None:
        """It is not wanted any more, if it was not taken."""
        if self._waits:
            self._close()
            end_tree(self.child)

    def _close(self) -> None:
        self._waits = False
        os.close(self._orders)


class Relay:
    """Called as `launcher.launch` is; `close` when no further process follows."""

    def __init__(self, cores: int | None = None) -> None:
        self._next: Standby | None = None
        self._fit = (cores or hostload.cpu_count()) >= LEAST_CORES

    def __call__(
        self,
        command: ScriptCommand,
        session: Session,
        *,
        environment: Mapping[str, str] | None = None,
        output: Path | None = None,
        **options: Any,
    ) -> Exit:
        """As `launcher.launch`. The process may have been started with an earlier call's environment and output."""
        waiting, self._next = self._next, None
        variables = environment or {}
        if (
            self._fit
            and session.protect_files
            and output is not None
            and not disabled()
            and not (command.literal or command.agent)
        ):
            self._next = Standby(command, session, variables, output)

        options = {"environment": variables, "output": output, **options}
        try:
            if waiting is None:
                return launch(command, session, **options)
            ready = functools.partial(waiting.take, session.folder / SESSION_FILE)
            ended = launch(command, session, ahead=ready, **options)
            if waiting.child.returncode == UNFIT:
                self._fit = False
                self.close()
            return launch(command, session, **options) if ended.code == UNFIT else ended
        finally:
            if waiting is not None:
                waiting.end()
            (session.protecting / TIMING_FILE).unlink(missing_ok=True)  # of a process that ended amid its steps

    def close(self) -> None:
        """The process that waits, if there is one, is ended."""
        if self._next is not None:
            self._next.end()
            self._next = None
