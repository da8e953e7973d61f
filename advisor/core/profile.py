"""The StepProfile: everything measured about one training step, as plain data. Everything downstream reads only this."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from advisor.core.environment import Environment
from advisor.core.loading import LoaderWork
from advisor.core.provenance import Provenance

# Of the median step: from here on the mean wait for the loader and the median one tell of bursts.
# A wait for data is worth telling from this share of a step on.
WAITS_FRAC = 0.1
BURSTS_FRAC = 0.05
# Of the step: from here on waits for workers are no accident, as rules/input/few-loader-workers.yaml has it.
STARVED_FRAC = 0.05
_NORM_CLASS = re.compile(r"(?!.*(Frozen|Spectral|Weight))\w*Norm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A repeated measurement. `raw` is kept so that later statistics need no re-run."""

    median: float
    p10: float
    p90: float
    n: int
    raw: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """One number with where it comes from. `reason` says why it is missing or how it was modelled."""

    value: float | None
    provenance: Provenance
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRow:
    """One kernel × op × module × phase × source line (× input and weight, of convolutions), summed over a step (means over the traced steps).

    On a CPU the rows are leaf operators and `name` is the operator's name.

    kind: conv, gemm, norm, activation, elementwise, pool, reduce, layout, copy, memset, optimizer, average (of weights), loss,
    upsample, concat, dropout, comm, other. phase: forward, backward, optimizer, average, other.
    """

    name: str
    kind: str
    op: str = ""
    module: str = ""
    module_type: str = ""
    phase: str = "other"
    source: str = ""  # "path/train.py:42"
    calls: float = 1.0
    time_us: float = 0.0
    grid: str = ""
    block: str = ""
    stream: int = 0
    dtype: str = ""  # "bf16", "fp32", …
    layout: str = ""  # "nchw", "nhwc", ""
    shapes: str = ""  # inputs of the op, JSON text
    flops: float = 0.0
    dram_bytes: float | None = None  # read + written, per step
    dram_provenance: Provenance = Provenance.UNAVAILABLE
    modelled_bytes: float = 0.0  # from shapes: each input read once, each output written once
    limit_us: float = 0.0  # the least this machine needs for the row's bytes and flops
    tensor_core: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A place in the user's source that costs something."""

    source: str  # "path/train.py:42", or "" when not known
    what: str  # "cudaStreamSynchronize from aten::item"
    calls: float  # per step
    time_us: float  # per step


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleCause:
    """GPU idle time of a step by cause: data, launch, copy, sync, other. On CPU: data and other."""

    cause: str
    time_us: float
    sites: tuple[Site, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRow:
    """Host/device copies per step. kind: h2d, d2h, d2d."""

    kind: str
    bytes: float
    time_us: float
    calls: float
    pageable: bool = False
    overlapped_frac: float = 0.0  # share of the copy's time that ran beside a kernel
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryStats:
    """Device memory over the measured steps (host RSS on a CPU)."""

    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    total_bytes: int = 0
    allocations: float = 0.0  # allocator requests per step
    device_allocations: float = 0.0  # cudaMalloc calls per step after warm-up
    # Change of allocated bytes per step after warm-up; on a CPU of the process's own memory. None: too few readings.
    growth_bytes: float | None = None
    growth_steady: bool = False  # it grows all through the window, at about one rate
    host_growth_bytes: float | None = None  # of the process's host memory per step, where that grows steadily; else 0
    host_free_bytes: int = 0  # what the process may still take of the host's memory; 0: not known
    retries: int = 0  # in all steps measured, after warm-up
    # torch.cuda.empty_cache per step: calls (None: not counted), host time in them, the script's line.
    empty_cache_calls: float | None = None
    empty_cache_us: float = 0.0
    empty_cache_at: str = ""
    # Full collections of Python's garbage per step, asked for or not, likewise.
    gc_calls: float | None = None
    gc_us: float = 0.0
    gc_at: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputStats:
    """The input pipeline. `next_us` is the time the training thread spends in the loader's `next()` per step, on average.

    Workers that start together deliver together: one step waits long and the next ones not at all. `burst_us` is by how much that
    average is above the median, or below it where most steps wait. `late_us` is the part of it for batches that were not there yet;
    those that are take time too, from one process to the other.
    """

    loader: str = ""  # class name; "" when no DataLoader was used
    next_us: float = 0.0
    burst_us: float = 0.0
    late_us: float = 0.0
    workers: int = 0
    # A start of an epoch beyond a batch as any other: `epoch_make_us` in making the iterator and at its end, which start and end workers,
    # `epoch_first_us` in its first `next()`; so many batches later comes the next one. 0.0: not known.
    epoch_make_us: float = 0.0
    epoch_first_us: float = 0.0
    epoch_batches: float = 0.0
    iterators_per_step: float = 0.0  # made in the timed steps
    loaders: int = 0  # DataLoader objects that iterators were made of so far
    iterators: int = 0  # made so far
    epochs_in_loop: bool = False  # the script makes them in a loop: further epochs come
    batch_size: int = 0
    pin_memory: bool = False
    persistent_workers: bool = False
    prefetch_factor: int = 0
    batch_bytes: int = 0
    batch_dtype: str = ""
    moved_unchanged: bool = False  # batches go to the GPU as the loader yields them
    non_blocking: bool = False
    source: str = ""
    # The last transforms of the data set's images, where they turn 8-bit pixels into normalised fp32 ("ToTensor + Normalize"), and
    # the time that they take one thread for a batch: timed on a random image of the batch's size.
    normalise: str = ""
    normalise_us: float = 0.0
    next_error_us: float = 0.0  # two standard errors of `next_us`
    work: LoaderWork | None = None  # what one of its processes does; None: not seen


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvFact:
    """One convolution module or functional call seen in the step."""

    module: str
    in_channels: int
    out_channels: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    bias: bool
    transposed: bool = False
    followed_by_bn: bool = False
    input_shape: tuple[int, ...] = ()
    dtype: str = ""
    layout: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutBreak:
    """A module that is given NHWC and returns NCHW, or in whose forward an operator does.

    `what` is the module's class, or the operator as autograd names it ("ReflectionPad2D").
    """

    module: str
    module_type: str
    what: str


WHOLE = ".*"  # behind a model's name: all of it


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the script trains and how, read from live objects without changing them."""

    roots: tuple[str, ...] = ()  # class names of the modules the script calls itself and that own parameters
    # Names of modules called in every step without gradients, as their rows' modules begin.
    guides: tuple[str, ...] = ()
    # Modules whose parameters get gradients and are in no optimizer, as rows name them; "Net.*" where a model has no others.
    untrained: tuple[str, ...] = ()
    parameters: int = 0
    module_counts: dict[str, int] = field(default_factory=dict)  # class name → how many
    convs: tuple[ConvFact, ...] = ()
    optimizers: tuple[str, ...] = ()  # class names, the one with most parameters first; the next two are of that one
    optimizer_foreach: bool | None = None
    optimizer_fused: bool = False
    optimizer_own: bool = False  # its update is no code of torch.optim's
    zero_grad_to_none: bool = True
    gradients_stay: bool = False  # they are the same tensors step after step; what zeroes them may be the script itself
    autocast: str = ""  # dtype the script's own autocast uses, "" if none
    grad_scaler: bool = False
    parameter_dtype: str = "fp32"
    channels_last: bool = False  # most convolutions' inputs are NHWC
    weights_channels_last: bool = False  # most convolutions' weights are
    layout_breaks: tuple[LayoutBreak, ...] = ()
    fixed_shapes: bool = True
    batch_size: int = 0
    accumulation: int = 1  # backward passes per step
    backwards: int = 1
    grad_clipping: bool = False
    clips_scaled: bool = False  # gradients are clipped that a GradScaler has scaled, before it has unscaled them
    stack_us: float = (
        0.0  # that anomaly detection takes to note where a node of the graph was made; timed where modules run
    )
    create_graph: bool = False  # `backward(create_graph=True)`: gradients in `.grad` hold the graph they were made by
    data_parallel: bool = False
    data_parallel_us: float | None = (
        None  # host time in which nn.DataParallel over one device looks where its tensors lie
    )
    distributed: str = ""  # "", "ddp", "fsdp"
    world_size: int = 1
    backend: str = ""  # process-group backend
    sync_batchnorm: int = 0
    compiled: bool = False
    graphed: bool = False
    dropout: bool = False
    graph_breaks: float | None = None  # per frame that Dynamo was given; None: nothing compiled
    recompiles: int | None = None  # graphs compiled during the timed steps; None: nothing compiled
    compilations: tuple[Site, ...] = ()  # of what, then, and why: calls and time as of each timed step
    updates_compiled: bool = False  # the optimizer's step is inside a compiled function
    flags: dict[str, bool] = field(
        default_factory=dict
    )  # cudnn_enabled, cudnn_benchmark, cudnn_deterministic, tf32_conv, tf32_matmul, anomaly, uses_cupy, find_unused_parameters (DDP)
    set_at: dict[str, str] = field(default_factory=dict)  # flag, or what a setting is about → the script's line
    cpu_threads: int = 0  # of torch's operators on a CPU; 0: not asked
    env: dict[str, str] = field(default_factory=dict)  # performance-relevant variables that are set


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilerCost:
    """What measuring cost."""

    traced_step_us: float = 0.0
    traced_next_us: float = 0.0  # of it, in the loader's `next()`
    overhead_frac: float = 0.0  # traced step over untraced step, minus one
    coverage_frac: float = 1.0  # launches that have a device record
    traced_steps: int = 0
    events: int = 0
    analyse_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProfile:
    """One recorded run. `step_us` was taken with no profiler on; everything per kernel is from the traced window."""

    script: str
    argv: tuple[str, ...]
    created: str  # ISO 8601, UTC
    environment: Environment
    step_kind: str  # optimizer, marker, period (of backward passes), forward (rounds of model calls: no training), none
    step_us: Spread | None  # CUDA events on a GPU, wall clock on a CPU
    wall_us: Spread | None
    # Mean wall time of a timed step with those that were left out (the first of an epoch, one that compiles): 0.0, not known.
    window_step_us: float = 0.0
    steps_seen: int = 0
    start_s: float | None = None  # from the start of the process to its first step; None where none was seen
    excluded: dict[str, int] = field(default_factory=dict)  # reason → steps left out
    every_us: tuple[float, ...] = ()  # wall time of every timed step in order, those left out of the median included
    held: tuple[str, ...] = ()  # of each of these why it was left out; "" for a usual one
    kernels: tuple[KernelRow, ...] = ()
    # Union over streams of kernels, memsets and device-to-device copies per traced step (operators on a CPU). Host/device
    # copies beside no kernel are in `idle` under "copy": busy_us and idle make up the traced step.
    busy_us: float = 0.0
    idle: tuple[IdleCause, ...] = ()
    syncs: tuple[Site, ...] = ()
    promotions: tuple[
        Site, ...
    ] = ()  # operators that compute in fp64 because one of their tensors is, in the order of the step
    copies: tuple[CopyRow, ...] = ()
    launches: float = 0.0  # kernel launches per step
    launch_us: float = 0.0  # host time in launch calls per step
    # Host time per traced step in Optimizer.step, and at lines that update weights by hand; without waits for the device.
    optimizer_host_us: float = 0.0
    # The training thread's time a traced step at lines that average weights into a second copy, with the Python between their calls; and
    # inside the calls alone.
    average_host_us: float = 0.0
    average_calls_us: float = 0.0
    backward_nodes: float = 0.0  # that autograd's engine runs in a step
    # Host time per traced step in calls that take device memory from the driver or give it back; and of it, with the device idle.
    allocating_us: float = 0.0
    allocating_idle_us: float = 0.0
    limit_us: float = 0.0  # speed of light of the whole step
    phase_us: dict[str, float] = field(default_factory=dict)
    memory: MemoryStats = field(default_factory=MemoryStats)
    input: InputStats = field(default_factory=InputStats)
    model: ModelFacts = field(default_factory=ModelFacts)
    utilization: dict[str, Quantity] = field(default_factory=dict)  # metric name → value; see core.metrics
    losses: tuple[float, ...] = ()
    cost: ProfilerCost = field(default_factory=ProfilerCost)
    exit_code: int | None = None
    origin: str = (
        ""  # the trace that it was read from, where no script was profiled: facts of live objects are not known then
    )
    complete: bool = True
    notes: tuple[str, ...] = ()

    @property
    def in_bursts(self) -> bool:
        """Batches come in bursts: no step is like another, and their mean is what one takes."""
        spread = self.step_us or self.wall_us
        return spread is not None and bool(spread.raw) and abs(self.input.burst_us) > BURSTS_FRAC * spread.median

    @property
    def typical_us(self) -> float:
        """What a step takes: the median, or where batches come in bursts the mean. 0.0: not known."""
        spread = self.step_us or self.wall_us
        if spread is None:
            return 0.0
        return sum(spread.raw) / len(spread.raw) if self.in_bursts else spread.median

    @property
    def fed_us(self) -> float:
        """What a step would take at least with its batches there in time: without the time in the loader's `next()`, and not less than the
        device is busy. 0.0 where that is hardly shorter, or nobody knows."""
        typical = self.typical_us
        fed = max(self.busy_us, typical - self.input.next_us)
        return fed if self.busy_us > 0 and 0 < fed < (1 - WAITS_FRAC) * typical else 0.0

    @property
    def fed_within_us(self) -> tuple[float, float]:
        """What such a step would take, at least and at most: without all of that time, or without what passed for batches that were not
        there, each as exactly as the timed steps tell it. (0.0, 0.0) where `fed_us` is."""
        if not self.fed_us:
            return 0.0, 0.0
        typical, error = self.typical_us, self.input.next_error_us
        low = max(self.busy_us, self.fed_us - error)
        return low, min(typical, max(low, typical - self.input.late_us + error))

    @property
    def starved(self) -> bool:
        """The loader's workers are behind: a step is as long as they take for a batch."""
        return self.input.workers > 0 and self.input.late_us > STARVED_FRAC * self.typical_us

    def written_norms(self) -> frozenset[str]:
        """Classes of modules that are named like norms and run no norm's kernel: they are written out in single operations.

        Norms of weights are something else, and frozen ones are a scale and a shift.
        """
        named = {row.module_type for row in self.kernels if _NORM_CLASS.match(row.module_type)}
        return frozenset(named - {row.module_type for row in self.kernels if row.kind == "norm"})

    def guided(self, row: KernelRow) -> bool:
        """The row is of a model that runs without gradients: no change of the models that train reaches it."""
        return row.module.partition(".")[0] in self.model.guides
