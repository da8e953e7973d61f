"""`advisor run`: train with a plan, in one process or in several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from advisor.core.errors import AdvisorError
from advisor.core.gpus import Gpus
from advisor.core.plan import Plan, PlanItem
from advisor.core.verdict import Status
from advisor.pipeline.shared import Say, recover_pending
from advisor.runs import find_plan, new_run_dir

if TYPE_CHECKING:
    from advisor.profiling.beside.command import ScriptCommand

ONE = Gpus()


def run(
    words: Sequence[str] = (),
    *,
    module: bool = False,
    plan: Path = Path("last"),
    strict: bool = False,
    gpus: Gpus = ONE,
    saves: bool = False,
    say: Say,
) -> int:
    """Train with a plan (its file, the folder of its run, or `last`) to the end. Returns the script's own exit code.

    With `gpus` a script written for one runs as so many ranks, with the plan that was proved for them; else that is proved first, and
    they train without one. `saves`: checkpoints are written in the background.

    Raises:
        AdvisorError: when there is no plan, it cannot be read, or, with `strict`, an item of it no longer fits; when the ranks cannot
            or do not train as one process does.
    """
    from advisor.profiling.beside.command import ScriptCommand
    from advisor.trials import planfile
    from advisor.trials.run import run_plan

    command = ScriptCommand.parse(words, module=module) if words else None
    also = (PlanItem(transform="background_saves", status=Status.KEPT),) if saves else ()
    if gpus.count > 1:
        return _run_on_ranks(command, plan, gpus, strict=strict, also=also, say=say)
    named = command.name if command is not None else ""
    try:
        plan, loaded = find_plan(plan, lambda known: not planfile.left_open(known), named)
    except AdvisorError:
        if not saves or command is None or str(plan) != "last":
            raise
        loaded = Plan(
            script=command.words[0], argv=command.words[1:], created="", items=()
        )  # it is asked for without one
    if command is None:
        command = ScriptCommand.parse((loaded.script, *loaded.argv))
    recover_pending(say)
    return run_plan(command, plan, loaded, run_dir=new_run_dir(command.name), strict=strict, also=also, say=say)


def _run_on_ranks(
    command: ScriptCommand | None,
    name: Path,
    asked: Gpus,
    *,
    strict: bool,
    also: Sequence[PlanItem],
    say: Say,
) -> int:
    from advisor.distributed import starting
    from advisor.profiling.beside import launcher
    from advisor.profiling.machine import environment
    from advisor.trials import planfile, ranks
    from advisor.trials.run import run_plan

    if command is None:
        raise AdvisorError("no script given", expected="a Python script with --gpus")
    gpus, way, machine = asked.count, ranks.way(asked.allow, asked.shard, asked.count), environment.probe()
    ranks.checked(command, gpus, gpus=machine.gpu_count, allowed=asked.allow or not way.divides)
    recover_pending(say)
    run_dir = new_run_dir(command.name)
    path, plan = ranks.plan_for(command, name, gpus, way, find=find_plan)
    if plan is None:
        say(
            f"no plan on file was proved for {gpus} ranks of this script: it is proved now that they train as one process does"
        )
        proof = ranks.prove_alone(command, gpus, run_dir, way=way, say=say)
        say(ranks.told(proof))
        path, plan = (
            run_dir,
            ranks.bare_plan(command, proof, run_dir, way, environment=planfile.environment_text(machine)),
        )
        planfile.write(run_dir / "plan.yaml", plan)
    seed = ranks.new_seed()
    together = starting.on_ranks(command, gpus, run_dir, seed=seed, way=way)
    try:
        return run_plan(
            together, path, plan, run_dir=run_dir, strict=strict, also=also, say=say, launch=launcher.launch
        )
    finally:
        starting.clear(run_dir)
