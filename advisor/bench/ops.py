"""`advisor bench ops`: each bundled kernel beside eager PyTorch and torch.compile, in one process, with the limit and the error."""

from __future__ import annotations

import datetime
import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from advisor.analysis import measured_convs
from advisor.bench import dispatch_rows, results, timing, units
from advisor.bench.op_rows import Left, OpRow, RowChoice, is_compiled, key, keys, merged
from advisor.bench.placed import placed
from advisor.core import storage
from advisor.core.errors import AdvisorError, ExitCode, first_line
from advisor.ops import catalog, dispatch, dispatch_table, family, nvrtc, verify
from advisor.ops.family import Case, Family, Work
from advisor.profiling.machine import counters as hardware
from advisor.profiling.machine.cupti import CountersUnavailable

DEVICE = "cuda"
# For one case, without compiling: rounds beyond it are left out.
CASE_BUDGET_S = 10.0
# Errors are taken on a batch of at most this many: fp64 copies of a whole batch would not fit beside the rest.
ERROR_BATCH = 8
# Calls in a row for the host's times: few enough that no launch waits for room in the queue, and that what they keep fits.
HOST_CALLS, HOST_BYTES, HOST_WARMUP = 8, 8 << 30, 3


@dataclass(slots=True)
class Ceilings:
    """Rates measured in this run, each when it is first needed."""

    copy_gbps: float = field(default_factory=lambda: timing.copy_gbps())
    tflops: dict[str, float] = field(default_factory=dict)

    def limit_ms(self, work: Work, dtype: str) -> float:
        """The larger of the time for the bytes and the time for the operations."""
        limit = work.nbytes / self.copy_gbps / 1e6
        if work.flops:
            unit = {"matrix": dtype, "vector": "float32"}.get(work.unit, work.unit)
            if unit not in self.tflops:
                self.tflops[unit] = timing.matrix_tflops(getattr(torch, unit))
            limit = max(limit, work.flops / self.tflops[unit] / 1e9)
        return limit


def run(
    choice: RowChoice,
    *,
    out: Path | None,
    baselines: tuple[str, ...],
    counters: bool,
    host_only: bool = False,
    say: Callable[[str], None],
) -> int:
    """Measure, and write after each case into the file's earlier rows, so that an interrupted run leaves what it had.

    With `counters` the cases are counted when all of them have been timed, and what is only `uncounted` without being timed again. With
    `host_only` the host's times alone are taken again of what is on file with the kernels as they are.
    A case that fails is told, and the rest goes on; the exit code is then 1. One that cannot be counted is told and keeps its times.

    Raises:
        AdvisorError: without a GPU or, if they are asked for, without its counters (exit code 5), or when no case is named so.
    """
    _check_machine(counters)
    path = out or results.folder() / "ops.json"
    rows = results.on_file(path)
    left = choice.left(rows, baselines, counters=counters, host_only=host_only)
    if left.why_nothing:
        print(f"{path}: {left.why_nothing}")
        return ExitCode.OK
    file, known, ceilings = OpsFile(path), {key(row): row for row in rows}, Ceilings()
    _compile(left, choice.part, say)
    gc.freeze()  # torch's own objects: looking through them took most of a second a case

    def measured(kind: Family, case: Case) -> list[OpRow]:
        if host_only:
            return host_again(case, [storage.from_plain(OpRow, known[k]) for k in keys(case)])
        return measure(kind, case, ceilings, compiled=is_compiled(case, baselines))

    failed, done = list[str](), [(case, of) for _, case, of in left.only_count]
    for number, (kind, case) in enumerate(left.cases, 1):
        say(f"measuring {kind.id}: case {number} of {len(left.cases)}")
        try:
            found = measured(kind, case)
        except Exception as error:
            failed.append(f"{kind.id} {case.label}: {first_line(error)}")
            print(failed[-1], flush=True)
            continue
        finally:
            _free()
        print(*(row.host_line() if host_only else row.line() for row in found), sep="\n", flush=True)
        file.keep(found, ceilings)
        done.append((case, found))
    if counters:
        say("counting")
        for number, counted_rows in enumerate(count(done)):
            file.keep(counted_rows, ceilings)
            say(f"counted {number + 1} of {len(done)} cases")
    if failed:
        print(f"{len(failed)} of {len(left.cases)} cases failed:", *failed, sep="\n  ", file=sys.stderr)
        return ExitCode.FINDINGS
    if out is None:
        dispatch_rows.write_all(dispatch_rows.results())
        print(f"{dispatch_table.FILE.name} and {measured_convs.FILE.name} have what these rows show")
    return ExitCode.OK


def _check_machine(counters: bool) -> None:
    if reason := nvrtc.unavailable():
        raise AdvisorError(f"no benchmark here: {reason}", exit_code=ExitCode.GPU_REQUIRED)
    if counters:
        usable, reason = hardware.preflight()
        if not usable:
            raise AdvisorError(f"no counters here: {reason}", exit_code=ExitCode.GPU_REQUIRED)


def _compile(left: Left, part: tuple[int, int], say: Callable[[str], None]) -> None:
    """What the cases launch. Other parts compile the others meanwhile, and leave them in the cache."""
    say("compiling")
    launched = dict.fromkeys([*(kind for kind, _ in left.cases), *(kind for kind, *_ in left.only_count)])
    variants = [variant for kind in launched for variant in kind.variants(nvrtc.arch(0))]
    nvrtc.warm([*variants[part[0] - 1 :: part[1]], *variants])


class OpsFile:
    """The results on file, with what is measured put into the place of earlier rows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known = [k for kind in catalog.FAMILIES for case in kind.benchmark for k in keys(case)]

    def keep(self, measured: Sequence[OpRow], ceilings: Ceilings) -> None:
        """Write these rows, beside the others, also those that a process with another part has written meanwhile."""
        copy_gbps = ceilings.copy_gbps  # measured at first: not with the file in hand
        with results.alone(self._path):
            rows = merged(results.on_file(self._path), [storage.to_plain(row) for row in measured], self._known)
            results.write(self._path, "ops", rows, copy_gbps=copy_gbps, arch=nvrtc.arch(0))


def _free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def count(done: Sequence[tuple[Case, list[OpRow]]]) -> Iterator[list[OpRow]]:
    """Of each case its rows again, with what their passes use of each unit. Why something is not counted is printed."""
    try:
        with units.UnitCounters() as counting:
            for case, rows in done:
                shares = _shares(case, counting)
                _free()
                for row in (row for row in rows if row.pass_ in shares):
                    print(f"{row.name:24} {row.pass_:8} {units.text(shares[row.pass_])}", flush=True)
                yield [replace(row, units=shares.get(row.pass_)) for row in rows]
    except CountersUnavailable as error:
        print(f"not counted: {error}", flush=True)


def _shares(case: Case, counting: units.UnitCounters) -> dict[str, dict[str, float]]:
    """Pass → unit → share, of the passes that could be counted."""
    found: dict[str, dict[str, float]] = {}
    try:
        with dispatch.everything():
            for way, runs, sets in contests(case, {"advisor": case.ours}):
                try:
                    found[way] = counting.shares(runs["advisor"], sets)
                except units.NotCounted as error:
                    print(f"{case.label} {way}: not counted: {error}", flush=True)
    except CountersUnavailable:
        raise
    except Exception as error:  # the times are there already
        print(f"{case.label}: not counted: {first_line(error)}", flush=True)
    return found


def host_again(case: Case, rows: Sequence[OpRow]) -> list[OpRow]:
    """The case's rows with the host's times as they are now."""
    with dispatch.everything():
        found = host_us(case)
    today = datetime.date.today().isoformat()
    return [
        replace(
            row,
            advisor_host_us=found[row.pass_]["advisor"],
            eager_host_us=found[row.pass_]["eager"],
            host_date=today,
        )
        for row in rows
    ]


def host_us(case: Case) -> dict[str, dict[str, float]]:
    """Pass → contender → microseconds of the host a call, ours through a site as in a captured graph.

    Calls are made in a row as a training makes them, and a row's backward is one run of autograd: one call by itself behind a wait for the
    device takes the host up to twice as long, eager's and ours (docs/notes/host-cost-of-a-call.md#calls-replayed-from-c).
    """
    arguments = case.inputs(verify.seeded(DEVICE, 0), case.shape[0])
    nbytes = sum(a.numel() * a.element_size() for a in arguments if isinstance(a, torch.Tensor))
    calls = max(1, min(HOST_CALLS, HOST_BYTES // nbytes))

    def forwards(function: Callable[..., Any]) -> Callable[[], object]:
        return lambda: [function(*arguments) for _ in range(calls)]

    def backwards(function: Callable[..., Any]) -> Callable[[], object]:
        return _backwards([_graph(function, _leaves_anew(arguments)) for _ in range(calls)])

    with placed(case.ours) as ours:
        made = {"forward": forwards, "backward": backwards}
        found: dict[str, dict[str, float]] = {}
        for way in case.passes:
            runs = {"advisor": made[way](ours), "eager": made[way](case.eager)}
            times = timing.host(runs, calls=calls, warmup=HOST_WARMUP)
            found[way] = {name: spread.median for name, spread in times.items()}
    return found


def _leaves_anew(arguments: Sequence[Any]) -> list[Any]:
    """With leaves of their own over the same memory, so that no two graphs' gradients are added up."""
    return [a.detach().requires_grad_() if isinstance(a, torch.Tensor) and a.requires_grad else a for a in arguments]


def measure(kind: Family, case: Case, ceilings: Ceilings, *, compiled: bool) -> list[OpRow]:
    """One row a pass, with the family's kernels forced on.

    Raises:
        AdvisorError: when the kernels did not run.
    """
    run = {name for work in case.passes.values() for name in work.kernels}
    # A case beside which another is held may run other families' kernels alone, as a norm's behind PyTorch's convolution.
    counted = [kind] if run & set(kind.kernels) else [other for other in catalog.FAMILIES if run & set(other.kernels)]
    with dispatch.everything():
        before = sum(sum(family.engaged.values()) for family in counted)
        rows = rows_of(case, ceilings, compiled=compiled)
        if sum(sum(family.engaged.values()) for family in counted) == before:
            raise AdvisorError("the kernels did not run: " + dispatch.told(kind.id))
    return rows


def rows_of(case: Case, ceilings: Ceilings, *, compiled: bool) -> list[OpRow]:
    times = timed(case, compiled=compiled, budget_s=CASE_BUDGET_S)
    hosts = host_us(case)
    batch = min(case.shape[0], ERROR_BATCH)
    mine, theirs = verify.errors(case, (case.ours, case.eager), DEVICE, batch=batch, seed=1)
    made = datetime.date.today().isoformat()
    memory = {name: peaks(case, function) for name, function in (("advisor", case.ours), ("eager", case.eager))}
    return [
        OpRow(
            name=case.name,
            pass_=kind,
            shape=case.shape,
            dtype=case.dtype,
            layout=case.layout,
            advisor_ms=times[kind]["advisor"].median,
            eager_ms=times[kind]["eager"].median,
            compile_ms=times[kind]["compile"].median if "compile" in times[kind] else None,
            limit_ms=ceilings.limit_ms(work, case.dtype),
            spread=(times[kind]["advisor"].p90 - times[kind]["advisor"].p10) / times[kind]["advisor"].median,
            eager_spread=(times[kind]["eager"].p90 - times[kind]["eager"].p10) / times[kind]["eager"].median,
            n=times[kind]["advisor"].n,
            advisor_host_us=hosts[kind]["advisor"],
            eager_host_us=hosts[kind]["eager"],
            error=mine.output if kind == "forward" else mine.gradient,
            baseline_error=theirs.output if kind == "forward" else theirs.gradient,
            kernel_sha=family.kernel_sha(work),
            torch=torch.__version__,
            date=made,
            advisor_peak_bytes=memory["advisor"][kind],
            eager_peak_bytes=memory["eager"][kind],
        )
        for kind, work in case.passes.items()
    ]


def timed(case: Case, *, compiled: bool, budget_s: float) -> dict[str, dict[str, Any]]:
    """Device times of a case's passes: pass → contender → Spread in ms."""
    contenders: dict[str, Callable[..., Any]] = {"advisor": case.ours, "eager": case.eager}
    if compiled and (function := _compiled(case)):
        contenders["compile"] = function
    return {
        way: timing.interleaved(runs, sets, budget_s=budget_s / 2) for way, runs, sets in contests(case, contenders)
    }


def _compiled(case: Case) -> Callable[..., Any] | None:
    """PyTorch's own by torch.compile, compiled for the case. None, and why is printed, where that fails: the rest has its times."""
    torch._dynamo.reset()
    function: Callable[..., Any] = torch.compile(case.eager, dynamic=False)
    try:
        # A backward that may overwrite what the forward kept would run but once.
        with torch._functorch.config.patch(donated_buffer=False):
            arguments = case.inputs(verify.seeded(DEVICE, 0), case.shape[0])
            if "backward" in case.passes:
                _backward([_graph(function, arguments)])(0)
            else:
                function(*arguments)
    except Exception as error:
        print(f"{case.label}: torch.compile: {first_line(error)}", flush=True)
        return None
    return function


def contests(
    case: Case, contenders: Mapping[str, Callable[..., Any]]
) -> Iterator[tuple[str, dict[str, Callable[[Any], object]], Sequence[Any]]]:
    """Each pass of a case: its name, what each contender runs in it, and the sets of inputs over which that goes."""
    generator = verify.seeded(DEVICE, 0)
    first = case.inputs(generator, case.shape[0])
    nbytes = sum(a.numel() * a.element_size() for a in first if isinstance(a, torch.Tensor))
    sets = [first, *(case.inputs(generator, case.shape[0]) for _ in range(timing.rotation(nbytes) - 1))]
    yield "forward", {name: _call(function) for name, function in contenders.items()}, sets
    if "backward" in case.passes:
        graphs = {name: [_graph(function, arguments) for arguments in sets] for name, function in contenders.items()}
        yield "backward", {name: _backward(graphs[name]) for name in contenders}, range(len(sets))


def peaks(case: Case, function: Callable[..., Any]) -> dict[str, int]:
    """Pass → most bytes allocated in it beyond inputs, and in the backward beyond what comes from above too."""
    gc.collect()  # what an earlier case left in a cycle would be freed in a pass, and be taken for less memory of this one's
    own = case.inputs(verify.seeded(DEVICE, 0), case.shape[0])
    leaves = [a for a in own if isinstance(a, torch.Tensor) and a.requires_grad]
    found: dict[str, int] = {}
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    outputs = verify.tensors(function(*own))
    found["forward"] = torch.cuda.max_memory_allocated() - before
    if "backward" in case.passes:
        above = [torch.randn_like(y) for y in outputs]
        before += sum(dy.numel() * dy.element_size() for dy in above)
        torch.cuda.reset_peak_memory_stats()
        torch.autograd.grad(outputs, leaves, above)
        found["backward"] = torch.cuda.max_memory_allocated() - before
    return found


def _call(function: Callable[..., Any]) -> Callable[[Sequence[Any]], object]:
    return lambda arguments: function(*arguments)


def _graph(
    function: Callable[..., Any], arguments: Sequence[Any]
) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor], list[torch.Tensor]]:
    """Outputs, leaves and gradients from above.

    Buffers are its own: autograd refuses a graph whose buffers a later forward has changed.
    """
    own = [
        a.clone() if isinstance(a, torch.Tensor) and a.is_floating_point() and not a.requires_grad else a
        for a in arguments
    ]
    outputs = verify.tensors(function(*own))
    leaves = [a for a in own if isinstance(a, torch.Tensor) and a.requires_grad]
    return outputs, leaves, [torch.randn_like(y) for y in outputs]


def _backward(graphs: Sequence[tuple[Any, Any, Any]]) -> Callable[[int], object]:
    def run(index: int) -> object:
        outputs, leaves, above = graphs[index]
        return torch.autograd.grad(outputs, leaves, above, retain_graph=True)

    return run


def _backwards(graphs: Sequence[tuple[Any, Any, Any]]) -> Callable[[], object]:
    """All of them in one run of autograd."""
    outputs, leaves, above = ([tensor for part in parts for tensor in part] for parts in zip(*graphs, strict=True))
    return lambda: torch.autograd.grad(outputs, leaves, above, retain_graph=True)
