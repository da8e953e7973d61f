"""A pipeline over the ranks: each computes some of the model's layers, and keeps what the backward needs of them alone.

Every rank has the whole batch, all weights and the whole optimizer, so that the script, its loss over whatever of the batch, its clipping
and its checkpoints are those of one process. What is spread is what a step keeps of its activations: a rank's stage is its share. PyTorch's
`torch.distributed.pipelining.pipeline` cuts the model (by torch.export); the batch goes through the stages in parts, all forward, then all
backward (GPipe; Huang and others 2019). The last stage's output goes to all ranks. Behind the backward each stage's rank sends its
gradients and its norms' statistics to all.

A part is as large as batch norms allow: in a model that has them, the whole batch, so that nothing is computed at a time but what one rank
does; unless each part may have its own statistics. Without them the batch is divided into twice as many parts as there are ranks.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed
from torch.nn.modules.batchnorm import _BatchNorm

from advisor.analysis import sharing
from advisor.core.held import ModuleCost
from advisor.distributed.refused import refuse
from advisor.loop.sources import user_line
from advisor.transforms.forward import REPLICATED, ForwardStack

PARTS = 2  # of the batch, for each rank
Source = tuple[int, int]  # a stage, -1 for the model's input; which of its outputs


class Costs:
    """Times the forward of each module of a root in one call: where to cut is chosen by it."""

    def __init__(self, root: torch.nn.Module) -> None:
        self._began: dict[str, float] = {}
        self._us: dict[str, float] = {}
        self._calls: dict[str, int] = {}
        self._hooks = []
        for name, module in root.named_modules():
            self._hooks.append(module.register_forward_pre_hook(self._starts(name)))
            self._hooks.append(module.register_forward_hook(self._ends(name)))

    def _starts(self, name: str) -> Callable[..., None]:
        def starts(module: Any, args: Any) -> None:
            self._began[name] = _now()

        return starts

    def _ends(self, name: str) -> Callable[..., None]:
        def ends(module: Any, args: Any, output: Any) -> None:
            self._us[name] = self._us.get(name, 0.0) + (_now() - self._began[name]) * 1e6
            self._calls[name] = self._calls.get(name, 0) + 1

        return ends

    def end(self) -> list[ModuleCost]:
        """No more is timed; a cost for each module that was called, the root's first."""
        for hook in self._hooks:
            hook.remove()
        return [
            ModuleCost(
                module=f"root.{name}" if name else "root", forward_us=us, held_bytes=0, input_bytes=0, submodules=0,
                calls=self._calls[name],
            )
            for name, us in sorted(self._us.items())
        ]  # fmt: skip


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def cuts(costs: Sequence[ModuleCost], ranks: int) -> list[str]:
    """Names of the modules that all stages but the first begin with; rank 0's choice, for all. Too few modules are refused."""
    found = sharing.split(costs, ranks)
    names = [stage[0].module.removeprefix("root.") for stage in found[1:]] if found is not None else []
    told: list[Any] = [names]
    distributed.broadcast_object_list(told, 0)
    if len(told[0]) != ranks - 1:
        refuse(
            f"the model has no {ranks} modules that are called one after the other, so no stage for each rank",
            user_line(),
        )
    return list(told[0])


@dataclass(frozen=True, slots=True)
class _Shape:
    """Of one output of a stage, for a part of the batch."""

    size: tuple[int, ...]
    dtype: torch.dtype
    learns: bool


class _Line:
    """The stages for parts of one shape: torch.export has frozen it in."""

    def __init__(self, root: torch.nn.Module, names: Sequence[str], example: torch.Tensor, rank: int) -> None:
        # Here, for it imports Dynamo: every script that advisor starts would take that much longer to begin.
        from torch.distributed.pipelining import SplitPoint, pipeline

        with ForwardStack.without(list(root.modules()), REPLICATED), _unmarked(root, names), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of torch's export to itself
            pipe = pipeline(root, (example,), split_spec=dict.fromkeys(names, SplitPoint.BEGINNING))
        self.module = pipe.get_stage_module(rank)
        self.inputs, self.outputs = _wires(pipe.split_gm.graph)
        self.shapes: dict[int, list[_Shape]] = {}  # by stage, once it has run

    def consumers(self, source: Source) -> list[int]:
        """The stages that take this."""
        return [stage for stage, taken in enumerate(self.inputs) if source in taken]


class Staged:
    """A layer for the root's ForwardStack: calls with gradients go through the stages.

    Args:
        names: as `cuts` gives them.
        own_norms: each part of the batch may have its own statistics in batch norms.
    """

    def __init__(self, root: torch.nn.Module, names: Sequence[str], *, own_norms: bool) -> None:
        self._root, self._names = root, list(names)
        self._rank, self._ranks = distributed.get_rank(), distributed.get_world_size()
        whole = any(isinstance(module, _BatchNorm) for module in root.modules()) and not own_norms
        self._most_parts = 1 if whole else PARTS * self._ranks
        self._lines: dict[tuple[int, ...], _Line] = {}
        self._owners = self._owned()
        _meet(next(root.parameters()).device)

    def __call__(self, inner: Callable[..., Any], module: torch.nn.Module) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not (module.training and torch.is_grad_enabled()):
                return inner(*args, **kwargs)
            if kwargs or len(args) != 1 or not isinstance(args[0], torch.Tensor) or args[0].requires_grad:
                refuse(
                    "a pipeline takes one tensor that needs no gradient, and the model is called otherwise", user_line()
                )
            anchor = torch.zeros((), requires_grad=True, device=args[0].device)
            found = _Through.apply(anchor, args[0], self)  # type: ignore[no-untyped-call]  # torch declares no types for it
            return found[0] if len(found) == 1 else found

        return forward

    def _owned(self) -> list[int]:
        """The stage of each parameter and buffer, parameters first."""
        order = [name for name, _ in self._root.named_modules()]
        starts = [order.index(name) for name in self._names]

        def stage(name: str) -> int:
            at = order.index(name.rpartition(".")[0])
            return sum(at >= start for start in starts)

        named = [*self._root.named_parameters(), *self._root.named_buffers()]
        return [stage(name) for name, _ in named]

    def parts_of(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The batch in parts of one size."""
        count = next(n for n in range(min(self._most_parts, len(x)), 0, -1) if len(x) % n == 0)
        return list(x.chunk(count))

    def line(self, part: torch.Tensor) -> _Line:
        """The stages for such parts."""
        key = tuple(part.shape)
        if key not in self._lines:
            self._lines[key] = _Line(self._root, self._names, part, self._rank)
        return self._lines[key]

    def share(self, kept: Sequence[torch.Tensor | None]) -> None:
        """Each stage's gradients, on top of those that were `kept` from before, and its buffers are all ranks'."""
        parameters = [p for _, p in self._root.named_parameters()]
        buffers = [b for _, b in self._root.named_buffers()]
        for stage in range(self._ranks):
            mine = [p for p, owner in zip(parameters, self._owners, strict=False) if owner == stage and p.requires_grad]
            has = torch.tensor([p.grad is not None for p in mine])
            distributed.broadcast(has, stage)
            sent = [p for p, one in zip(mine, has.tolist(), strict=True) if one]
            _send([_gradient(p) for p in sent], stage)
            _send(
                [b for b, owner in zip(buffers, self._owners[len(parameters) :], strict=True) if owner == stage], stage
            )
        for parameter, before in zip(parameters, kept, strict=True):
            if before is not None:
                parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)

    def set_aside(self) -> list[torch.Tensor | None]:
        """What gradients there are of earlier backward passes."""
        found = []
        for parameter in self._root.parameters():
            found.append(parameter.grad)
            parameter.grad = None
        return found


class _Through(torch.autograd.Function):
    """The batch through all stages; what this rank's parts keep hangs on `ctx` until the backward."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, x: torch.Tensor, staged: Staged) -> Any:
        parts = staged.parts_of(x)
        line, rank, last = staged.line(parts[0]), distributed.get_rank(), distributed.get_world_size() - 1
        runs: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        waits: list[Any] = []
        for number, part in enumerate(parts):
            # Where shapes are not known yet, one stage after the other tells them: a rank cannot make room for what it knows nothing of.
            for stage in range(last + 1) if not number and not line.shapes.get(last) else [rank]:
                if stage == rank:
                    runs.append(_one_part(line, part, rank))
                if stage not in line.shapes:
                    told: list[Any] = [[_shape(out) for out in runs[0][1]] if stage == rank else None]
                    distributed.broadcast_object_list(told, stage)
                    line.shapes[stage] = told[0]
                if stage == rank:
                    waits += _pass_on(line, rank, runs[number][1])
        for work, _ in waits:
            work.wait()
        ctx.staged, ctx.line, ctx.runs, ctx.rank = staged, line, runs, rank
        found = []
        for k, shape in enumerate(line.shapes[last]):
            size = (shape.size[0] * len(parts), *shape.size[1:])
            whole = (
                torch.cat([outs[k].detach() for _, outs in runs])
                if rank == last
                else torch.empty(size, dtype=shape.dtype, device=x.device)
            )
            distributed.broadcast(whole, last)
            found.append(whole)
        ctx.set_materialize_grads(False)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        staged, line, rank = ctx.staged, ctx.line, ctx.rank
        last = distributed.get_world_size() - 1
        kept = staged.set_aside()
        given = [g.chunk(len(ctx.runs)) if g is not None else None for g in gradients]
        waits: list[Any] = []
        for number, (inputs, outputs) in enumerate(ctx.runs):
            begins = [_arriving(line, rank, k, out) for k, out in enumerate(outputs)]
            if rank == last:
                for k, each in enumerate(given):
                    if each is not None:
                        begins[k] = each[number] if begins[k] is None else begins[k] + each[number]
            pairs = [
                (out, begin)
                for out, begin in zip(outputs, begins, strict=True)
                if begin is not None and out.requires_grad
            ]
            if pairs:
                with torch.enable_grad():
                    torch.autograd.backward([out for out, _ in pairs], [begin for _, begin in pairs])
            waits += _pass_back(line, rank, inputs)
        for work, _ in waits:
            work.wait()
        ctx.runs = None
        staged.share(kept)
        return None, None, None


def _one_part(line: _Line, part: torch.Tensor, rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """This stage's inputs, received where they are others' outputs, and its outputs."""
    inputs = []
    for stage, k in line.inputs[rank]:
        if stage < 0:
            inputs.append(part)
            continue
        shape = line.shapes[stage][k]
        room = torch.empty(shape.size, dtype=shape.dtype, device=part.device)
        distributed.recv(room, stage)
        inputs.append(room.requires_grad_(shape.learns))
    with torch.enable_grad():
        found = line.module(*inputs)
    return inputs, [found] if isinstance(found, torch.Tensor) else list(found)


def _shape(out: torch.Tensor) -> _Shape:
    return _Shape(tuple(out.shape), out.dtype, out.requires_grad)


def _pass_on(line: _Line, rank: int, outputs: Sequence[torch.Tensor]) -> list[Any]:
    """In the order in which each of those that take them receives."""
    found = []
    for stage in range(rank + 1, len(line.inputs)):
        for source, k in line.inputs[stage]:
            if source == rank:
                found.append(_isend(outputs[k].detach().contiguous(), stage))
    return found


def _arriving(line: _Line, rank: int, k: int, out: torch.Tensor) -> torch.Tensor | None:
    """The gradient of output `k` by all later stages that take it."""
    found = None
    if not out.requires_grad:
        return None
    for stage in line.consumers((rank, k)):
        room = torch.empty(out.shape, dtype=out.dtype, device=out.device)
        distributed.recv(room, stage)
        found = room if found is None else found + room
    return found


def _pass_back(line: _Line, rank: int, inputs: Sequence[torch.Tensor]) -> list[Any]:
    """Gradients of what was received, in the order of the outputs of those that sent it."""
    found = []
    for (stage, _), given in sorted(zip(line.inputs[rank], inputs, strict=True), key=lambda pair: pair[0]):
        if stage >= 0 and given.requires_grad:
            gradient = given.grad if given.grad is not None else torch.zeros_like(given)
            found.append(_isend(gradient.contiguous(), stage))
    return found


def _isend(tensor: torch.Tensor, stage: int) -> tuple[Any, torch.Tensor]:
    """The message on its way, and what has to live until it has come."""
    return distributed.isend(tensor, stage), tensor


def _meet(device: torch.device) -> None:
    """All pairs of ranks, one after the other: NCCL connects a pair at its first message, and both have to be there."""
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    word = torch.zeros(1, device=device)
    for one in range(ranks):
        for other in range(one + 1, ranks):
            if rank == one:
                distributed.send(word, other)
            elif rank == other:
                distributed.recv(word, one)


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    if parameter.grad is None:
        parameter.grad = torch.empty_like(parameter)
    return parameter.grad


def _send(tensors: Sequence[torch.Tensor], stage: int) -> None:
    """What `stage` has of these is everybody's: one message for each dtype."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        alike = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in alike])
        distributed.broadcast(flat, stage)
        with torch.no_grad():
            for tensor, values in zip(alike, flat.split([tensor.numel() for tensor in alike]), strict=True):
                tensor.copy_(values.view(tensor.shape))


@contextlib.contextmanager
def _unmarked(root: torch.nn.Module, names: Sequence[str]) -> Iterator[None]:
    """The marks that torch leaves in the modules before which it cuts are gone behind it."""
    try:
        yield
    finally:
        for name in names:
            own = vars(root.get_submodule(name))
            before = own.pop("_orig_forward", None)
            own.pop("forward", None)
            if before is not None and getattr(before, "__func__", None) is not type(root.get_submodule(name)).forward:
                own["forward"] = before


def _wires(graph: torch.fx.Graph) -> tuple[list[list[Source]], list[int]]:
    """For each stage where its inputs come from, and how many outputs it has."""
    source: dict[Any, Source] = {}
    inputs: list[list[Source]] = []
    outputs: list[int] = []
    for node in graph.nodes:
        if node.op == "placeholder":
            source[node] = (-1, 0)
        elif node.op == "call_module":
            inputs.append([source[argument] for argument in node.args])
            source[node] = (len(inputs) - 1, 0)
            outputs.append(1)
        elif node.op == "call_function":  # of an output the k-th
            stage, k = source[node.args[0]][0], int(node.args[1])
            source[node] = (stage, k)
            outputs[stage] = max(outputs[stage], k + 1)
    return inputs, outputs
