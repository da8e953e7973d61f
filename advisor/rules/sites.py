"""Where in the user's script a finding sits: named selectors over the StepProfile, each giving the costliest places."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from advisor.core import cupy_rows, layers
from advisor.core.loading import LEAST, LoaderWork, WorkLine
from advisor.core.profile import ConvFact, KernelRow, StepProfile
from advisor.core.row_kinds import is_index
from advisor.core.units import bytes_text, count_text, percent_text, shape_text, time_text

LIMIT = 5  # places a finding names; the report has the full tables
_SHORT_US = 10.0  # the `short_kernel_frac` metric's boundary
Place = tuple[float, str]  # weight for ordering, text


def _calls(calls: float) -> str:
    return "" if calls == 1 else f", {count_text(round(calls, 1))}×"


def _where(rows: Sequence[KernelRow], convs: Mapping[str, ConvFact]) -> str:
    """The user's line, the module with what it is, and the operator, of rows that have them in common."""
    first, modules = rows[0], {row.module for row in rows}
    module = first.module if len(modules) == 1 else f"{layers.repeated(first.module)} ×{len(modules)}"
    about = layers.layers(rows, convs)
    place = " ".join(part for part in (first.source, f"{module} ({about})" if module and about else module) if part)
    what = first.op or first.name
    return f"{place}: {what}" if place else what


def _rows(profile: StepProfile, wanted: Callable[[KernelRow], bool], cost: Callable[[KernelRow], float]) -> list[Place]:
    """Rows of one place together, by cost: of a source line, operator and phase, and of one module of repeated blocks."""
    places: dict[tuple[str, ...], list[KernelRow]] = {}
    for row in profile.kernels:
        if wanted(row):
            key = (row.source, layers.repeated(row.module), row.op or row.name, row.phase)
            places.setdefault(key, []).append(row)
    convs, found = layers.convolutions(profile), []
    for rows in places.values():
        total = sum(map(cost, rows))
        found.append((total, f"{_where(rows, convs)} ({rows[0].phase}, {time_text(total)}{_calls(_called(rows))})"))
    return found


def _called(rows: Iterable[KernelRow]) -> float:
    """How often the operator of these rows is called, in each of their modules."""
    whole: dict[str, float] = {}
    within: dict[str, float] = {}
    for row in rows:
        if _is_part(row):
            within[row.module] = max(within.get(row.module, 0.0), row.calls)
        else:
            whole[row.module] = whole.get(row.module, 0.0) + row.calls
    return sum({**within, **whole}.values())


def _is_part(row: KernelRow) -> bool:
    """An operator inside the one that it is told under, as a CPU has rows for: no call more of that one."""
    return row.name.startswith("aten::") and row.name != row.op


def _within(classes: frozenset[str]) -> Callable[[KernelRow], bool]:
    return lambda row: row.module_type in classes


def _kinds(*kinds: str) -> Callable[[StepProfile], list[Place]]:
    return lambda profile: _rows(profile, lambda row: row.kind in kinds, lambda row: row.time_us)


def _matrix(dtypes: tuple[str, ...]) -> Callable[[StepProfile], list[Place]]:
    return lambda profile: _rows(
        profile,
        lambda row: row.kind in ("conv", "gemm") and row.dtype in dtypes and not profile.guided(row),
        lambda row: row.time_us,
    )


def _idle(*causes: str) -> Callable[[StepProfile], list[Place]]:
    """Lines with their share of that idle time: traced gaps are longer than the step's own, and may be longer than the step."""

    def places(profile: StepProfile) -> list[Place]:
        return [
            (
                site.time_us,
                f"{site.source or 'unknown line'}: {site.what} ({percent_text(site.time_us / cause.time_us)} of it{_calls(site.calls)})",
            )
            for cause in profile.idle
            if cause.cause in causes and cause.time_us > 0
            for site in cause.sites
        ]

    return places


def _syncs(*words: str) -> Callable[[StepProfile], list[Place]]:
    def places(profile: StepProfile) -> list[Place]:
        return [
            (
                site.time_us,
                f"{site.source or 'unknown line'}: {site.what} ({time_text(site.time_us)}{_calls(site.calls)})",
            )
            for site in profile.syncs
            if not words or any(word in site.what.lower() for word in words)
        ]

    return places


def _copies(kind: str) -> Callable[[StepProfile], list[Place]]:
    def places(profile: StepProfile) -> list[Place]:
        return [
            (
                copy.time_us,
                f"{copy.source or 'unknown line'}: {bytes_text(copy.bytes)}{' pageable' if copy.pageable else ''}"
                f" ({time_text(copy.time_us)}{_calls(copy.calls)})",
            )
            for copy in profile.copies
            if copy.kind == kind
        ]

    return places


def _convs(wanted: Callable[[ConvFact], bool]) -> Callable[[StepProfile], list[Place]]:
    """Convolution modules with their line and shape, those of repeated blocks together, by the time their rows take; modules of no known
    time come last."""

    def places(profile: StepProfile) -> list[Place]:
        time: dict[str, float] = {}
        lines: dict[str, str] = {}
        for row in profile.kernels:
            if row.kind == "conv":
                time[row.module] = time.get(row.module, 0.0) + row.time_us
                if row.source and row.phase == "forward":
                    lines.setdefault(row.module, f"{row.source} ")
        alike: dict[tuple[str, str], list[ConvFact]] = {}
        for conv in filter(wanted, profile.model.convs):
            groups = f", {conv.groups} groups" if conv.groups > 1 else ""
            size = f"{shape_text(conv.kernel)} {conv.in_channels}→{conv.out_channels}{groups}"
            name = f"{lines.get(conv.module, '')}{layers.repeated(conv.module)}"
            alike.setdefault((name, size), []).append(conv)
        found = []
        for (name, size), convs in alike.items():
            spent = sum(time.get(conv.module, 0.0) for conv in convs)
            one = f"{lines.get(convs[0].module, '')}{convs[0].module}"
            where = one if len(convs) == 1 else f"{name} ×{len(convs)}"
            found.append((spent, f"{where}: {size}" + (f" ({time_text(spent)})" if spent else "")))
        return found

    return places


def _loader(profile: StepProfile) -> list[Place]:
    if not profile.input.loader:
        return [*_idle("data")(profile), *_loader_work(profile)]
    where = profile.input.source or "unknown line"
    stats = profile.input
    whole = f"{where}: {stats.loader}, {stats.workers} workers ({time_text(stats.next_us)})"
    return [(1e12, whole), *_loader_work(profile)]


def _loader_work(profile: StepProfile) -> list[Place]:
    """The lines of the loader's work, with what they take of one process a batch."""
    work = profile.input.work
    if work is None or not work.told:
        return []
    return [(line.time_us, _work_text(line, work)) for line in work.lines if line.time_us >= LEAST * work.batch_us]


def _gpu_work(profile: StepProfile) -> list[Place]:
    work = profile.input.work
    return [(line.time_us, _work_text(line, work)) for line in work.for_gpu()] if work is not None else []


def _work_text(line: WorkLine, work: LoaderWork) -> str:
    place = f"{line.source}: {line.told}" if line.source else line.told
    return f"{place} ({time_text(line.time_us, work.batch_us)} of {time_text(work.batch_us)} a batch)"


def _optimizers(profile: StepProfile) -> list[Place]:
    return [(1.0, name) for name in profile.model.optimizers]


def _layout_breaks(profile: StepProfile) -> list[Place]:
    """Modules that return NCHW of NHWC with what converting in them takes, then the other conversions."""
    breaks = {entry.module: entry for entry in profile.model.layout_breaks}
    time: dict[str, float] = {}
    source: dict[str, str] = {}
    for row in profile.kernels:
        if row.module in breaks:
            time[row.module] = time.get(row.module, 0.0) + (row.time_us if row.kind == "layout" else 0.0)
            source.setdefault(row.module, row.source)
    found = []
    for module, entry in breaks.items():
        place = " ".join(part for part in (source.get(module, ""), module) if part)
        by = entry.what if entry.what == entry.module_type else f"{entry.what} in {entry.module_type}"
        spent = time.get(module, 0.0)
        # Ahead of every other conversion: those follow from these.
        found.append((1e12 + spent, f"{place}: {by} returns NCHW" + (f" ({time_text(spent)})" if spent else "")))
    return found or _rows(profile, lambda row: row.kind == "layout", lambda row: row.time_us)


def _fetches(profile: StepProfile) -> list[Place]:
    """Lines that fetch results, by how long the device stands idle behind them; then the other copies back."""
    lines = {copy.source for copy in profile.copies if copy.kind == "d2h"} - {""}
    idle = [
        (
            1e12 + site.time_us,
            f"{site.source}: the GPU stands idle behind the copy to the host ({time_text(site.time_us)})",
        )
        for cause in profile.idle
        if cause.cause == "sync"
        for site in cause.sites
        if site.source in lines
    ]
    return idle + _copies("d2h")(profile)


def _line(name: str, does: str) -> Callable[[StepProfile], list[Place]]:
    """The line that was seen to do what this fact is about."""
    return lambda profile: [(1.0, f"{profile.model.set_at[name]} {does}")] if name in profile.model.set_at else []


def _memory_line(line: str, calls: float | None, us: float) -> list[Place]:
    return [(us, f"{line} ({time_text(us)} a step{_calls(calls or 1)})")] if line else []


def _set_at(*names: str) -> Callable[[StepProfile], list[Place]]:
    """Lines of the script that set these, and the variables that do."""

    def places(profile: StepProfile) -> list[Place]:
        found = [(1.0, f"{profile.model.set_at[name]} sets it") for name in names if name in profile.model.set_at]
        return found or _environment(profile)

    return places


def _environment(profile: StepProfile) -> list[Place]:
    return [(1.0, f"{name}={value}") for name, value in profile.model.env.items()]


SELECTORS: dict[str, Callable[[StepProfile], list[Place]]] = {
    "loader": _loader,
    "gpu_work": _gpu_work,
    "launch_gaps": _idle("launch"),
    "other_gaps": _idle("other"),
    "copy_gaps": _idle("copy"),
    "sync_gaps": _idle("sync"),
    "syncs": _syncs(),
    "item_syncs": _syncs("item", "_local_scalar_dense"),
    "explicit_syncs": _syncs("devicesynchronize", "torch.cuda.synchronize"),
    "nonzero_syncs": _syncs("nonzero", "index", "masked", "unique"),
    "h2d_copies": _copies("h2d"),
    "d2h_copies": _copies("d2h"),
    "result_fetches": _fetches,
    "d2d_copies": _copies("d2d"),
    "convolutions": _kinds("conv"),
    "matrix_products": _kinds("conv", "gemm"),
    "fp32_products": _matrix(("fp32", "tf32")),
    "half_products": _matrix(("fp16", "bf16")),
    "guides": lambda p: _rows(p, p.guided, lambda row: row.time_us),
    "norms": _kinds("norm"),
    "written_norms": lambda p: _rows(p, _within(p.written_norms()), lambda row: row.time_us),
    "norms_and_activations": _kinds("norm", "activation"),
    "elementwise": _kinds("elementwise", "activation"),
    "pools": _kinds("pool"),
    "reductions": _kinds("reduce"),
    "layout_breaks": _layout_breaks,
    "layout_changes": _kinds("layout"),
    "device_copies": _kinds("copy", "layout"),
    "cupy_columns": lambda p: _rows(p, cupy_rows.columns, lambda row: row.time_us),
    "cupy_sums": lambda p: _rows(p, cupy_rows.sums, lambda row: row.time_us),
    "cupy_scatters": lambda p: _rows(p, cupy_rows.scatters, lambda row: row.time_us),
    "cupy_raw": lambda p: _rows(p, cupy_rows.raw, lambda row: row.time_us),
    "cupy_passes": lambda p: _rows(p, cupy_rows.short_elementwise, lambda row: row.time_us),
    "fills": _kinds("memset"),
    "upsampling": _kinds("upsample"),
    "prelus": lambda p: _rows(p, lambda row: "prelu" in row.op, lambda row: row.time_us),
    "padding": lambda p: _rows(
        p,
        lambda row: any(word in row.op for word in ("reflection_pad", "replication_pad", "_pad_circular")),
        lambda row: row.time_us,
    ),
    "concatenation": _kinds("concat"),
    "dropout": _kinds("dropout"),
    "losses": _kinds("loss"),
    "communication": _kinds("comm"),
    "optimizer_kernels": lambda p: _rows(p, lambda row: row.phase == "optimizer", lambda row: row.time_us),
    "average_kernels": lambda p: _rows(p, lambda row: row.phase == "average", lambda row: row.time_us),
    "optimizers": _optimizers,
    "casts": lambda p: _rows(p, lambda row: row.op in ("aten::to", "aten::_to_copy"), lambda row: row.time_us),
    "indexing": lambda p: _rows(
        p,
        lambda row: row.phase != "optimizer" and is_index(row),
        lambda row: row.time_us,
    ),
    "untrained": lambda p: _rows(
        p, lambda row: row.phase == "backward" and row.module in p.model.untrained, lambda row: row.time_us
    ),
    "fp64_kernels": lambda p: (
        [(-float(i), f"{s.source}: {s.what}{_calls(s.calls)}") for i, s in enumerate(p.promotions)]
        or _rows(p, lambda row: row.dtype == "fp64", lambda row: row.time_us)
    ),
    "short_kernels": lambda p: _rows(p, lambda row: 0 < row.time_us < _SHORT_US * row.calls, lambda row: row.time_us),
    "kernels": lambda p: _rows(p, lambda row: True, lambda row: row.time_us),
    "unattributed_kernels": lambda p: _rows(p, lambda row: not row.op, lambda row: row.time_us),
    "largest_gaps": lambda p: _rows(
        p, lambda row: 0 < row.limit_us < row.time_us, lambda row: row.time_us - row.limit_us
    ),
    "convolution_gaps": lambda p: _rows(
        p, lambda row: row.kind == "conv" and 0 < row.limit_us < row.time_us, lambda row: row.time_us - row.limit_us
    ),
    "grouped_convolutions": _convs(lambda conv: conv.groups > 1 and conv.groups != conv.in_channels),
    "depthwise_convolutions": _convs(lambda conv: conv.groups > 1 and conv.groups == conv.in_channels),
    "pointwise_convolutions": _convs(
        lambda conv: (
            max(conv.kernel, default=0) == 1
            and max(conv.stride, default=0) == 1
            and conv.groups == 1
            and conv.followed_by_bn
        )
    ),
    "strided_pointwise_convolutions": _convs(
        lambda conv: conv.kernel == (1, 1) and conv.stride == (2, 2) and conv.groups == 1 and not conv.transposed
    ),
    "narrow_convolutions": _convs(
        lambda conv: (
            conv.kernel == (3, 3)
            and conv.stride == conv.dilation == (1, 1)
            and conv.groups == 1
            and not conv.transposed
            and tuple(sorted((conv.in_channels, conv.out_channels))) in ((32, 128), (64, 64), (64, 128))
        )
    ),
    "wide_convolutions": _convs(
        lambda conv: (
            conv.kernel == (3, 3)
            and conv.stride == conv.dilation == (1, 1)
            and conv.groups == 1
            and not conv.transposed
            and 192 <= min(conv.in_channels, conv.out_channels) <= max(conv.in_channels, conv.out_channels) <= 1024
        )
    ),
    "large_convolutions": _convs(lambda conv: max(conv.kernel, default=0) >= 7),
    "first_convolutions": _convs(lambda conv: conv.in_channels <= 4 and conv.groups == 1),
    "biases": _convs(lambda conv: conv.bias and not conv.followed_by_bn),
    "biased_convolutions": _convs(lambda conv: conv.bias and conv.followed_by_bn),
    "transposed_convolutions": _convs(lambda conv: conv.transposed),
    "unaligned_convolutions": _convs(
        lambda conv: bool((conv.in_channels > 4 and conv.in_channels % 8) or conv.out_channels % 8)
    ),
    "fp32_3x3_convolutions": _convs(lambda conv: conv.kernel == (3, 3) and conv.stride == (1, 1) and conv.groups == 1),
    "compilations": lambda p: [
        (site.time_us, f"{site.source or 'unknown line'}: {site.what} ({time_text(site.time_us)} a step)")
        for site in p.model.compilations
    ],
    "models": lambda p: [(1.0, name) for name in p.model.roots],
    "cudnn_line": _set_at("cudnn_enabled"),
    "anomaly_line": _set_at("anomaly"),
    "unused_parameters_line": _set_at("find_unused_parameters"),
    "create_graph_line": _line("create_graph", "keeps the graph of its gradients"),
    "clips_scaled_line": _line("clips_scaled", "clips them"),
    "gc_line": lambda p: _memory_line(p.memory.gc_at, p.memory.gc_calls, p.memory.gc_us),
    "empty_cache_line": lambda p: _memory_line(
        p.memory.empty_cache_at, p.memory.empty_cache_calls, p.memory.empty_cache_us
    ),
    "threads_line": _set_at("cpu_threads"),
    "deterministic_line": _set_at("deterministic_algorithms", "cudnn_deterministic"),
    "environment_variables": _environment,
}


def select(name: str, profile: StepProfile | None) -> tuple[str, ...]:
    """The costliest places that the selector names; empty without a profile."""
    if profile is None or not name:
        return ()
    ordered: Iterable[Place] = sorted(SELECTORS[name](profile), key=lambda place: (-place[0], place[1]))
    return tuple(dict.fromkeys(text for _, text in ordered))[:LIMIT]
