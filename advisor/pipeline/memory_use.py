"""`advisor memory` and `apply --goal memory`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from advisor.core.errors import AdvisorError, ExitCode
from advisor.pipeline.applied import ApplyResult, plan_beside
from advisor.pipeline.shared import Say, begin_run

if TYPE_CHECKING:
    from advisor.analysis.activations import MemoryAlternative
    from advisor.core.held import MemoryLook


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryResult:
    """What a step holds, and what other ways would; `batch`: samples that `memory_bytes` would hold."""

    look: MemoryLook
    others: Sequence[MemoryAlternative]
    batch: int
    memory_bytes: int


def memory(
    words: Sequence[str],
    *,
    module: bool = False,
    memory_bytes: int = 0,
    gpus: int = 1,
    link: str = "measured",
    out: Path | None = None,
    say: Say,
) -> MemoryResult:
    """Watch one step of the script for what it holds. `link`: of several GPUs, as `scale` has it.

    Raises:
        AdvisorError: for a script that cannot be started, or that shows no step.
    """
    from advisor.analysis import activations, sharing
    from advisor.pipeline.scaling import link_of
    from advisor.profiling.beside import launcher
    from advisor.profiling.beside.command import ScriptCommand
    from advisor.trials.memory import watched
    from advisor.trials.script import Script
    from advisor.userfiles import owners

    command = ScriptCommand.parse(words, module=module)
    run_dir = begin_run(command.name, out, say)
    owners.hold(run_dir)
    script = Script(command, run_dir, launcher.launch, say)
    try:
        look = watched(script, ())
    finally:
        script.put_back()
    if look is None:
        raise AdvisorError(
            f"no step could be watched ({script.last_line or 'the script ended early'})",
            exit_code=ExitCode.INCONCLUSIVE,
        )
    there = memory_bytes or look.total_bytes
    shared = sharing.ways(look, gpus, link_of(link, min(gpus, 2))) if gpus > 1 else []
    return MemoryResult(
        look=look,
        others=[*activations.alternatives(look), *shared],
        batch=activations.largest_batch(look, there) if there else 0,
        memory_bytes=there,
    )


def reach_memory(
    words: Sequence[str],
    *,
    module: bool = False,
    cost: float = 0.05,
    limit_bytes: int = 0,
    out: Path | None = None,
    say: Say,
) -> ApplyResult:
    """Make a step hold less, for at most `cost` of its time, and prove it: trials/memory.py.

    Raises:
        AdvisorError: for a script that cannot be started, or that shows no step.
    """
    from advisor.profiling.beside.command import ScriptCommand
    from advisor.profiling.machine import environment
    from advisor.trials import planfile
    from advisor.trials.memory import reach

    command = ScriptCommand.parse(words, module=module)
    run_dir = begin_run(command.name, out, say)
    machine = planfile.environment_text(environment.probe())
    log, plan, _, exit_code = reach(command, run_dir, cost=cost, limit_bytes=limit_bytes, environment=machine, say=say)
    return ApplyResult(
        run_dir=run_dir, exit_code=exit_code, log=log, plan=plan, plan_file=plan_beside(plan, run_dir, say)
    )


def reach_memory_on_ranks(
    words: Sequence[str],
    gpus: int,
    *,
    module: bool = False,
    cost: float = 0.05,
    limit_bytes: int = 0,
    out: Path | None = None,
    say: Say,
) -> ApplyResult:
    """Make each of `gpus` ranks of a script for one GPU hold less, and prove it: trials/memory_ranks.py.

    Raises:
        AdvisorError: as `reach_memory`; and where the ranks do not train as one process does.
    """
    from advisor.pipeline.scaling import link_of
    from advisor.profiling.beside.command import ScriptCommand
    from advisor.profiling.machine import environment
    from advisor.trials import planfile, ranks
    from advisor.trials.memory_ranks import Limits, reach_on_ranks

    command, machine = ScriptCommand.parse(words, module=module), environment.probe()
    ranks.checked(command, gpus, gpus=machine.gpu_count, allowed=False)
    run_dir = begin_run(command.name, out, say)
    log, plan, exit_code = reach_on_ranks(
        command,
        gpus,
        run_dir,
        Limits(cost=cost, nbytes=limit_bytes),
        link_of("measured", gpus),
        environment=planfile.environment_text(machine),
        say=say,
    )
    return ApplyResult(
        run_dir=run_dir, exit_code=exit_code, log=log, plan=plan, plan_file=plan_beside(plan, run_dir, say)
    )
