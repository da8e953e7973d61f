"""`advisor bench scaling`: trainings with the plan of one GPU on several, of so many times one GPU's speed, and what was predicted.

The scripts are docs/examples' imagenet.py (with images that lie on the GPU), unet.py and cifar.py (with their loaders), unmodified. Of each
case TIMED steps are timed behind WARMUP others, all waits of the loop included. `as written` is without a plan. A case is one of these ways,
each GPU with the same batch:

- `one`: one GPU. ResNet-50 is profiled too, with the plan, for the prediction.
- `parts`: `advisor run --gpus N --allow training`; batch norms go by each rank's part, as under torchrun.
- `whole`: `advisor run --gpus N`; batch norms go by all ranks' samples.
- `torchrun`: the script's own DistributedDataParallel.
- `same`: one GPU's batch divided among N, as written: 300 steps' losses against one GPU's own noise (trials/ranks.py).
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from advisor.analysis import scaling
from advisor.bench import models, results
from advisor.bench.scaling_cases import (
    AS_WRITTEN,
    COMPARED,
    EAGER,
    FORETOLD,
    ONE,
    PARTS,
    RANKS,
    SAME,
    SENT,
    TIMED,
    TORCHRUN,
    WARMUP,
    WHOLE,
    ScalingCase,
    cases,
    words_of,
)  # fmt: skip
from advisor.core import storage
from advisor.core.errors import AdvisorError, ExitCode
from advisor.core.gpus import SENDS
from advisor.core.plan import PlanItem
from advisor.core.profile import StepProfile
from advisor.core.verdict import Status
from advisor.distributed import links, place, starting
from advisor.loop.session import Session
from advisor.profiling.after.assemble import assemble
from advisor.profiling.beside.command import ScriptCommand
from advisor.profiling.beside.launcher import launch
from advisor.profiling.machine import environment
from advisor.resources import kernels_dir
from advisor.runs import PROFILE_FILE
from advisor.trials import fresh, ranks, records
from advisor.trials.records import Measurement
from advisor.userfiles import restore

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRow:
    """One case.

    Attributes:
        batch: of each GPU.
        images_per_s: of all GPUs, by the mean of the timed steps. step_ms: their median, and the tenth and ninetieth part of a hundred.
        losses: the first and the last that was seen; warmed up and timed alike in all ways.
        of_linear: of `ranks` times the row of one GPU; None without that row.
        predicted_ms: low and high of a step, from the profile of one GPU; `link` is what was assumed of it, in µs and GB/s.
        off: of the middle of the prediction, relative to the step measured.
        left_out: changes of the plan that were not applied.
        alike: `same`: what the comparison says.
    """

    name: str
    training: str
    way: str
    ranks: int
    sent: str
    batch: int
    script: str
    images_per_s: float
    step_ms: tuple[float, float, float]
    losses: tuple[float, ...]
    kept: tuple[str, ...]
    left_out: tuple[str, ...]
    of_linear: float | None = None
    predicted_ms: tuple[float, float] | None = None
    link: tuple[float, float] | None = None
    off: float | None = None
    alike: str = ""
    device: str
    torch: str
    date: str


@dataclass(slots=True, eq=False)
class _Told:
    """What a start has told of its faults."""

    errors: list[str] = field(default_factory=list)

    def __call__(self, event: dict[str, Any]) -> None:
        if event.get("error"):
            self.errors.append(str(event["error"]))


def run(*, pattern: str, out: Path | None, limit_s: float, runs: Path | None, say: Say) -> int:
    """Measure each case that is named like `pattern`, and write after each.

    Args:
        pattern: texts in a case's name, with commas between; "" for all.
        limit_s: after which a case is ended.
        runs: where profiles and outputs are left; a case on several GPUs finds the profile of one there.

    Raises:
        AdvisorError: without a GPU (exit code 5), without docs/examples or a plan on file, or when `pattern` matches nothing.
    """
    import torch

    if not torch.cuda.is_available():
        raise AdvisorError("no benchmark here: no CUDA GPU", exit_code=ExitCode.GPU_REQUIRED)
    examples = kernels_dir().parent / "docs" / "examples"
    if not examples.is_dir():
        raise AdvisorError("this installation has no docs/examples", fix="Run it from a checkout.")
    wanted = [text.strip() for text in pattern.split(",")]
    every = cases(torch.cuda.device_count())
    chosen = [case for case in every if any(text in case.name for text in wanted)]
    if not chosen:
        raise AdvisorError(f"nothing is named like {pattern!r}", expected="part of " + ", ".join(c.name for c in every))
    target = (out or results.folder() / "scaling.json").resolve()
    planned = {case.training for case in chosen if case.way != SAME and case.sent != AS_WRITTEN}
    plans = _plans(results.folder() / "models.json", planned)
    failed = 0
    home = Path.cwd()
    with models.workplace(runs and runs.resolve(), "scaling") as place_of_runs:
        try:
            for case in chosen:
                say(case.name)
                try:
                    plan = plans.get(case.training, ())
                    row = _measured(case, examples, plan, place_of_runs, limit_s=limit_s, say=say)
                except AdvisorError as error:
                    failed += 1
                    say(f"{case.name}: {error}")
                    continue
                _file(target, row)
                say(told(row))
                # What follows starts more processes: the row is written by now.
                if case.ranks > 1 and case.way != SAME and case.sent != AS_WRITTEN:
                    row = _foretold(row, case, place_of_runs, say)
                    _file(target, row)
                    say(told(row))
                elif case.way == ONE and case.training in FORETOLD and case.sent != AS_WRITTEN:
                    _profiled(words_of(case, examples)[0], plan, place_of_runs / case.training, limit_s, say)
        finally:
            os.chdir(home)
    return ExitCode.INCONCLUSIVE if failed else ExitCode.OK


def told(row: ScalingRow) -> str:
    """One line for people."""
    text = f"{row.name}: {row.images_per_s:,.0f} images a second"
    if row.of_linear is not None:
        text += f", {row.of_linear:.1%} of {row.ranks} × one GPU's"
    if row.off is not None:
        text += f"; the prediction was {row.off:+.1%} off"
    if row.alike:
        text += f"; {row.alike}"
    return text + (f"; without {', '.join(row.left_out)}" if row.left_out else "")


def with_ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the file, each beside that of one GPU."""
    one = {(row["training"], row["sent"] == AS_WRITTEN): row["images_per_s"] for row in rows if row["way"] == ONE}
    order = [case.name for case in cases(max(RANKS))]
    found = [
        row | {"of_linear": row["images_per_s"] / row["ranks"] / one[key]}
        if (key := (row["training"], row["sent"] == AS_WRITTEN)) in one
        else row
        for row in rows
    ]
    return sorted(found, key=lambda row: order.index(row["name"]) if row["name"] in order else len(order))


def _file(target: Path, row: ScalingRow) -> None:
    with results.alone(target):
        rows = [old for old in results.on_file(target) if old["name"] != row.name]
        results.write(target, "scaling", with_ratios([*rows, storage.to_plain(row)]))


def _plans(path: Path, names: set[str]) -> dict[str, tuple[PlanItem, ...]]:
    """What the searches on one such GPU have kept.

    Raises:
        AdvisorError: for a training that has no row.
    """
    rows = {row["name"]: row for row in results.on_file(path)}
    if missing := names - rows.keys():
        raise AdvisorError(
            f"no plan of {', '.join(sorted(missing))} is on file for this GPU",
            expected=str(path),
            fix="Run `advisor bench models` first.",
        )
    return {
        name: tuple(
            PlanItem(transform=kept, status=Status.KEPT, parameters=rows[name]["parameters"].get(kept, {}))
            for kept in rows[name]["kept"]
        )
        for name in names
    }


def _command(case: ScalingCase, words: tuple[str, ...], folder: Path) -> ScriptCommand:
    if case.way == ONE:
        return ScriptCommand.parse(words)
    if case.way == TORCHRUN:
        agent = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.ranks))
        return ScriptCommand.parse((*agent, *words))
    way = place.RankWay(norms=place.LOCAL if case.way == PARTS else "")
    return starting.on_ranks(ScriptCommand.parse(words), case.ranks, folder, seed=0, way=way)


def _measured(
    case: ScalingCase, examples: Path, plan: Sequence[PlanItem], folder: Path, *, limit_s: float, say: Say
) -> ScalingRow:
    words, batch = words_of(case, examples)
    home = folder / case.name.replace(" ", "-")
    home.mkdir(parents=True, exist_ok=True)
    os.chdir(home)  # where the script leaves its checkpoints
    if case.way == SAME:
        return _divided(case, words, batch, home, say)
    sent = (PlanItem(transform=name, status=Status.KEPT) for name in SENT[case.sent])
    items = () if case.sent == AS_WRITTEN else (*plan, *sent)
    if case.ranks > 1:  # graphs hold what is sent
        items = tuple(
            dataclasses.replace(item, parameters={**item.parameters, **SENDS})
            if item.transform == "cuda_graphs"
            else item
            for item in items
        )
    if case.sent == EAGER:
        items = tuple(item for item in items if item.transform != "cuda_graphs")
    timed = _timed(_command(case, words, home), items, home, limit_s)
    each_us = [us for us, held in zip(timed.every_us, timed.held, strict=True) if not held]
    found = batch * case.ranks / statistics.fmean(each_us) * 1e6
    return ScalingRow(
        batch=batch,
        images_per_s=found,
        step_ms=_spread(each_us),
        losses=(timed.losses[0], timed.losses[-1]) if timed.losses else (),
        kept=timed.applied,
        left_out=tuple(f"{name} ({why})" for name, why in timed.left_out.items()),
        **_facts(case, words),
    )


def _spread(each_us: Sequence[float]) -> tuple[float, float, float]:
    """Milliseconds: the median, and the tenth and the ninetieth part of a hundred."""
    order = sorted(each_us)
    at = [order[round(share * (len(order) - 1))] / 1e3 for share in (0.5, 0.1, 0.9)]
    return at[0], at[1], at[2]


def _facts(case: ScalingCase, words: Sequence[str]) -> dict[str, Any]:
    import torch

    return {
        **{name: getattr(case, name) for name in ("name", "training", "way", "ranks", "sent")},
        "script": " ".join((Path(words[0]).name, *words[1:])),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }


def _divided(case: ScalingCase, words: tuple[str, ...], batch: int, home: Path, say: Say) -> ScalingRow:
    """One GPU's training on several, as written. `of_linear` is against one GPU in the same comparison.

    Raises:
        AdvisorError: where they do not train alike.
    """
    command = ScriptCommand.parse(words)
    proof = ranks.prove_alone(command, case.ranks, home, way=place.RankWay(), steps=COMPARED, say=say)
    (spread,) = proof.all
    return ScalingRow(
        batch=batch // case.ranks,
        images_per_s=batch / statistics.median(spread.step_us) * 1e6,
        step_ms=_spread(spread.step_us),
        losses=tuple(spread.losses),
        kept=(),
        left_out=(),
        of_linear=proof.speedup[1] / case.ranks if proof.speedup is not None else None,
        alike=proof.check.detail,
        **_facts(case, words),
    )


def _timed(command: ScriptCommand, items: tuple[PlanItem, ...], home: Path, limit_s: float) -> Measurement:
    """One fresh run.

    Raises:
        AdvisorError: where it gave no measurement.
    """
    said, changes = home / records.OUTPUT_FILE, _Told()
    for file in (said, home / records.MEASURE_FILE):
        file.unlink(missing_ok=True)
    session = Session(
        mode="measure", run_dir=str(home), script=command.words[0], argv=command.words[1:], kept=items, seed=fresh.SEED,
        warmup=WARMUP, steps=TIMED, timed_s=0.0, protect_files=True,
    )  # fmt: skip
    try:
        ended = launch(command, session, on_progress=changes, timeout_s=limit_s, output=said)
    finally:
        restore.restore(home)
    if ended.interrupted:
        raise KeyboardInterrupt
    try:
        found = storage.load(home / records.MEASURE_FILE, Measurement)
    except AdvisorError:
        found = None
    if found is None or len(found.every_us) < TIMED // 2:
        why = "; ".join(changes.errors) or starting.dead_rank(said.read_text(errors="replace")) or "it ended early"
        raise AdvisorError(f"no measurement: {'it took too long' if ended.timed_out else why}", fix=f"Read {said}.")
    return found


def _profiled(words: tuple[str, ...], items: Sequence[PlanItem], home: Path, limit_s: float, say: Say) -> None:
    """The profile of one GPU with the plan lies in `home` afterwards; it is said where there is none."""
    home.mkdir(parents=True, exist_ok=True)
    command = ScriptCommand.parse(words)
    session = Session(
        mode="profile", run_dir=str(home), script=command.words[0], argv=command.words[1:], kept=tuple(items), counters=False,
        warmup=8, steps=20, detail_steps=3, protect_files=True,
    )  # fmt: skip
    try:
        ended = launch(command, session, timeout_s=limit_s, output=home / records.OUTPUT_FILE)
    finally:
        restore.restore(home)
    if ended.interrupted:
        raise KeyboardInterrupt
    try:
        storage.save(home / PROFILE_FILE, assemble(home, environment.probe(), exit_code=ended.code))
    except AdvisorError as error:
        say(f"no profile of one GPU: {error}")


def _foretold(row: ScalingRow, case: ScalingCase, folder: Path, say: Say) -> ScalingRow:
    """The row with what the profile of one GPU foretells, where that and the link are known."""
    predicted, link = _predicted(case, folder, say)
    if predicted is None:
        return row
    step_ms = row.batch * row.ranks / row.images_per_s * 1e3
    return dataclasses.replace(row, predicted_ms=predicted, link=link, off=sum(predicted) / 2 / step_ms - 1)


def _predicted(
    case: ScalingCase, folder: Path, say: Say
) -> tuple[tuple[float, float] | None, tuple[float, float] | None]:
    """A step's milliseconds, low and high, and the link's µs and GB/s; None where the profile of one GPU, or the link, is not known."""
    try:
        profile = storage.load(folder / case.training / PROFILE_FILE, StepProfile)
        file = folder / f"link-{case.ranks}.json"
        measured = json.loads(file.read_text()) if file.exists() else links.measure(case.ranks, file)
        link = scaling.link("measured", measured)
        synchronised = case.way == WHOLE
        (row,) = scaling.foretell(
            profile, (case.ranks,), inside=link, between=link, host=case.ranks, synchronised=synchronised
        )
    except AdvisorError as error:
        say(f"no prediction: {error}")
        return None, None
    return (row.step_us[0] / 1e3, row.step_us[1] / 1e3), (link.latency_us, link.gbps)
