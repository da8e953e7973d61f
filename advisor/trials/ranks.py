"""Do N ranks train as one process does, on the same batches: fresh runs of both, and what they leave.

The same sums in another order give other last bits, and where layers drop or data are augmented other numbers; training makes more
of either. How much is measured: one process runs twice more with each batch's samples in another order. What N ranks leave may be as far
from the first run as a few times that: gradients behind their reduction and buffers, by their prints (distributed/prints.py), and the losses.
"""

from __future__ import annotations

import datetime
import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from advisor.core import storage
from advisor.core.errors import AdvisorError, ExitCode
from advisor.core.plan import Plan
from advisor.core.units import bounds_text, counted, percent_text
from advisor.core.verdict import Check, TrialLog
from advisor.distributed import place, refusals, starting
from advisor.profiling.beside import launcher
from advisor.profiling.beside.command import ScriptCommand
from advisor.trials import fresh, losses, planfile, records, spent
from advisor.trials.proof import ratio
from advisor.trials.records import Measurement
from advisor.trials.script import GRACE_S, Launch, Say, Script
from advisor.userfiles import owners

ORDERS = (1 / 2, 1 / 3)  # where a batch begins in the runs that tell the noise
STEPS = 3  # whose gradients and buffers are compared
# Allowed, beside this many times the noise: what fp32 sums leave in any case. Statistics of a part of the batch in place of the
# whole's, or a gradient that is not reduced, are off by 10 % and more.
FACTOR, FLOOR, WINDOW = 4.0, 2e-5, 5
TELLS = 0.1  # more noise times FACTOR than this hides such a fault
# Below this, gradients that are off may be so for one value: a rounding puts it on the other side of zero in a ReLU, or behind its neighbour
# in a maximum, and a small net's gradient moves by a per cent (1.2 % for a ResNet-18 with batches of 8 at 32 pixels). A fault stays from
# another seed; such a turn does not.
SLIGHT = TELLS / FACTOR


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksProof:
    """What the runs say. `speedup`: low, point, high of N ranks over one process, for the same batch; None where too few steps were timed."""

    ranks: int
    check: Check
    speedup: tuple[float, float, float] | None = None
    one: tuple[Measurement, ...] = field(default=(), repr=False)
    all: tuple[Measurement, ...] = field(default=(), repr=False)

    @property
    def loses(self) -> bool:
        """Whether the ranks are slower than one process, beyond noise."""
        return self.speedup is not None and self.speedup[2] < 1.0


def checked(command: ScriptCommand, ranks: int, *, gpus: int, allowed: bool) -> None:
    """Refuse what the script's text or the machine says against it, before anything runs.

    Args:
        gpus: of this machine; 0 for a training on its CPU.
        allowed: a training that is not the same is allowed: losses over a part of the batch.

    Raises:
        AdvisorError: with file and line.
    """
    if 0 < gpus < ranks:
        raise AdvisorError(
            f"--gpus {ranks} on a machine with {counted(gpus, 'GPU')}", expected="at most one rank a GPU"
        )
    script = Path(command.name)
    found = [] if allowed or not script.is_file() else refusals.read(script)
    if found:
        more = f" (and {len(found) - 1} more like it)" if len(found) > 1 else ""
        raise AdvisorError(
            f"{found[0].line}: {found[0].why}{more}",
            expected="a loss that is the mean of its parts' losses, so that ranks with parts of a batch train alike",
            fix="`--allow training` trains on the parts all the same.",
        )


def way(allowed: bool, shard: str, ranks: int) -> place.RankWay:
    """How ranks train. Batch norms take statistics of each rank's own part where another training is allowed, else over all.

    Raises:
        AdvisorError: for both at once: nothing would make norms' statistics, which nobody shares, alike on all ranks. And for halves of
            too few ranks.
    """
    if allowed and shard in place.OF_WEIGHTS:
        raise AdvisorError(
            f"--shard {shard} with --allow training", expected="batch norms over all ranks", fix="Leave one out."
        )
    if shard == place.HYBRID and not halves(ranks):
        raise AdvisorError(
            f"--shard hybrid on {ranks} ranks", expected="an even number of them, 4 or more", fix="Use --shard fsdp2."
        )
    return place.RankWay(norms=place.LOCAL if allowed else "", shard=shard)


def halves(ranks: int) -> bool:
    """Whether so many ranks can share their weights within halves."""
    return ranks >= 2 * place.HALVES and ranks % place.HALVES == 0


def new_seed() -> int:
    """For generators that no script has to seed: another one each time, the same on all ranks."""
    return secrets.randbits(31)


def plan_for(
    command: ScriptCommand, name: Path, ranks: int, way: place.RankWay, *, find: Callable[..., tuple[Path, Plan]]
) -> tuple[Path, Plan | None]:
    """The plan by this name with its file, if it was proved for so many ranks; None where there is none such."""
    try:
        path, plan = find(name, lambda known: known.gpus == ranks and way_of(known) == way, command.name)
    except AdvisorError:
        if str(name) != "last":
            raise
        return name, None
    if planfile.another_script(plan, command.name) or (plan.gpus, way_of(plan)) != (ranks, way):
        return path, None
    return path, plan


def way_of(plan: Plan) -> place.RankWay:
    """How the ranks train that the plan was proved for."""
    return place.RankWay(norms=plan.norms, shard=plan.shard)


def prove_alone(
    command: ScriptCommand, ranks: int, run_dir: Path, *, way: place.RankWay, steps: int = fresh.STEPS, say: Say
) -> RanksProof:
    """`prove`, by itself: the user's files are put back, also where it raises."""
    owners.hold(run_dir)
    script = Script(command, run_dir, launcher.launch, say)
    try:
        return prove(command, ranks, script, seed=fresh.SEED, way=way, steps=steps, launch=launcher.launch, say=say)
    finally:
        script.put_back()


def bare_plan(
    command: ScriptCommand, proof: RanksProof, run_dir: Path, way: place.RankWay, *, environment: str
) -> Plan:
    """A plan without changes: that so many ranks train as one process does."""
    return Plan(
        script=command.words[0],
        argv=command.words[1:],
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        items=(),
        hashes=planfile.hashes_here(command.name, model=proof.one[0].model_hash, environment=environment),
        run=str(run_dir),
        gpus=proof.ranks,
        norms=way.norms,
        shard=way.shard,
    )


def bare_log(command: ScriptCommand, proof: RanksProof, run_dir: Path, early: str = "") -> TrialLog:
    """What `apply` shows where nothing else was kept."""
    verdicts, notes = tuple(records.verdicts(run_dir)), tuple(filter(None, (told(proof), early)))
    return TrialLog(script=command.words[0], argv=command.words[1:], verdicts=verdicts, notes=notes)


def told(proof: RanksProof) -> str:
    """One line for people."""
    text = f"{proof.ranks} ranks against one process, same batches: {proof.check.detail}"
    if proof.speedup is not None:
        text += f"; {proof.speedup[1]:.2f}× as fast ({bounds_text(proof.speedup[0], proof.speedup[2])})"
    return text


def prove(
    command: ScriptCommand,
    ranks: int,
    script: Script,
    *,
    seed: int,
    way: place.RankWay,
    steps: int = fresh.STEPS,
    launch: Launch,
    say: Say,
) -> RanksProof:
    """Run the script as one process three times, and once as `ranks`; `steps` of each are timed, behind a warm-up.

    Raises:
        AdvisorError: where it does not run to its measurement, where a rank has refused it, and where the ranks do not train alike.
    """
    one = reference(script, seed=seed, steps=steps)
    say(f"{ranks} ranks, each with its part of the {'batch' if way.divides else 'layers'}")
    found = _compared(one, _together(command, ranks, script, seed, way, launch), ranks, seed, way, steps)
    if found.check.passed is False and found.check.numbers.get("off", math.inf) < SLIGHT:
        say(
            f"{found.check.detail}. So little may be one value that another rounding has turned; once more from another seed"
        )
        one = reference(script, seed=seed + 1, steps=steps)
        found = _compared(one, _together(command, ranks, script, seed + 1, way, launch), ranks, seed + 1, way, steps)
    return _passed(found, way)


def _together(
    command: ScriptCommand, ranks: int, script: Script, seed: int, way: place.RankWay, launch: Launch
) -> Script:
    ranked = starting.on_ranks(command, ranks, script.run_dir, seed=seed, way=way)
    return Script(ranked, script.run_dir, launch, script.say, seconds=script.seconds)


def reference(script: Script, *, seed: int, steps: int = fresh.STEPS) -> tuple[Measurement, ...]:
    """One process on one GPU, and the same with each batch in other orders.

    Raises:
        AdvisorError: as `prove` does.
    """
    script.command = starting.on_one_gpu(script.command)
    script.say("one process, as a reference")
    found = [one_run(script, seed, steps)]
    for turn, by in enumerate(ORDERS, 1):
        script.say(f"one process with each batch in another order, for its own noise ({turn} of {len(ORDERS)})")
        found.append(one_run(script, seed, steps, rotate=by))
    return tuple(found)


def compared(
    one: Sequence[Measurement],
    together: Script,
    ranks: int,
    *,
    seed: int,
    way: place.RankWay,
    steps: int = fresh.STEPS,
) -> RanksProof:
    """All ranks, once, against `reference`.

    Raises:
        AdvisorError: as `prove` does.
    """
    return _passed(_compared(one, together, ranks, seed, way, steps), way)


def _compared(
    one: Sequence[Measurement], together: Script, ranks: int, seed: int, way: place.RankWay, steps: int
) -> RanksProof:
    """All ranks, once, and what the comparison says, whichever that is."""
    plain, *others = one
    spread = one_run(together, seed, steps)
    check = alike(plain, others, spread, same=way.same)
    return RanksProof(
        ranks=ranks,
        check=check,
        speedup=ratio([plain], [spread], flow=False).bounds if check.passed else None,
        one=tuple(one),
        all=(spread,),
    )


def _passed(found: RanksProof, way: place.RankWay) -> RanksProof:
    """The same.

    Raises:
        AdvisorError: where the ranks do not train alike, or nobody knows.
    """
    check = found.check
    if check.passed is not True:
        raise AdvisorError(
            f"{found.ranks} ranks do not train as one process does: {check.detail}",
            expected=f"no more than {FACTOR:g} times the noise of one process",
            fix="`--allow training` trains all the same." if way.same else "",
            exit_code=ExitCode.FINDINGS if check.passed is False else ExitCode.INCONCLUSIVE,
        )
    return found


def alike(plain: Measurement, others: Sequence[Measurement], spread: Measurement, *, same: bool = True) -> Check:
    """Whether `spread` is no further from `plain` than `others` are, by a factor; without `same` maths, whether its losses are in the
    envelope of theirs (losses.py).
    """
    if not same:
        return losses.compare([plain.losses, *(o.losses for o in others)], [spread.losses])
    told: list[str] = []
    numbers: dict[str, float] = {}
    worst = most = 0.0
    hides = math.inf  # the least noise of gradients
    for kind in ("gradient", "buffer"):
        for step in range(1, STEPS + 1):
            off, noise = _apart(plain, spread, kind, step), max(_apart(plain, o, kind, step) for o in others)
            if math.isnan(off):
                continue
            of_bound = off / (FACTOR * noise + FLOOR)
            most = max(most, off)
            hides = min(hides, noise) if kind == "gradient" else hides
            numbers |= {f"{kind}_{step}": off, f"{kind}_{step}_noise": noise}
            if of_bound >= worst:
                worst, told = of_bound, [f"{kind}s of step {step} are {off:.1e} apart, {noise:.1e} by noise"]
    of_bound, line = _losses(plain.losses, [o.losses for o in others], spread.losses)
    numbers |= {"losses_of_bound": of_bound, "steps": float(len(spread.losses))}
    if not numbers or not spread.losses:
        return Check(passed=None, detail="advisor cannot see a loss or gradients in the script's steps")
    told.append(line)
    if TELLS / FACTOR < hides < math.inf:
        told.append(
            f"gradients tell little, with noise of {percent_text(hides)}: a reduction that is missing may not show"
        )
    worst = max(worst, of_bound)
    numbers |= {"of_bound": worst, "off": most if of_bound <= 1.0 else math.inf}
    return Check(passed=worst <= 1.0, detail="; ".join(told), numbers=numbers)


def _apart(one: Measurement, other: Measurement, kind: str, step: int) -> float:
    """Distance of all tensors of a kind, relative to their size; NaN where there are none, infinite where they are others."""
    names = [name for name in one.prints if name.startswith(f"{step} {kind} ")]
    if not names:
        return math.nan
    if any(name not in other.prints for name in names):
        return math.inf
    size = math.fsum(one.prints[name][0] ** 2 for name in names)
    off = math.fsum(
        math.fsum((a - b) ** 2 for a, b in zip(one.prints[name][1:], other.prints[name][1:], strict=True))
        / max(1, len(one.prints[name]) - 1)
        for name in names
    )
    if not math.isfinite(off):
        return math.inf
    return math.sqrt(off / size) if size else math.sqrt(off)


def _losses(plain: Sequence[float], others: Sequence[Sequence[float]], spread: Sequence[float]) -> tuple[float, str]:
    """How far the curve is off, of what is allowed: means over windows, and the noise's largest so far."""
    length = min(len(plain), len(spread), *(len(o) for o in others))
    scale = math.fsum(abs(v) for v in plain[:length]) / max(1, length)
    worst = noise = 0.0
    for start in range(0, length, WINDOW):
        at = range(start, min(start + WINDOW, length))
        off = math.fsum(abs(spread[i] - plain[i]) for i in at) / len(at)
        noise = max(noise, *(math.fsum(abs(o[i] - plain[i]) for i in at) / len(at) for o in others))
        allowed = FACTOR * noise + FLOOR * scale
        worst = max(worst, off / allowed) if math.isfinite(off) and allowed else math.inf
    return worst, f"losses of {length} steps at {percent_text(worst)} of what noise allows"


def one_run(script: Script, seed: int, timed: int, **orders: object) -> Measurement:
    """One fresh run.

    Raises:
        AdvisorError: as `prove` does.
    """
    path = script.run_dir / records.MEASURE_FILE
    path.unlink(missing_ok=True)
    warmup, steps = fresh.lengths(None, timed)
    ended = script.start(
        "measure",
        phase=spent.RANKS,
        timeout_s=fresh.TIMEOUT_S + GRACE_S,
        warmup=warmup,
        steps=steps,
        seed=seed,
        prints=STEPS,
        **orders,
    )
    if script.interrupted:
        raise KeyboardInterrupt
    if refused := script.refused:
        raise AdvisorError(refused)
    try:
        return storage.load(path, Measurement)
    except AdvisorError:
        pass
    code = ExitCode.FINDINGS if ended.failed else ExitCode.INCONCLUSIVE
    last = "; ".join(filter(None, (script.rank_failed, script.last_line)))
    raise AdvisorError(
        f"the script gave no measurement ({last or script.why_over or 'it ended early'})",
        expected=f"{warmup + steps} training steps",
        fix=f"What it printed: {script.run_dir / records.OUTPUT_FILE}.",
        exit_code=code,
    )
