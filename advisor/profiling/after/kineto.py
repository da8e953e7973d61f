"""Traces that torch.profiler wrote elsewhere (`export_chrome_trace`, `tensorboard_trace_handler`), read into a run folder.

What the trace carries is what is known: operators with shapes and dtypes (`record_shapes=True`), module classes (`with_modules=True`),
kernels, copies, runtime calls. Step times are those of the traced steps, so they hold the profiler's cost.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import quantiles
from typing import Any

from advisor.core import storage
from advisor.core.environment import Environment
from advisor.core.errors import AdvisorError, cause
from advisor.core.profile import InputStats, ModelFacts, Spread
from advisor.core.trace import DeviceTable, OpTable, RuntimeTable, Trace
from advisor.core.units import bytes_text
from advisor.loop.records import (
    FACTS_FILE,
    SESSION_FILE,
    STEPS_FILE,
    TRACE_FILE,
    FactsRecord,
    StepsRecord,
    save_trace,
)
from advisor.loop.session import Session
from advisor.profiling.trace.hostcalls import is_launch

MOST_BYTES = 4_000_000_000  # of the text; a trace of a few steps has tens of megabytes
_STEP = re.compile(r"ProfilerStep#(\d+)$")
_OPTIMIZER = re.compile(r"Optimizer\.step#(\w+)\.step$")
_MODULE = re.compile(r"nn\.Module: (\w+?)_(\d+)$")
_LOADER = "enumerate(DataLoader)"
_EXPECTED = "a trace of torch.profiler: JSON with traceEvents, plain or gzip"


@dataclass(slots=True)
class _Read:
    """What has been read so far. Threads are the operating system's; backward's forward thread is the one that steps."""

    ops: OpTable = field(default_factory=OpTable)
    runtime: RuntimeTable = field(default_factory=RuntimeTable)
    device: DeviceTable = field(default_factory=DeviceTable)
    steps: list[tuple[int, int, int]] = field(default_factory=list)  # start, end, thread
    modules: Counter[str] = field(default_factory=Counter)
    optimizers: Counter[str] = field(default_factory=Counter)


def imported(file: Path, run_dir: Path) -> Environment:
    """Read the trace and write what it holds into the run folder, as a profiled script leaves it; the machine it is of.

    Raises:
        AdvisorError: when the file cannot be read, is no trace of torch.profiler, or holds no operator.
    """
    document = _document(file)
    read = _Read()
    for event in document["traceEvents"]:
        if isinstance(event, dict) and event.get("ph") == "X":
            _take(read, event)
    if not read.ops.name and not read.device.name:
        raise AdvisorError(f"{file} holds no operator and no kernel", expected=_EXPECTED)
    on_gpu = bool(read.device.name)
    launches, matched = _coverage(read)
    trace = Trace(
        device="cuda" if on_gpu else "cpu",
        step_bounds_ns=_bounds(read),
        ops=_in_order(read),
        runtime=read.runtime,
        kernels=read.device,
        launches=launches,
        launches_matched=matched,
    )
    if len(read.steps) < 1:
        trace.notes.append(
            "the trace marks no steps (call `prof.step()`): advisor takes optimizer steps as steps, or else the whole trace"
        )
    facts = FactsRecord(model=_model(read, document), input=_input(read, trace))
    storage.save(run_dir / SESSION_FILE, Session(mode="profile", run_dir=str(run_dir), script=file.name))
    storage.save(run_dir / STEPS_FILE, _steps(trace))
    storage.save(run_dir / FACTS_FILE, facts)
    save_trace(run_dir / TRACE_FILE, trace)
    return _environment(document, on_gpu)


def _document(file: Path) -> dict[str, Any]:
    try:
        raw = file.read_bytes()
        text = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
        if len(text) > MOST_BYTES:
            raise AdvisorError(f"{file} has {bytes_text(len(text))}", fix="Trace fewer steps.")
        document = json.loads(text)
    except (OSError, EOFError, zlib.error) as error:
        raise AdvisorError(f"{file} cannot be read ({cause(error)})", expected=_EXPECTED) from None
    except (ValueError, RecursionError):
        raise AdvisorError(f"{file} is no JSON, or cut off", expected=_EXPECTED) from None
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise AdvisorError(f"{file} has no list traceEvents", expected=_EXPECTED)
    return document


def _take(read: _Read, event: Mapping[str, Any]) -> None:
    """Sort one event into its table. One without a sound time is left out: CUPTI of CUDA 12.6 to 13.0 loses some."""
    try:
        start = round(float(event["ts"]) * 1e3)
        end = start + round(float(event["dur"]) * 1e3)
    except (KeyError, TypeError, ValueError, OverflowError):
        return
    found = event.get("args")
    args: Mapping[str, Any] = found if isinstance(found, dict) else {}
    kind, name = str(event.get("cat", "")), str(event.get("name", ""))
    if kind in ("cpu_op", "user_annotation", "python_function"):
        _take_host(read, kind, name, start, end, _whole(event.get("tid")), args)
    elif kind in ("cuda_runtime", "cuda_driver"):
        _append(
            read.runtime,
            name=name,
            start_ns=start,
            end_ns=end,
            thread=_whole(event.get("tid")),
            correlation=_whole(args.get("correlation")),
        )
    elif kind in ("kernel", "gpu_memcpy", "gpu_memset"):
        _append(
            read.device,
            name=name,
            start_ns=start,
            end_ns=end,
            stream=_whole(args.get("stream")),
            correlation=_whole(args.get("correlation")),
            op=_whole(args.get("External id")),
            grid=_triple(args.get("grid")),
            block=_triple(args.get("block")),
            nbytes=_whole(args.get("bytes")),
            device=_whole(args.get("device")),
        )


def _take_host(read: _Read, kind: str, name: str, start: int, end: int, thread: int, args: Mapping[str, Any]) -> None:
    annotation = ""
    if kind == "python_function":
        module = _MODULE.match(name)
        if module is None:
            return
        read.modules[f"{module[1]}_{module[2]}"] += 1
        annotation = f"module:{module[1]}_{module[2]}|{module[1]}"
    elif step := _STEP.match(name):
        read.steps.append((start, end, thread))
        annotation = f"step:{step[1]}"
    elif kind == "user_annotation" or name.startswith((_LOADER, "Optimizer.")):
        annotation = f"user:{name}"
        if found := _OPTIMIZER.match(name):
            read.optimizers[found[1]] += 1
    types = args.get("Input type")
    _append(
        read.ops,
        name=name,
        start_ns=start,
        end_ns=end,
        thread=thread,
        correlation=_whole(args.get("External id")),
        sequence=_whole(args.get("Sequence number"), -1),
        forward_thread=_whole(args.get("Fwd thread id")),
        annotation=annotation,
        shapes=_listed(args.get("Input Dims")),
        dtypes=",".join(map(str, types)) if isinstance(types, list) else "",
        strides=_listed(args.get("Input Strides")),
        flops=0,
        arguments=_arguments(args.get("Concrete Inputs")),
    )


def _append(table: Any, **values: Any) -> None:
    for name, value in values.items():
        getattr(table, name).append(value)


def _whole(value: Any, default: int = 0) -> int:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return default


def _triple(value: Any) -> str:
    return "x".join(str(_whole(part)) for part in value) if isinstance(value, list) and len(value) == 3 else ""


def _listed(value: Any) -> str:
    return json.dumps(value) if isinstance(value, list) else ""


def _arguments(value: Any) -> str:
    """Torch writes each argument as text; those that are no JSON (tensors, words) are null."""
    if not isinstance(value, list):
        return ""
    found = []
    for text in value:
        try:
            found.append(json.loads(str(text).replace("True", "true").replace("False", "false")))
        except ValueError:
            found.append(None)
    return json.dumps(found)


def _bounds(read: _Read) -> list[int]:
    """Where steps begin and end: at the profiler's steps, else behind each optimizer step, else around everything."""
    if read.steps:
        starts = sorted(start for start, _, _ in read.steps)
        return [*starts, max(end for _, end, _ in read.steps)]
    ends = sorted(
        end
        for end, text in zip(read.ops.end_ns, read.ops.annotation, strict=True)
        if text.startswith("user:Optimizer.step#")
    )
    if len(ends) >= 2:
        return ends
    times = [*read.ops.start_ns, *read.device.start_ns], [*read.ops.end_ns, *read.device.end_ns]
    return [min(times[0]), max(times[1])]


def _in_order(read: _Read) -> OpTable:
    """The operators by their start, as the tables have them; of backward's, with the forward thread that they tell."""
    ops = read.ops
    order = sorted(range(len(ops.name)), key=lambda i: (ops.start_ns[i], -ops.end_ns[i]))
    sorted_ops = OpTable(**{name: [getattr(ops, name)[i] for i in order] for name in OpTable.__slots__})
    counts = Counter(thread for thread, sequence in zip(ops.thread, ops.sequence, strict=True) if sequence >= 0)
    main = read.steps[0][2] if read.steps else max(counts, key=lambda t: counts[t], default=0)
    # The profiler numbers threads in its own way here: the one that steps is where the forward pass ran.
    sorted_ops.forward_thread[:] = [main if thread else 0 for thread in sorted_ops.forward_thread]
    return sorted_ops


def _coverage(read: _Read) -> tuple[int, int]:
    """Launches, and of those the ones with a device record."""
    seen = set(read.device.correlation)
    runtime = read.runtime
    launched = [c for name, c in zip(runtime.name, runtime.correlation, strict=True) if is_launch(name)]
    return len(launched), sum(c in seen for c in launched)


def _steps(trace: Trace) -> StepsRecord:
    raw = tuple((b - a) / 1e3 for a, b in pairwise(trace.step_bounds_ns))
    spread = _spread(raw)
    return StepsRecord(
        kind="optimizer",
        device=trace.device,
        step_us=spread,
        wall_us=spread,
        steps_seen=len(raw),
        traced_wall_us=raw,
        phase="done",
        complete=True,
    )


def _spread(raw: tuple[float, ...]) -> Spread:
    cuts = quantiles(raw, n=10, method="inclusive") if len(raw) > 1 else [raw[0]] * 9
    return Spread(median=cuts[4], p10=cuts[0], p90=cuts[8], n=len(raw), raw=raw)


def _model(read: _Read, document: Mapping[str, Any]) -> ModelFacts:
    names = set(read.ops.name)
    classes = Counter(name.rpartition("_")[0] for name in read.modules)
    spread = document.get("distributedInfo")
    world = _whole(spread.get("world_size"), 1) if isinstance(spread, dict) else 1
    return ModelFacts(
        module_counts=dict(classes),
        optimizers=tuple(name for name, _ in read.optimizers.most_common()),
        optimizer_fused=any(name.startswith("aten::_fused_") and "scaler" not in name for name in names),
        optimizer_foreach=any(name.startswith("aten::_foreach_") for name in names),
        compiled=any(name.startswith(("Torch-Compiled Region", "CompiledFunction")) for name in names),
        graphed=any("GraphLaunch" in name for name in read.runtime.name),
        fixed_shapes=_same_shapes(read),
        world_size=world,
        distributed="ddp" if any("DistributedDataParallel" in name for name in names) else "",
    )


def _same_shapes(read: _Read) -> bool:
    """Whether each step has convolutions and products of the same shapes."""
    steps: dict[int, Counter[str]] = defaultdict(Counter)
    bounds = _bounds(read)
    for name, start, shapes in zip(read.ops.name, read.ops.start_ns, read.ops.shapes, strict=True):
        if name in ("aten::convolution", "aten::addmm", "aten::mm") and shapes:
            steps[sum(start >= bound for bound in bounds)][shapes] += 1
    inside = [shapes for number, shapes in steps.items() if 0 < number < len(bounds)]
    return all(shapes == inside[0] for shapes in inside)


def _input(read: _Read, trace: Trace) -> InputStats:
    """What the loader took of a step."""
    first, last = trace.step_bounds_ns[0], trace.step_bounds_ns[-1]
    spent = [
        end - start
        for name, start, end in zip(read.ops.name, read.ops.start_ns, read.ops.end_ns, strict=True)
        if name.startswith(_LOADER) and first <= start < last
    ]
    if not spent:
        return InputStats()
    return InputStats(loader="DataLoader", next_us=sum(spent) / 1e3 / (len(trace.step_bounds_ns) - 1))


def _environment(document: Mapping[str, Any], on_gpu: bool) -> Environment:
    """The machine of the trace, as far as it tells: of its rates it tells nothing."""
    listed: Iterable[Any] = document.get("deviceProperties") or ()
    gpus = [gpu for gpu in listed if isinstance(gpu, dict)]
    note = "a trace from another machine: this machine's rates do not apply to it, so no limit is shown"
    if not on_gpu or not gpus:
        return Environment(device="cuda" if on_gpu else "cpu", cpu_name="another machine", notes=(note,))
    gpu = gpus[0]
    return Environment(
        device="cuda",
        gpu_name=str(gpu.get("name", "")),
        gpu_count=len(gpus),
        sm_arch=10 * _whole(gpu.get("computeMajor")) + _whole(gpu.get("computeMinor")),
        sm_count=_whole(gpu.get("numSms")),
        gpu_memory_bytes=_whole(gpu.get("totalGlobalMem")),
        notes=(note,),
    )
