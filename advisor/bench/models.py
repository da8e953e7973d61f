"""`advisor bench models`: whole trainings, as written and after `advisor apply --auto`, beside what people tune by hand.

The scripts are docs/examples, unmodified, in their setting of synthetic data on the GPU. `apply` measures plain and applied in
fresh processes itself; the hand-tuned baselines run in fresh processes right after, in the same session of the machine. Where kernels have
changed since a search, what it kept can be proved and timed with today's, by `apply --plan`, in a third of the time (`changed`).
"""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from advisor import pipeline
from advisor.bench import fresh, results
from advisor.core import storage
from advisor.core.errors import AdvisorError, ExitCode
from advisor.core.findings import Semantics
from advisor.core.plan import Plan, PlanItem
from advisor.core.profile import StepProfile
from advisor.core.transform_table import having
from advisor.core.units import counted
from advisor.core.verdict import StackVerdict, Status, TrialLog
from advisor.ops import catalog, sources
from advisor.resources import kernels_dir
from advisor.runs import PROFILE_FILE
from advisor.transforms import registry
from advisor.trials import planfile, records
from advisor.trials.options import SearchOptions

STRICT = "--no-tf32"
SCRIPTS: dict[str, tuple[str, ...]] = {
    "resnet50_b256": ("imagenet.py", "--arch", "resnet50", "-b", "256", "--device-data"),
    "cifar_resnet18_b128": ("cifar.py", "--device-data", "--epochs", "200"),
    "mobilenet_v3_large_b256": ("imagenet.py", "--arch", "mobilenet_v3_large", "-b", "256", "--device-data"),
    "unet64_b32": ("unet.py", "--workers", "12", "--epochs", "200"),
    # These architectures are torchvision's.
    "efficientnet_b0_b256": ("imagenet.py", "--arch", "efficientnet_b0", "-b", "256", "--device-data"),
    "convnext_tiny_b256": ("imagenet.py", "--arch", "convnext_tiny", "-b", "256", "--lr", "0.01", "--device-data"),
    "vgg16_b128": ("imagenet.py", "--arch", "vgg16", "-b", "128", "--lr", "0.01", "--device-data"),
    "resnext50_32x4d_b256": ("imagenet.py", "--arch", "resnext50_32x4d", "-b", "256", "--device-data"),
    "regnet_y_3_2gf_b256": ("imagenet.py", "--arch", "regnet_y_3_2gf", "-b", "256", "--device-data"),
    "densenet121_b256": ("imagenet.py", "--arch", "densenet121", "-b", "256", "--device-data"),
    "edsr256_b16": ("superres.py", "--residual", "--width", "256", "--blocks", "32", "--patch", "48"),
    # Of those who keep fp32's own precision: nothing is tried, by hand neither, that has fewer bits.
    "strict_fp32_resnet_b128": ("imagenet.py", "--arch", "resnet50", "-b", "128", "--device-data", STRICT),
    "strict_fp32_unet_b32": ("unet.py", "--workers", "12", "--epochs", "200", STRICT),
}
FEWER_BITS = having(lambda row: row.semantics is Semantics.PRECISION)
# What sets the dtype that a step computes in, and with it the step's limit.
DTYPES = {"amp_bf16": "bfloat16", "amp_fp16": "float16", "tf32": "tf32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRow:
    """One training. Times are of whole steps, medians in milliseconds of fresh processes.

    Attributes:
        shape: of the first convolution's input, the batch first.
        dtype, layout: what advisor's step computes in, "float32" where nothing was kept that changes it.
        plain_ms: the script as written. advisor_ms: with all that `apply --auto` kept.
        eager_ms: with what is tuned by hand; compile_ms: with torch.compile too. None where not measured.
        limit_ms: of the step that the search profiled last, with what was kept until then: the sum of its operators' least times
            at the rates measured on this machine. None where that step computed in another dtype.
        spread: (largest - smallest) / median of advisor's `n` processes.
        error: relative difference of the mean loss from the script as written, over the same steps with advisor's changes;
            baseline_error: the same of the hand-tuned script.
        apply_s: wall time of the whole search.
        searched: when that was, and `trials`, `limit_ms` and all else of it with it; "" where the times are the search's own.
        parameters: by change, of those kept that have any.
    """

    name: str
    pass_: str = "step"
    shape: tuple[int, ...]
    dtype: str
    layout: str
    script: str
    plain_ms: float
    advisor_ms: float | None
    eager_ms: float | None
    compile_ms: float | None
    limit_ms: float | None
    spread: float | None
    n: int
    error: float | None
    baseline_error: float | None
    plain_images_per_s: float
    advisor_images_per_s: float | None
    speedup: float | None
    speedup_low: float | None
    speedup_high: float | None
    kept: tuple[str, ...]
    trials: tuple[str, ...]  # "channels_last: kept, 29–31 %"
    losses: str
    apply_s: float
    spent_s: dict[str, float]  # of these, by phase of the search
    trial_s: dict[str, float]  # by change, over all rounds
    kernel_sha: dict[str, str]  # of all bundled sources
    launched: tuple[str, ...] = ()  # of these those that ran
    torch: str
    date: str
    searched: str = ""
    parameters: dict[str, dict[str, str]] = field(default_factory=dict)


def has_changed(row: Mapping[str, Any]) -> bool:
    """Whether kernels that this training ran, all of what it kept where that was not recorded, are others since."""
    families = {name for family in catalog.FAMILIES if family.transform in row["kept"] for name in family.kernels}
    used = row.get("launched") or families
    return any(row["kernel_sha"].get(name) != sources.sha256(name) for name in used)


def run(
    *,
    pattern: str,
    out: Path | None,
    baselines: tuple[str, ...],
    changed: bool = False,
    max_time_s: float,
    runs: Path | None = None,
    say: Callable[[str], None],
) -> int:
    """Run each training, and write after each run of it, so that an interrupted one leaves what it had.

    Args:
        changed: only those that the file has no whole row of, or whose kernels have changed; of these what their search kept is proved
            again.
        max_time_s: what each search may take, as `advisor apply --max-time`.
        runs: where the searches' run folders are left, below each training's name; None leaves none.

    Raises:
        AdvisorError: without a GPU (exit code 5), without docs/examples, or when `pattern` matches nothing.
    """
    import torch

    if not torch.cuda.is_available():
        raise AdvisorError("no benchmark here: no CUDA GPU", exit_code=ExitCode.GPU_REQUIRED)
    examples = kernels_dir().parent / "docs" / "examples"
    if not examples.is_dir():
        raise AdvisorError("this installation has no docs/examples", fix="Run it from a checkout.")
    chosen = {name: words for name, words in SCRIPTS.items() if pattern in name}
    if not chosen:
        raise AdvisorError(f"nothing is named like {pattern!r}", expected="part of " + ", ".join(SCRIPTS))
    target = (out or results.folder() / "models.json").resolve()
    rows = {row["name"]: row for row in results.on_file(target)}
    known: dict[str, ModelRow] = {}
    if changed:
        chosen = {name: words for name, words in chosen.items() if _outdated(rows.get(name), baselines)}
        known = {name: storage.from_plain(ModelRow, rows[name]) for name in chosen if rows.get(name, {}).get("kept")}
        say(f"{counted(len(chosen), 'training')} to measure, {len(known)} of them without a search")
    home = Path.cwd()
    runs = runs and runs.resolve()
    for name, (script, *arguments) in chosen.items():
        words = (str(examples / script), *arguments)
        with workplace(runs, name) as folder:
            os.chdir(folder)
            try:
                measure = partial(_proved, known[name]) if name in known else partial(_searched, name)
                for row in _measured(words, measure, baselines=baselines, max_time_s=max_time_s, say=say):
                    rows[name] = storage.to_plain(row)
                    order = [*SCRIPTS, *rows]
                    results.write(target, "models", sorted(rows.values(), key=lambda row: order.index(row["name"])))
            finally:
                os.chdir(home)
    return ExitCode.OK


def _outdated(row: Mapping[str, Any] | None, baselines: Sequence[str]) -> bool:
    """Whether there is no row, one of other kernels, or one that was interrupted before its baselines."""
    return row is None or has_changed(row) or any(row[f"{name}_ms"] is None for name in baselines)


@contextlib.contextmanager
def workplace(runs: Path | None, name: str) -> Iterator[Path]:
    """The folder that a script is run in: below `runs`, or one that is gone afterwards."""
    if runs is None:
        with tempfile.TemporaryDirectory(prefix="advisor-bench-") as scratch:
            yield Path(scratch)
        return
    folder = runs / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise AdvisorError(f"cannot make {folder} ({error.strerror})", fix="Name another folder with --runs.") from None
    yield folder


def _measured(
    words: tuple[str, ...],
    measure: Callable[..., tuple[ModelRow, pipeline.ApplyResult]],
    *,
    baselines: tuple[str, ...],
    max_time_s: float,
    say: Callable[[str], None],
) -> Iterator[ModelRow]:
    """The training's row when what is kept is proved, and again with each baseline."""
    row, found = measure(words, max_time_s=max_time_s, say=say)
    yield row
    plain = _stack(found).losses_plain
    hand = tuple(name for name in fresh.HAND_TUNED if name not in skipped(words))
    if "eager" in baselines:
        eager = fresh.measure(words, hand, found.run_dir / "hand-tuned", say)
        row = replace(row, eager_ms=_step_ms(eager), baseline_error=_difference(eager.losses, plain))
        yield row
    if "compile" in baselines:
        compiled = fresh.measure(words, (*hand, "compile"), found.run_dir / "hand-tuned-compiled", say)
        yield replace(row, compile_ms=_step_ms(compiled))


def skipped(words: Sequence[str]) -> tuple[str, ...]:
    """What is not tried with this script."""
    return tuple(sorted(FEWER_BITS)) if STRICT in words else ()


def _searched(
    name: str, words: tuple[str, ...], *, max_time_s: float, say: Callable[[str], None]
) -> tuple[ModelRow, pipeline.ApplyResult]:
    """The row of a whole search, before its baselines."""
    found = _finished(pipeline.apply(words, options=SearchOptions(time_s=max_time_s, skip=skipped(words)), say=say))
    if found.profile is None or found.log is None or found.profile.step_us is None:
        raise AdvisorError(f"{name} gave nothing to measure", exit_code=ExitCode.OWN_FAULT)
    model = found.profile.model
    kept = {v.transform: v for v in found.log.verdicts if v.status == Status.KEPT}
    row = ModelRow(
        name=name,
        shape=(model.batch_size, *next((conv.input_shape[1:] for conv in model.convs if conv.input_shape), ())),
        dtype=_dtype(kept),
        layout="nhwc" if "channels_last" in kept or model.channels_last else "nchw",
        script=" ".join((Path(words[0]).name, *words[1:])),
        eager_ms=None,
        compile_ms=None,
        limit_ms=_limit_ms(found.profile, found.log, found.run_dir, kept),
        baseline_error=None,
        kept=tuple(kept),
        trials=tuple(f"{v.transform}: {v.status}, {v.reason}" for v in found.log.verdicts),
        apply_s=found.log.seconds,
        spent_s=dict(found.log.spent),
        trial_s={
            name: math.fsum(v.seconds for v in found.log.verdicts if v.transform == name)
            for name in dict.fromkeys(v.transform for v in found.log.verdicts)
        },
        parameters={name: dict(v.parameters) for name, v in kept.items() if v.parameters},
        **_times(found, images=model.batch_size, plain_us=found.profile.step_us.median),
    )
    return row, found


def _proved(
    known: ModelRow, words: tuple[str, ...], *, max_time_s: float, say: Callable[[str], None]
) -> tuple[ModelRow, pipeline.ApplyResult]:
    """The row of what an earlier search kept, proved and timed again."""
    items = tuple(
        PlanItem(
            transform=name,
            status=Status.KEPT,
            semantics=registry.get(name).semantics.value,
            parameters=known.parameters.get(name, {}),
        )
        for name in known.kept
    )
    searched = known.searched or known.date
    plan = Path(records.PLAN_FILE)
    planfile.write(plan, Plan(script=words[0], argv=words[1:], created=searched, items=items))
    found = _finished(pipeline.prove(words, plan=plan, options=SearchOptions(time_s=max_time_s), say=say))
    if found.log is None or not _stack(found).plain_us:
        raise AdvisorError(f"{known.name} gave nothing to measure", exit_code=ExitCode.OWN_FAULT)
    kept = tuple(v.transform for v in found.log.verdicts if v.status == Status.KEPT)
    times = _times(found, images=known.shape[0], plain_us=known.plain_ms * 1e3)
    row = replace(known, kept=kept, searched=searched, eager_ms=None, compile_ms=None, baseline_error=None, **times)
    return row, found


def _finished(found: pipeline.ApplyResult) -> pipeline.ApplyResult:
    """What came of it.

    Raises:
        KeyboardInterrupt: when the user has ended it, which it takes for its own end: the row on file stays.
    """
    if found.log is not None and found.log.interrupted:
        raise KeyboardInterrupt
    return found


def _stack(found: pipeline.ApplyResult) -> StackVerdict:
    """Of the kept changes together; one without times where they were not run."""
    stack = found.log.stack if found.log is not None else None
    return stack or StackVerdict(passed=None, detail="")


def _times(found: pipeline.ApplyResult, *, images: int, plain_us: float) -> dict[str, Any]:
    """What of a row fresh processes say of the script as written, whose step takes `plain_us` by what else is known, and of what is kept."""
    import torch

    stack = _stack(found)
    plain_us = statistics.median(stack.plain_us or (plain_us,))
    advisor_us = statistics.median(stack.stack_us) if stack.stack_us else None
    return {
        "plain_ms": plain_us / 1e3,
        "advisor_ms": advisor_us / 1e3 if advisor_us else None,
        "spread": (max(stack.stack_us) - min(stack.stack_us)) / advisor_us if advisor_us else None,
        "n": len(stack.stack_us),
        "error": _difference(stack.losses_stack, stack.losses_plain),
        "plain_images_per_s": images / plain_us * 1e6,
        "advisor_images_per_s": images / advisor_us * 1e6 if advisor_us else None,
        "speedup": stack.speedup,
        "speedup_low": stack.speedup_low,
        "speedup_high": stack.speedup_high,
        "losses": stack.detail,
        "kernel_sha": {source: sources.sha256(source) for source in sources.all_names()},
        "launched": stack.kernels,
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }


def _dtype(kept: Collection[str]) -> str:
    return next((dtype for transform, dtype in DTYPES.items() if transform in kept), "float32")


def _limit_ms(profile: StepProfile, log: TrialLog, run_dir: Path, kept: Collection[str]) -> float | None:
    """Limit of the last step profiled, if it computed in the dtype of what was `kept`."""
    on: tuple[str, ...] = ()
    for again in log.rounds:
        if again.folder:
            profile, on = storage.load(run_dir / again.folder / PROFILE_FILE, StepProfile), again.kept
    return profile.limit_us / 1e3 if _dtype(on) == _dtype(kept) and profile.limit_us else None


def _difference(losses: Sequence[float], plain: Sequence[float]) -> float | None:
    """Relative difference of the mean losses over the steps that both have."""
    n = min(len(losses), len(plain))
    if not n:
        return None
    mean = math.fsum(plain[:n]) / n
    return abs(math.fsum(losses[:n]) / n - mean) / abs(mean) if mean else None


def _step_ms(measured: records.Measurement) -> float | None:
    return statistics.median(measured.step_us) / 1e3 if measured.step_us else None
