"""`advisor apply --gpus`: a script for one GPU on several, proved and searched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from advisor.core import storage
from advisor.core.errors import ExitCode
from advisor.core.gpus import SENDS, Gpus
from advisor.core.plan import Plan, PlanItem
from advisor.core.profile import StepProfile
from advisor.pipeline.applied import ApplyResult, plan_beside
from advisor.pipeline.applying import apply, check_names
from advisor.pipeline.scaling import foretold_scaling, loses
from advisor.pipeline.shared import Say, begin_run
from advisor.runs import find_plan
from advisor.trials.options import USUAL, SearchOptions

if TYPE_CHECKING:
    from advisor.distributed.place import RankWay
    from advisor.profiling.beside.command import ScriptCommand
    from advisor.trials.ranks import RanksProof

HOW_SENT_S, HOW_SENT_PAIRS = 240.0, 20  # that ways to send gradients are tried for, and in so many pairs


def apply_on_ranks(
    words: Sequence[str],
    asked: Gpus,
    *,
    plan: Path | None = None,
    module: bool = False,
    options: SearchOptions = USUAL,
    out: Path | None = None,
    say: Say,
) -> ApplyResult:
    """Prove that so many ranks train as one process does; search in one process what one of them does faster, or take `plan`; and prove
    that in all of them.

    Raises:
        AdvisorError: as `apply`, `prove` and `run` do.
    """
    from advisor.profiling.beside.command import ScriptCommand
    from advisor.profiling.machine import environment
    from advisor.trials import planfile, ranks

    command, gpus = ScriptCommand.parse(words, module=module), asked.count
    way, machine = ranks.way(asked.allow, asked.shard, gpus), environment.probe()
    ranks.checked(command, gpus, gpus=machine.gpu_count, allowed=asked.allow or not way.divides)
    check_names(options)
    run_dir = begin_run(command.name, out, say)
    if warning := loses(command.name, gpus, synchronised=way.same):
        say(warning)
    proof = ranks.prove_alone(command, gpus, run_dir, way=way, say=say)
    say(ranks.told(proof))
    here = planfile.environment_text(machine)
    if plan is None and not options.only and proof.loses:
        return _lost(command, proof, run_dir, way, here)
    searched: ApplyResult | None = None
    if plan is None:
        say(f"the search runs in one process, on what one of {gpus} ranks is given")
        searched = apply(words, module=module, options=options, out=run_dir / "one-rank", share=gpus, say=say)
        found = searched.plan
    else:
        found = find_plan(plan, lambda known: True, command.name)[1]
    work = _OnRanks(
        command=command, gpus=gpus, way=way, options=options, run_dir=run_dir, environment=here, proof=proof, say=say
    )
    return work.proved(found, searched, search_more=plan is None)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _OnRanks:
    """Ranks that train as one process does (`proof`), and what was asked for them."""

    command: ScriptCommand
    gpus: int
    way: RankWay
    options: SearchOptions
    run_dir: Path
    environment: str
    proof: RanksProof
    say: Say

    def proved(self, found: Plan | None, searched: ApplyResult | None, *, search_more: bool) -> ApplyResult:
        """What of the plan holds in all ranks. `search_more`: also of what only ranks have, how gradients are sent. `searched`: the search
        that the plan is from.
        """
        from advisor.distributed import starting
        from advisor.trials import planfile, ranks
        from advisor.trials.prove import TO_PROVE, prove_plan, wanted

        profile = searched.profile if searched is not None else None
        bare = ranks.bare_plan(self.command, self.proof, self.run_dir, self.way, environment=self.environment)
        items = [item for item in found.items if item.status in TO_PROVE] if found is not None else []
        # Graphs may send to other ranks: what follows proves the plan in all of them.
        items = [replace(i, parameters={**i.parameters, **SENDS}) if i.transform == "cuda_graphs" else i for i in items]
        early = ""
        together = starting.on_ranks(self.command, self.gpus, self.run_dir, seed=ranks.new_seed(), way=self.way)
        if search_more:
            sent, early = self._how_sent(together, items, profile)
            items += sent
        if not items:
            planfile.write(self.run_dir / "plan.yaml", bare)
            return ApplyResult(
                run_dir=self.run_dir, exit_code=0, profile=profile, findings=searched.findings if searched else None,
                log=ranks.bare_log(self.command, self.proof, self.run_dir, early), plan=bare, plan_file=self.run_dir / "plan.yaml",
            )  # fmt: skip
        loaded = wanted(replace(bare, items=tuple(items)), only=self.options.only, skip=self.options.skip)
        log, proved, exit_code = prove_plan(
            together, loaded, environment=self.environment, max_time_s=self.options.time_s, run_dir=self.run_dir, say=self.say
        )  # fmt: skip
        foretold = foretold_scaling(profile, log, self.gpus, synchronised=self.way.same)
        log = replace(log, notes=(ranks.told(self.proof), *foretold, *filter(None, (early,)), *log.notes))
        storage.save(self.run_dir / "trials.json", log)
        file = plan_beside(proved, self.run_dir, self.say)
        return ApplyResult(run_dir=self.run_dir, exit_code=exit_code, log=log, plan=proved, plan_file=file)

    def _how_sent(
        self, together: ScriptCommand, items: Sequence[PlanItem], profile: StepProfile | None
    ) -> tuple[Sequence[PlanItem], str]:
        """Of the ways to send gradients those that are kept, and what ended their search early.

        Raises:
            KeyboardInterrupt: when the user has ended it.
        """
        from advisor.trials import in_ranks

        passes = profile.model.backwards if profile is not None else 1
        options = replace(self.options, max_pairs=HOW_SENT_PAIRS, time_s=HOW_SENT_S)
        tried = in_ranks.search(together, in_ranks.how_sent(passes), items, self.run_dir, options, say=self.say)
        if tried.interrupted:
            raise KeyboardInterrupt
        return tried.kept, tried.early


def _lost(command: ScriptCommand, proof: RanksProof, run_dir: Path, way: RankWay, environment: str) -> ApplyResult:
    """The ranks are slower than one process, beyond noise: nothing is searched, and there is no plan to train so."""
    from advisor.trials import ranks

    told = "the ranks are slower than one process for the same batch, so nothing is searched; give the script a larger batch"
    log = ranks.bare_log(command, proof, run_dir, told)
    storage.save(run_dir / "trials.json", log)
    plan = ranks.bare_plan(command, proof, run_dir, way, environment=environment)
    return ApplyResult(run_dir=run_dir, exit_code=int(ExitCode.FINDINGS), log=log, plan=plan)
