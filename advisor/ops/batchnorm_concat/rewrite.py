"""Finds concatenations that grow by one feature map at a time, with a batch norm over each, in a captured graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import fx
from torch.nn import functional as F

from advisor.ops import consumers, dispatch, match, storage
from advisor.ops.batchnorm_act.rewrite import BatchNorm, batch_norm
from advisor.ops.batchnorm_act.spec import ACTIVATIONS, name
from advisor.ops.batchnorm_concat import api, spec


@dataclass(frozen=True, slots=True)
class _Norm:
    """A batch norm over a concatenation, with the activation behind it."""

    norm: BatchNorm
    activation: str
    slope: float
    nodes: tuple[fx.Node, ...]  # the norm and, where there is one, the activation

    @property
    def path(self) -> str:
        return match.path(self.norm.node)


@dataclass(frozen=True, slots=True)
class _Stage:
    """One concatenation: its feature maps, those of inner concatenations in their place, and the norms that read it."""

    cat: fx.Node
    features: tuple[fx.Node, ...]
    norms: tuple[_Norm, ...]


@dataclass(slots=True)
class _Chain:
    """Concatenations of which each has all feature maps of the one before at its beginning or, with `front`, at its end."""

    front: bool
    stages: list[_Stage] = field(default_factory=list)

    def continued_by(self, stage: _Stage, place: dict[fx.Node, int]) -> bool:
        """Whether `stage` has all that is there and perhaps more, and comes when the norms that are there have run.

        Nor may one of both be without gradients: the tensor in which all lie is recorded as a whole.
        """
        before = self.stages[-1]
        if not match.recorded_alike(before.cat, stage.cat):
            return False
        there = len(before.features)
        same = stage.features[-there:] if self.front else stage.features[:there]
        return same == before.features and all(place[norm.norm.node] < place[stage.cat] for norm in before.norms)

    @property
    def norms(self) -> list[_Norm]:
        return [norm for stage in self.stages for norm in stage.norms]


def rewrite(graph_module: fx.GraphModule, report: match.MatchReport, *, compiled: bool) -> None:
    """Let the norms over a growing concatenation read it in place. `report` gains one entry a batch norm over a concatenation.

    A graph that goes on to Inductor is left alone.
    """
    graph = graph_module.graph
    for chain in _chains(graph, report):
        dtype = chain.norms[0].norm.dtype
        reason = "" if len(chain.norms) >= spec.FEWEST_NORMS else "no other norm sees the same feature maps"
        left = (spec.wins(dtype=dtype, activation=norm.activation) for norm in chain.norms)
        reason = reason or ("left to Inductor" if compiled else dispatch.refusal("", next(filter(None, left), "")))
        if reason:
            report.unmatched |= {norm.path: reason for norm in chain.norms}
            continue
        report.matched |= {
            norm.path: f"{name(norm.activation, False)} over {len(stage.features)} feature maps"
            for stage in chain.stages
            for norm in stage.norms
        }
        _substitute(graph, chain)


def _is_cat(node: object) -> bool:
    """Whether the node is a concatenation of channels."""
    found = consumers.concatenated(node) if isinstance(node, fx.Node) else None
    return found is not None and found[1] in (1, -3)


def _features(cat: fx.Node) -> Iterator[fx.Node]:
    """The feature maps of a concatenation, in order."""
    for part in match.bound(cat, ("tensors",), {})["tensors"]:
        if _is_cat(part):
            yield from _features(part)
        else:
            yield part


def _unsuitable(features: tuple[fx.Node, ...]) -> str:
    """Why these feature maps cannot lie in one tensor; empty when they can."""
    values = [match.value(feature) for feature in features]
    known = [value for value in values if value is not None and value.dim() == 4]
    if len(known) < len(features) or any(type(value.shape[1]) is not int for value in known):
        return "the shape of a feature map is not known"
    if len({value.dtype for value in known}) > 1:
        return "feature maps of several dtypes"
    width = storage.vector_width(match.dtype_name(known[0]))
    for value in known:
        if value.shape[1] % width:
            return f"a feature map of {value.shape[1]} channels, no multiple of {width}"
    if any(match.changed_in_place(feature) and not match.read_later(feature, feature) for feature in features):
        return "a feature map is changed in place"
    return ""


def _norm(node: fx.Node) -> _Norm | str:
    """The norm that reads a concatenation, or why it is left alone."""
    norm = batch_norm(node)
    if isinstance(norm, str):
        return norm
    if norm.variant:
        return f"{norm.variant}: the norm by itself"
    user = match.only_user(node)
    follows = match.activation(user) if user is not None else None
    if user is None or follows is None or follows[0] not in ACTIVATIONS:
        return _Norm(norm, "none", 0.0, (node,))
    return _Norm(norm, *follows, (node, user))


def _stage(cat: fx.Node, place: dict[fx.Node, int], report: match.MatchReport) -> _Stage | None:
    """The concatenation as a stage; None, with the reason for each norm that reads it in the report, where it is none."""
    readers = [user for user in cat.users if user.op == "call_function" and user.target is F.batch_norm]
    readers.sort(key=place.__getitem__)
    if not readers:
        return None
    features, found = tuple(_features(cat)), [_norm(reader) for reader in readers]
    norms = tuple(norm for norm in found if isinstance(norm, _Norm))
    reason = _unsuitable(features)
    if not reason and not all(user in readers or _is_cat(user) for user in cat.users):
        reason = "the concatenation is used elsewhere too"
    if not reason and not match.recorded_alike(cat, *readers):
        reason = "a part of it runs without gradients"
    if not reason and len(norms) == len(found):
        return _Stage(cat, features, norms)
    for reader, norm in zip(readers, found, strict=True):
        report.unmatched[match.path(reader)] = reason or (norm if isinstance(norm, str) else "read by another norm too")
    return None


def _chains(graph: fx.Graph, report: match.MatchReport) -> list[_Chain]:
    """The graph's concatenations that norms read, each behind the longest one that it continues."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    chains: list[_Chain] = []
    for node in graph.nodes:
        stage = _stage(node, place, report) if _is_cat(node) else None
        if stage is None:
            continue
        continued = [chain for chain in chains if chain.continued_by(stage, place)]
        if continued:
            longest = max(continued, key=lambda chain: len(chain.stages))
            # Which way it grows is seen at the second concatenation: until then it stands for both.
            chains = [c for c in chains if c is longest or c.stages[0] is not longest.stages[0]]
            longest.stages.append(stage)
        else:
            chains += [_Chain(front, [stage]) for front in (False, True)]
    return [chain for chain in chains if not (chain.front and len(chain.stages) == 1)]


def _channels(features: tuple[fx.Node, ...]) -> int:
    return sum(value.shape[1] for value in map(match.value, features) if value is not None)


def _substitute(graph: fx.Graph, chain: _Chain) -> None:
    channels = _channels(chain.stages[-1].features)
    current: list[fx.Node] = []  # what there is so far: the tensor and its moments
    there = 0
    for stage in chain.stages:
        with graph.inserting_before(stage.cat):
            for feature in (stage.features[::-1] if chain.front else stage.features)[there:]:
                if not current:
                    made = graph.call_function(api.features, (feature, channels, chain.front))
                else:
                    made = graph.call_function(api.extended, (*current, feature, chain.front))
                current = match.results(made, 2)
        there = len(stage.features)
        for found in stage.norms:
            norm = found.norm
            with graph.inserting_before(norm.node):
                arguments = (norm.running_mean, norm.running_var, norm.weight, norm.bias, norm.momentum, norm.eps)
                call = graph.call_function(api.batchnorm_act, (*current, *arguments, found.activation, found.slope))
                fused, *current = match.results(call, 3)
            match.replace(found.nodes[-1], fused, found.nodes[-2::-1])
    for stage in reversed(chain.stages):
        if not stage.cat.users:
            graph.erase_node(stage.cat)
