"""`advisor bench scaling`: trainings with the plan of one GPU on several, of so many times one GPU's speed, and what was predicted.

The script is docs/examples/imagenet.py, unmodified, with images that lie on the GPU. Each case trains some epochs; the script's own clock
tells images a second, and its first epoch is not counted. A case is one of these ways, each GPU with the same batch:

- `one`: one GPU. It is profiled too, with the plan, for the prediction.
- `parts`: `advisor run --gpus N --allow training`; batch norms go by each rank's part, as under torchrun.
- `whole`: `advisor run --gpus N`; batch norms go by all ranks' samples.
- `torchrun`: the script's own DistributedDataParallel.
- `same`: one GPU's batch divided among N, as written: 300 steps' losses against one GPU's own noise (trials/ranks.py).
"""

from __future__ import annotations

import datetime
import json
import os
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from advisor.analysis import scaling
from advisor.bench import models, results
from advisor.core import storage
from advisor.core.errors import AdvisorError, ExitCode
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
from advisor.userfiles import restore

TRAININGS = ("resnet50_b256", "mobilenet_v3_large_b256", "convnext_tiny_b256")
WITHOUT_NORMS = ("convnext_tiny_b256",)  # of batches: `parts` and `whole` are one way
ONE, PARTS, WHOLE, TORCHRUN, SAME = "one", "parts", "whole", "torchrun", "same"
RANKS = (2, 4)
# A batch that is divided, as written: small enough that 300 steps take seconds.
DIVIDED = ("resnet18_b256_128px", ("imagenet.py", "--arch", "resnet18", "-b", "256", "--image-size", "128"))
COMPARED = 300 - fresh.WARMUP
# Settings of DistributedDataParallel beside the plan, by what the case is called.
SENT: dict[str, tuple[str, ...]] = {"": (), "views": ("ddp_bucket_views", "ddp_static_graph")}
LEAST_EPOCHS = 2  # the first does not count
STEPS, EPOCHS, RESIDENT = 64, 4, 2048
_EPOCH = re.compile(r"^=> epoch \d+: loss ([-+.\w]+), ([\d.]+) images/s", re.MULTILINE)
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingCase:
    """One training in one way; `sent` is a key of SENT."""

    training: str
    way: str
    ranks: int
    sent: str = ""

    @property
    def name(self) -> str:
        """As --filter takes it."""
        return " ".join(filter(None, (self.training, self.way, self.sent, f"x{self.ranks}")))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRow:
    """One case.

    Attributes:
        batch: of each GPU.
        images_per_s: of all GPUs, the median of `epochs` by the script's clock.
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
    epochs: tuple[float, ...]
    losses: tuple[float, ...]
    kept: tuple[str, ...]
    left_out: tuple[str, ...]
    of_linear: float | None = None
    predicted_ms: tuple[float, float] | None = None
    link: tuple[float, float] | None = None
    off: float | None = None
    alike: str = ""
    torch: str
    date: str


@dataclass(slots=True, eq=False)
class _Told:
    """What a start has told of its changes."""

    applied: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    errors: list[str] = field(default_factory=list)

    def __call__(self, event: dict[str, Any]) -> None:
        if event.get("event") == "applied":
            self.applied = tuple(event.get("transforms") or ())
            self.left_out = tuple(map(str, event.get("left_out") or ()))
        if event.get("error"):
            self.errors.append(str(event["error"]))


def cases(gpus: int) -> list[ScalingCase]:
    """All that so many GPUs can run."""
    found = []
    for name in TRAININGS:
        ways = (PARTS, TORCHRUN) if name in WITHOUT_NORMS else (PARTS, WHOLE, TORCHRUN)
        found.append(ScalingCase(training=name, way=ONE, ranks=1))
        found += [ScalingCase(training=name, way=way, ranks=n) for n in RANKS if n <= gpus for way in ways]
        found += [ScalingCase(training=name, way=PARTS, ranks=n, sent="views") for n in RANKS if n <= gpus]
    return [*found, *(ScalingCase(training=DIVIDED[0], way=SAME, ranks=n) for n in RANKS if n <= gpus)]


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
    script = kernels_dir().parent / "docs" / "examples" / "imagenet.py"
    if not script.is_file():
        raise AdvisorError("this installation has no docs/examples", fix="Run it from a checkout.")
    wanted = [text.strip() for text in pattern.split(",")]
    every = cases(torch.cuda.device_count())
    chosen = [case for case in every if any(text in case.name for text in wanted)]
    if not chosen:
        raise AdvisorError(f"nothing is named like {pattern!r}", expected="part of " + ", ".join(c.name for c in every))
    target = (out or results.folder() / "scaling.json").resolve()
    plans = _plans(results.folder() / "models.json", {case.training for case in chosen if case.way != SAME})
    failed = 0
    home = Path.cwd()
    with models.workplace(runs and runs.resolve(), "scaling") as place_of_runs:
        try:
            for case in chosen:
                say(case.name)
                try:
                    plan = plans.get(case.training, ())
                    row = _measured(case, script, plan, place_of_runs, limit_s=limit_s, say=say)
                except AdvisorError as error:
                    failed += 1
                    say(f"{case.name}: {error}")
                    continue
                _file(target, row)
                say(told(row))
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
    one = {row["training"]: row["images_per_s"] for row in rows if row["way"] == ONE}
    order = [case.name for case in cases(max(RANKS))]
    found = [
        row | {"of_linear": row["images_per_s"] / row["ranks"] / one[row["training"]]}
        if row["training"] in one
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


def words_of(case: ScalingCase, script: Path) -> tuple[tuple[str, ...], int]:
    """The script's words without a launcher, and the batch of each GPU."""
    words = list(DIVIDED[1] if case.way == SAME else models.SCRIPTS[case.training])[1:]
    words = [word for word in words if word != "--device-data"]
    at = words.index("-b") + 1
    batch = int(words[at])
    each = batch if case.way in (ONE, TORCHRUN, SAME) else batch * case.ranks  # what the script is told
    words[at] = str(each)
    length = (
        "--train-size",
        str(batch * case.ranks * STEPS),
        "--val-size",
        str(batch * case.ranks),
        "--epochs",
        str(EPOCHS),
    )
    return (str(script), *words, "--resident", str(RESIDENT), *length, "-p", str(STEPS)), batch


def _command(case: ScalingCase, words: tuple[str, ...], folder: Path) -> ScriptCommand:
    if case.way == ONE:
        return ScriptCommand.parse(words)
    if case.way == TORCHRUN:
        agent = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.ranks))
        return ScriptCommand.parse((*agent, *words))
    way = place.Way(norms=place.LOCAL if case.way == PARTS else "")
    return starting.on_ranks(ScriptCommand.parse(words), case.ranks, folder, seed=0, way=way)


def _measured(
    case: ScalingCase, script: Path, plan: Sequence[PlanItem], folder: Path, *, limit_s: float, say: Say
) -> ScalingRow:
    words, batch = words_of(case, script)
    home = folder / case.name.replace(" ", "-")
    home.mkdir(parents=True, exist_ok=True)
    os.chdir(home)  # where the script leaves its checkpoints
    if case.way == SAME:
        return _divided(case, words, batch, home, say)
    items = (*plan, *(PlanItem(transform=name, status=Status.KEPT) for name in SENT[case.sent]))
    rates, losses, changes = _trained(_command(case, words, home), items, home, limit_s)
    found = statistics.median(rates[1:] or rates)
    step_ms = batch * case.ranks / found * 1e3
    predicted, link = (None, None) if case.ranks == 1 else _predicted(case, folder, say)
    if case.ranks == 1:
        _profiled(words, items, folder / case.training, limit_s, say)
    return ScalingRow(
        batch=batch,
        images_per_s=found,
        epochs=rates,
        losses=losses,
        kept=changes.applied,
        left_out=changes.left_out,
        predicted_ms=predicted,
        link=link,
        off=sum(predicted) / 2 / step_ms - 1 if predicted is not None else None,
        **_facts(case, words),
    )


def _facts(case: ScalingCase, words: Sequence[str]) -> dict[str, Any]:
    import torch

    return {
        **{name: getattr(case, name) for name in ("name", "training", "way", "ranks", "sent")},
        "script": " ".join((Path(words[0]).name, *words[1:])),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }


def _divided(case: ScalingCase, words: tuple[str, ...], batch: int, home: Path, say: Say) -> ScalingRow:
    """One GPU's training on several, as written. `of_linear` is against one GPU in the same comparison.

    Raises:
        AdvisorError: where they do not train alike.
    """
    command = ScriptCommand.parse(words)
    proof = ranks.prove_alone(command, case.ranks, home, way=place.Way(), steps=COMPARED, say=say)
    (spread,) = proof.all
    return ScalingRow(
        batch=batch // case.ranks,
        images_per_s=batch / statistics.median(spread.step_us) * 1e6,
        epochs=(),
        losses=tuple(spread.losses),
        kept=(),
        left_out=(),
        of_linear=proof.speedup[1] / case.ranks if proof.speedup is not None else None,
        alike=proof.check.detail,
        **_facts(case, words),
    )


def _trained(
    command: ScriptCommand, items: tuple[PlanItem, ...], home: Path, limit_s: float
) -> tuple[tuple[float, ...], tuple[float, ...], _Told]:
    """Images a second and mean losses, by epoch.

    Raises:
        AdvisorError: where it came to no end.
    """
    session = Session(mode="run", run_dir=str(home), script=command.words[0], argv=command.words[1:], kept=items)
    said, changes = home / records.OUTPUT_FILE, _Told()
    said.unlink(missing_ok=True)
    ended = launch(command, session, on_progress=changes, timeout_s=limit_s, output=said)
    if ended.interrupted:
        raise KeyboardInterrupt
    text = said.read_text(errors="replace")
    found = _EPOCH.findall(text)
    # One that was ended at its limit has measured what it has: its first epoch compiles, and may have taken most of the time.
    if not found or ((ended.code or ended.timed_out) and len(found) < LEAST_EPOCHS):
        why = "; ".join(changes.errors) or starting.dead_rank(text) or "it ended without an epoch"
        raise AdvisorError(f"no measurement: {'it took too long' if ended.timed_out else why}", fix=f"Read {said}.")
    return tuple(float(rate) for _, rate in found), tuple(float(loss) for loss, _ in found), changes


def _profiled(words: tuple[str, ...], items: tuple[PlanItem, ...], home: Path, limit_s: float, say: Say) -> None:
    """The profile of one GPU with the plan lies in `home` afterwards; it is said where there is none."""
    home.mkdir(parents=True, exist_ok=True)
    command = ScriptCommand.parse(words)
    session = Session(
        mode="profile", run_dir=str(home), script=command.words[0], argv=command.words[1:], kept=items, counters=False,
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
