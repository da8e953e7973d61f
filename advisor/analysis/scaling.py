"""How long a step of N ranks would take, foretold from the profile of one: data parallel, each rank with the batch that was profiled.

    step(N) = forward + backward + rest + exposed + synchronised norms + stragglers

Gradients are ready as the backward goes from the last layer to the first: of each convolution when its own backward is done, by the
trace; the others' evenly over it. Buckets fill in that order (1 MiB the first, 25 the others: DDP's defaults) and are reduced one
after the other, beside the backward; `exposed` is what is left when it ends. A reduction of S bytes is a ring's,
`2 (n - 1) latency + 2 (n - 1) / n S / bandwidth` (Thakur, Rabenseifner, Gropp 2005). Inside a host it goes over the host's link; between
hosts over the network, with a share of S for each GPU of a host. Stragglers: the largest of N steps that vary as the profiled ones do,
sqrt(2 ln N) deviations. Kernels beside a reduction run slower, for it takes SMs and memory bandwidth: `high` counts a fifth of the hidden
communication as lost. No step is shorter than what feeds it takes: a host's cores to make its ranks' batches, at the time that one of the
profiled loader's processes took for each; a file system to give all ranks their samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import pstdev

from advisor.core.errors import AdvisorError
from advisor.core.profile import ConvFact, StepProfile

FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20
LOST_BESIDE = 0.2
NORMS_COLLECTIVES = 2  # of a synchronised batch norm: gathered statistics forward, two sums backward
NORM_BYTES = 4096
BUSY, MOST_TIMES = 0.8, 64  # of a step that ranks are to compute; of the profiled batch that is worth a thought


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What carries gradients between GPUs: µs until a message's first byte, GB/s of a GPU in one direction.

    `basis` says where from: "measured here", or a data sheet.
    """

    name: str
    latency_us: float
    gbps: float
    basis: str

    def reduce_us(self, nbytes: float, ranks: int) -> float:
        """Sum over `ranks` by a ring."""
        if ranks < 2:
            return 0.0
        return 2 * (ranks - 1) * self.latency_us + 2 * (ranks - 1) / ranks * nbytes / self.gbps / 1e3


# Data sheets: 18 links of 25 GB/s each way of NVLink 4; PCIe 5.0 x16, 64 GB/s; one 400 Gb/s adapter a GPU. Of these a ring of NCCL's carries
# about four fifths (`busbw` of nccl-tests as NVIDIA and others publish it), and a hop takes 2 to 5 us inside a host, 5 between hosts.
LINKS = {
    link.name: link
    for link in (
        Link(name="nvlink", latency_us=3.0, gbps=360.0, basis="NVLink 4, 450 GB/s by its data sheet"),
        Link(name="pcie", latency_us=5.0, gbps=40.0, basis="PCIe 5.0 x16, 64 GB/s by its data sheet"),
        Link(name="ib400", latency_us=5.0, gbps=40.0, basis="InfiniBand NDR, 50 GB/s a GPU by its data sheet"),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Supply:
    """What feeds the ranks. `cores` of a host, 0 for as many a GPU as where it was profiled; `gbps` that the file system gives all hosts
    together, of which each sample takes `sample_bytes`, 0 where it is no limit.
    """

    cores: int = 0
    sample_bytes: float = 0.0
    gbps: float = 0.0

    def step_us(self, profile: StepProfile, ranks: int, host: int) -> float:
        """The least that a step of so many ranks takes, `host` of them on one; 0 where nothing is known of it."""
        here, work = profile.environment, profile.input.work
        cores = self.cores or here.cpu_count / max(1, here.gpu_count) * host
        made = work.batch_us * min(host, ranks) / cores if work is not None and cores else 0.0
        batch = profile.model.batch_size * profile.model.accumulation
        return max(made, ranks * batch * self.sample_bytes / self.gbps / 1e3 if self.gbps else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Foretold:
    """One number of ranks. Times in µs a step; `supply_us`: what feeds it takes as long; `efficiency`: of N times one rank's samples per second."""

    ranks: int
    step_us: tuple[float, float]  # low, high
    exposed_us: float
    communication_us: float
    norms_us: float
    stragglers_us: float
    efficiency: tuple[float, float]  # low, high
    samples_per_s: tuple[float, float]
    supply_us: float = 0.0

    @property
    def middle_us(self) -> float:
        """Between low and high."""
        return sum(self.step_us) / 2

    def gpu_hours(self, samples: float) -> tuple[float, float]:
        """Of all ranks together, to go through so many samples: low, high."""
        fast, slow = max(self.samples_per_s), min(self.samples_per_s)
        return samples / fast * self.ranks / 3600, samples / slow * self.ranks / 3600


def link(name: str, measured: dict[str, float] | None = None) -> Link:
    """A link by its name, by "LATENCY_US,GB_PER_S", or `measured` (distributed/links.py).

    Raises:
        AdvisorError: for none of these.
    """
    if name in LINKS:
        return LINKS[name]
    if name == "measured" and measured is not None:
        found = measured["latency_us"], measured["gbps"]
        return Link(
            name=name, latency_us=found[0], gbps=found[1], basis=f"measured here over {measured['ranks']:.0f} ranks"
        )
    try:
        latency, gbps = map(float, name.split(","))
        if latency >= 0 and gbps > 0:
            return Link(name=name, latency_us=latency, gbps=gbps, basis="as given")
    except ValueError:
        pass
    raise AdvisorError(f"no link {name!r}", expected="one of " + ", ".join(LINKS) + ", or LATENCY_US,GB_PER_S")


def foretell(
    profile: StepProfile,
    ranks: Sequence[int],
    *,
    inside: Link,
    between: Link,
    host: int = 8,
    synchronised: bool = True,
    hidden_bytes: float = 4.0,
    supply: Supply | None = None,
) -> list[Foretold]:
    """What a step of each number of ranks takes.

    Args:
        inside: the link of GPUs of one host, of which each has `host`; `between`: of hosts.
        synchronised: batch norms go by all ranks' samples.
        hidden_bytes: of each gradient's element.
        supply: what feeds the ranks; None where that is no limit.

    Raises:
        AdvisorError: for a profile without step times, or of several processes.
    """
    if not profile.typical_us:
        raise AdvisorError("the profile has no step times", fix="Profile the script for longer.")
    if profile.model.world_size > 1:
        raise AdvisorError(
            f"the profile is of {profile.model.world_size} processes", expected="one of one process, without torchrun"
        )
    return [
        _one(profile, n, inside, between, max(1, min(host, n)), synchronised, hidden_bytes, supply)
        for n in sorted(set(ranks))
    ]


def _one(
    profile: StepProfile, ranks: int, inside: Link, between: Link, host: int, synchronised: bool, element: float,
    supply: Supply | None,
) -> Foretold:  # fmt: skip
    step = profile.typical_us
    backward = _backward_us(profile)
    hosts = math.ceil(ranks / host)

    def reduce_us(nbytes: float) -> float:
        return inside.reduce_us(nbytes, min(host, ranks)) + between.reduce_us(nbytes / host, hosts)

    at = communication = 0.0
    for ready, nbytes in _buckets(profile, backward, element):
        took = reduce_us(nbytes)
        at = max(at, ready) + took
        communication += took
    exposed = max(0.0, at - backward) if ranks > 1 else 0.0
    norms = _norms(profile) * NORMS_COLLECTIVES * reduce_us(NORM_BYTES) if synchronised else 0.0
    spread = profile.step_us or profile.wall_us
    values = spread.raw if spread is not None else ()
    stragglers = pstdev(values) * math.sqrt(2 * math.log(ranks)) if len(values) > 1 and ranks > 1 else 0.0
    fed = supply.step_us(profile, ranks, host) if supply is not None else 0.0
    low = step + exposed + norms
    high = max(fed, low + stragglers + LOST_BESIDE * max(0.0, communication - exposed))
    low = max(fed, low)
    batch = profile.model.batch_size * profile.model.accumulation
    return Foretold(
        ranks=ranks,
        step_us=(low, high),
        exposed_us=exposed,
        communication_us=communication,
        norms_us=norms,
        stragglers_us=stragglers,
        efficiency=(step / high, step / low),
        samples_per_s=(ranks * batch / high * 1e6, ranks * batch / low * 1e6),
        supply_us=fed,
    )


def least_divided_us(
    profile: StepProfile, ranks: int, link: Link, *, synchronised: bool = True, times: float = 1.0
) -> float:
    """The least that a step can take where the profiled batch itself, or one `times` as large, is divided among so many ranks.

    What each computes is an N-th, at best; what is sent hides behind it, at best. Synchronised norms are on the critical path.
    """
    share = profile.typical_us * times / ranks
    sent = link.reduce_us(profile.model.parameters * 4.0, ranks)
    norms = _norms(profile) * NORMS_COLLECTIVES * link.reduce_us(NORM_BYTES, ranks) if synchronised else 0.0
    return share + norms + max(0.0, sent - share * 2 / 3)


def batch_that_pays(profile: StepProfile, ranks: int, link: Link, *, synchronised: bool = True) -> tuple[int, float]:
    """The least batch of all ranks, in doublings of the profiled one, whose step is computing for BUSY of its time at best, and that share.

    0 where MOST_TIMES the batch is not enough.
    """
    times = 1
    while times <= MOST_TIMES:
        least = least_divided_us(profile, ranks, link, synchronised=synchronised, times=times)
        busy = profile.typical_us * times / ranks / least
        if busy >= BUSY:
            return profile.model.batch_size * times, busy
        times *= 2
    return 0, 0.0


def _backward_us(profile: StepProfile) -> float:
    """Of the step: its own share by the trace; two thirds where there was none."""
    phases = profile.phase_us
    whole = sum(phases.values())
    return profile.typical_us * (phases.get("backward", 0.0) / whole if whole else 2 / 3)


def _buckets(profile: StepProfile, backward_us: float, element: float) -> list[tuple[float, float]]:
    """(when it is full, bytes), from the beginning of the backward."""
    total = profile.model.parameters * element
    times: dict[str, float] = {}
    for row in profile.kernels:
        if row.phase == "backward":
            times[row.module] = times.get(row.module, 0.0) + row.time_us
    convs = [(conv.module, _weight_bytes(conv, element)) for conv in profile.model.convs]
    known = sum(nbytes for _, nbytes in convs)
    seen = sum(times.get(module, 0.0) for module, _ in convs)
    rest = max(0.0, total - known)
    ready: list[tuple[float, float]] = []
    at = 0.0
    for module, nbytes in reversed(convs):
        at += backward_us * (times.get(module, 0.0) / seen if seen else 1 / len(convs))
        ready.append((at, nbytes + rest / len(convs)))
    if not ready:
        ready = [(backward_us * (i + 1) / 8, total / 8) for i in range(8)]
    buckets, held, limit = [], 0.0, float(FIRST_BUCKET_BYTES)
    for when, nbytes in ready:
        held += nbytes
        if held >= limit:
            buckets.append((when, held))
            held, limit = 0.0, float(BUCKET_BYTES)
    if held:
        buckets.append((backward_us, held))
    return buckets


def _weight_bytes(conv: ConvFact, element: float) -> float:
    per_group = conv.in_channels * conv.out_channels / max(1, conv.groups)
    return (per_group * math.prod(conv.kernel) + conv.out_channels * conv.bias) * element


def _norms(profile: StepProfile) -> int:
    return sum(count for name, count in profile.model.module_counts.items() if "BatchNorm" in name)
