"""The report's tables of plain facts: memory, input pipeline, training, machine, and what measuring cost. Pure."""

from __future__ import annotations

from collections import Counter

from advisor.core import units
from advisor.core.environment import Environment
from advisor.core.profile import InputStats, MemoryStats, ProfilerCost, StepProfile
from advisor.reporting import numbers, wording

Rows = list[tuple[str, str]]


def facts(profile: StepProfile) -> list[tuple[str, Rows]]:
    """Tables as (title, rows), rows without a value left out."""
    on_gpu = profile.environment.device == "cuda"
    groups = [
        ("Memory", _memory(profile.memory, on_gpu)),
        ("Input pipeline", _input(profile, on_gpu)),
        ("Training", _training(profile)),
        ("Machine", _machine(profile.environment, on_gpu)),
        ("What measuring cost", _cost(profile.cost, on_gpu)),
    ]
    return [(title, [(k, v) for k, v in rows if v]) for title, rows in groups]


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _size(value: float) -> str:
    return units.bytes_text(value) if value else ""


def _memory(mem: MemoryStats, cuda: bool) -> Rows:
    return [
        ("Peak allocated", _size(mem.peak_allocated_bytes)),
        ("Peak reserved", _size(mem.peak_reserved_bytes)),
        ("Device" if cuda else "Host", _size(mem.total_bytes)),
        ("Allocator requests a step", f"{mem.allocations:,.0f}" if mem.allocations else ""),
        ("Device allocations a step", f"{mem.device_allocations:.3g}" if cuda else ""),
        ("Growth a step", units.bytes_text(mem.growth_bytes) if mem.growth_bytes is not None else ""),
        ("Allocator retries", str(mem.retries) if cuda else ""),
    ]  # fmt: skip


def _input(profile: StepProfile, cuda: bool) -> Rows:
    inp = profile.input
    if not inp.loader:
        return [("Loader", "no DataLoader was seen")]
    return [
        ("Loader", inp.loader),
        ("Source", inp.source),
        ("Time in next() a step", units.time_text(inp.next_us)),
        ("Waits for batches that were not ready", units.time_text(inp.late_us) if inp.loader else ""),
        ("Workers", str(inp.workers)),
        ("Batch", f"{inp.batch_size} samples, {units.bytes_text(inp.batch_bytes)} {inp.batch_dtype}".strip()),
        ("Pinned memory", _yes(inp.pin_memory)),
        ("Persistent workers", _yes(inp.persistent_workers)),
        ("Moved to the GPU unchanged", _yes(inp.moved_unchanged) if cuda else ""),
        ("Asynchronous copy", _yes(inp.non_blocking) if cuda else ""),
        ("Normalised by", inp.normalise),
        ("Time of normalising a batch", units.time_text(inp.normalise_us) if inp.normalise else ""),
        ("A batch takes", wording.batch_making(profile)),
        *_loader_lines(inp),
        ("Its workers wait for orders", units.percent_text(inp.work.waits_frac) if inp.work and inp.work.worker and inp.work.told else ""),
    ]  # fmt: skip


def _training(profile: StepProfile) -> Rows:
    model = profile.model
    return [
        ("Model", ", ".join(model.roots)),
        ("Parameters", f"{model.parameters:,}" if model.parameters else ""),
        ("Optimizer", ", ".join(f"{name} ×{n}" if n > 1 else name for name, n in Counter(model.optimizers).items())),
        ("Batch size", str(model.batch_size or "")),
        ("Accumulation", f"{model.accumulation} backward passes a step" if model.accumulation > 1 else ""),
        ("Autocast", model.autocast or "off"),
        ("Parameter dtype", model.parameter_dtype),
        ("channels_last", _yes(model.channels_last)),
        ("Distributed", f"{model.distributed}, {model.world_size} processes" if model.distributed else ""),
        ("Flags set", ", ".join(sorted(k for k, v in model.flags.items() if v))),
        ("Steps found by", profile.step_kind),
        ("Steps left out", ", ".join(f"{n} {why}" for why, n in sorted(profile.excluded.items()))),
    ]  # fmt: skip


def _machine(env: Environment, cuda: bool) -> Rows:
    return [
        ("GPU", f"{env.gpu_name} (sm_{env.sm_arch}, {env.sm_count} SMs)" if cuda else "none used"),
        ("GPU memory", _size(env.gpu_memory_bytes)),
        ("CPU", f"{env.cpu_name}, {env.cpu_count} cores" if env.cpu_name else ""),
        ("Host memory", _size(env.host_memory_bytes)),
        ("Copy bandwidth", f"{units.rate_text(env.copy_gbps)} ({env.rates_provenance}{', in doubt' if env.rates_doubt else ''})" if env.copy_gbps else ""),
        *((f"Matrix rate, {dtype}", f"{rate:.3g} TFLOP/s") for dtype, rate in sorted(env.matrix_tflops.items())),
        ("torch", env.torch),
        ("CUDA, cuDNN", ", ".join(v for v in (env.cuda, env.cudnn) if v)),
        ("Driver", env.driver),
        ("CuPy", env.cupy),
        ("Python", env.python),
        ("Platform", env.platform),
    ]  # fmt: skip


def _cost(cost: ProfilerCost, cuda: bool) -> Rows:
    return [
        ("Traced steps", str(cost.traced_steps)),
        ("Traced step", numbers.duration(cost.traced_step_us) if cost.traced_step_us else ""),
        ("Slower than untraced by", units.percent_text(cost.overhead_frac) if cost.overhead_frac > 0 else "nothing"),
        ("Launches with a device record", f"{100 * cost.coverage_frac:.1f} %" if cuda else ""),
        ("Events", f"{cost.events:,}"),
        ("Analysis", f"{cost.analyse_s:.2g} s" if cost.analyse_s else ""),
    ]  # fmt: skip


def _loader_lines(stats: InputStats) -> Rows:
    """What takes most of making a batch, by line."""
    work = stats.work
    if work is None or not work.told:
        return []
    return [(line.source or line.what, f"{line.told}: {units.time_text(line.time_us)} a batch") for line in work.lines]
