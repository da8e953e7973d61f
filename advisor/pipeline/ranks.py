"""`advisor apply --gpus`: a script for one GPU on several, proved and searched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from advisor.core import storage
from advisor.core.errors import ExitCode
from advisor.pipeline.applied import ApplyResult, plan_beside
from advisor.pipeline.applying import USUAL_TIME_S, apply, check_names
from advisor.pipeline.scaling import foretold_scaling, loses
from advisor.pipeline.shared import Say, begin_run
from advisor.runs import find_plan

if TYPE_CHECKING:
    from advisor.distributed.place import Way
    from advisor.profiling.beside.command import ScriptCommand
    from advisor.trials.ranks import RanksProof


def apply_on_ranks(
    words: Sequence[str],
    gpus: int,
    *,
    plan: Path | None = None,
    module: bool = False,
    allow: bool = False,
    shard: str = "",
    out: Path | None = None,
    max_time_s: float = USUAL_TIME_S,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    say: Say,
    **search: Any,
) -> ApplyResult:
    """Prove that `gpus` ranks train as one process does; search in one process what one of them does faster, or take `plan`; and prove
    that in all of them.

    Raises:
        AdvisorError: as `apply`, `prove` and `run` do.
    """
    from advisor.distributed import starting
    from advisor.profiling.beside.command import ScriptCommand
    from advisor.profiling.machine import environment
    from advisor.trials import in_ranks, planfile, ranks
    from advisor.trials.prove import TO_PROVE, prove_plan, wanted

    command = ScriptCommand.parse(words, module=module)
    way, machine = ranks.way(allow, shard, gpus), environment.probe()
    ranks.checked(command, gpus, gpus=machine.gpu_count, allowed=allow)
    check_names(only, skip)
    run_dir = begin_run(command.name, out, say)
    if warning := loses(command.name, gpus, synchronised=way.same):
        say(warning)
    proof = ranks.prove_alone(command, gpus, run_dir, way=way, say=say)
    say(ranks.told(proof))
    if plan is None and not only and proof.loses:
        return _lost(command, proof, run_dir, way, planfile.environment_text(machine))
    searched: ApplyResult | None = None
    if plan is None:
        say(f"the search runs in one process, on what one of {gpus} ranks is given")
        searched = apply(
            words,
            module=module,
            out=run_dir / "one-rank",
            max_time_s=max_time_s,
            only=only,
            skip=skip,
            share=gpus,
            say=say,
            **search,
        )
        found = searched.plan
    else:
        found = find_plan(plan, lambda known: True, command.name)[1]
    here = planfile.environment_text(machine)
    bare = ranks.bare_plan(command, proof, run_dir, way, environment=here)
    items = [item for item in found.items if item.status in TO_PROVE] if found is not None else []
    early = ""
    together = starting.on_ranks(command, gpus, run_dir, seed=ranks.new_seed(), way=way)
    if plan is None:
        passes = searched.profile.model.backwards if searched is not None and searched.profile is not None else 1
        how = in_ranks.How(only=only, skip=skip, min_gain=search.get("min_gain", 0.01))
        tried = in_ranks.search(together, in_ranks.how_sent(passes), items, run_dir, how, say=say)
        if tried.interrupted:
            raise KeyboardInterrupt
        items += tried.kept
        early = tried.early
    if not items:
        planfile.write(run_dir / "plan.yaml", bare)
        return ApplyResult(
            run_dir=run_dir, exit_code=0, profile=searched.profile if searched else None,
            findings=searched.findings if searched else None, log=ranks.bare_log(command, proof, run_dir, early), plan=bare,
            plan_file=run_dir / "plan.yaml",
        )  # fmt: skip
    loaded = wanted(replace(bare, items=tuple(items)), only=only, skip=skip)
    log, proved, exit_code = prove_plan(
        together, loaded, environment=here, max_time_s=max_time_s, run_dir=run_dir, say=say
    )
    foretold = foretold_scaling(searched.profile if searched else None, log, gpus, synchronised=way.same)
    log = replace(log, notes=(ranks.told(proof), *foretold, *filter(None, (early,)), *log.notes))
    storage.save(run_dir / "trials.json", log)
    return ApplyResult(
        run_dir=run_dir, exit_code=exit_code, log=log, plan=proved, plan_file=plan_beside(proved, run_dir, say)
    )


def _lost(command: ScriptCommand, proof: RanksProof, run_dir: Path, way: Way, environment: str) -> ApplyResult:
    """The ranks are slower than one process, beyond noise: nothing is searched, and there is no plan to train so."""
    from advisor.trials import ranks

    told = "the ranks are slower than one process for the same batch, so nothing is searched; give the script a larger batch"
    log = ranks.bare_log(command, proof, run_dir, told)
    storage.save(run_dir / "trials.json", log)
    plan = ranks.bare_plan(command, proof, run_dir, way, environment=environment)
    return ApplyResult(run_dir=run_dir, exit_code=int(ExitCode.FINDINGS), log=log, plan=plan)
