"""Leave out a convolution's bias where batch norm, or instance norm, subtracts it again.

In training mode the mean that the norm subtracts contains the bias, so neither output nor gradients depend on it: the bias
costs a pass over the output forward and one over the gradient backward for nothing. Here it is not added; the running mean gets
its share back, so evaluation and checkpoints mean the same; and its gradient is exactly zero, what it is in exact arithmetic (the
plain script has rounding noise there), so weight decay and momentum act on it as before. In evaluation mode nothing changes, nor while
the batch norm averages cumulatively.

Done only for a convolution whose output is seen to go to one such norm and nowhere else, in a replay of the forward.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from advisor.core.profile import StepProfile
from advisor.core.verdict import Check
from advisor.loop.training import RootModule, Training
from advisor.transforms.base import Match, Transform, Undo
from advisor.transforms.forward import CAPTURE, GRAPH, SUBMODULE, ForwardStack, hooks_of
from advisor.transforms.patch import all_or_nothing, target_of, tensors_in
from advisor.transforms.replay import hooked, replaying
from advisor.transforms.targets import UPDATES_COMPILED, data_parallel, sharded, targets

_CONVOLUTIONS = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
_NORMS = (
    torch.nn.BatchNorm1d,
    torch.nn.BatchNorm2d,
    torch.nn.BatchNorm3d,
    torch.nn.InstanceNorm1d,
    torch.nn.InstanceNorm2d,
    torch.nn.InstanceNorm3d,
)

# Convolution → calls without its bias since `apply`.
_calls: WeakKeyDictionary[torch.nn.Module, int] = WeakKeyDictionary()


# Root module → its pairs as last matched: looking again at each switching would cost a forward pass.
found_pairs: WeakKeyDictionary[torch.nn.Module, list[Pair]] = WeakKeyDictionary()


class ConvBiasBeforeNorm(Transform):
    """Skip biases that batch norm and instance norm cancel."""

    id = "conv_bias"
    traced = False  # calls are counted

    def match(self, training: Training, parameters: Mapping[str, str]) -> Match:
        if training.updates_compiled:
            return Match(applies=False, reason=UPDATES_COMPILED)
        sites, unmatched = [], []
        for root in training.roots:
            pairs, refused = _pairs(training, root)
            if pairs:
                found_pairs[root.module] = pairs
            sites += [f"{root.name}.{pair.name}" for pair in pairs]
            unmatched += [f"{root.name}.{name}: {why_not}" for name, why_not in refused.items()]
        reason = "" if sites else "; ".join(unmatched[:3]) or "no convolution has a bias"
        return Match(applies=bool(sites), reason=reason, sites=tuple(sites), unmatched=tuple(unmatched))

    def apply(self, training: Training, parameters: Mapping[str, str]) -> Undo:
        pairs = []
        for root in training.roots:
            if root.module not in found_pairs:
                found_pairs[root.module] = _pairs(training, root)[0]
            pairs += found_pairs[root.module]
        with all_or_nothing() as undo:
            for pair in pairs:
                for module, layer in ((pair.conv, pair.without_bias), (pair.norm, pair.with_whole_mean)):
                    stack = ForwardStack.of(module)
                    undo.push(functools.partial(stack.clear, SUBMODULE))
                    stack.set(SUBMODULE, layer)
                undo.push(functools.partial(_calls.pop, pair.conv, None))
                _calls[pair.conv] = 0

            def give_gradients(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
                for pair in pairs:
                    if pair.conv.weight.grad is not None:
                        pair.give_gradient()

            for optimizer in training.optimizers:
                undo.push(optimizer.register_step_pre_hook(give_gradients).remove)
        return undo

    def release(self, training: Training) -> None:
        for root in training.roots:
            for pair in found_pairs.pop(root.module, []):
                ForwardStack.of(pair.conv).forget(pair.without_bias)
                ForwardStack.of(pair.norm).forget(pair.with_whole_mean)

    def effect(self, training: Training, before: StepProfile | None, after: StepProfile | None) -> Check:
        convs = [module for root in training.roots for module in root.module.modules() if module in _calls]
        if not convs:
            return Check(passed=False, detail="no convolution leaves its bias out")
        ran = sum(_calls[conv] > 0 for conv in convs)
        numbers = {"convolutions": float(len(convs)), "ran": float(ran)}
        if ran == 0:
            captured = any(ForwardStack.of(t).get(rank) for t in targets(training) for rank in (CAPTURE, GRAPH))
            return Check(
                passed=None if captured else False,
                detail="no call was seen" + (" (the model is compiled or captured)" if captured else ""),
                numbers=numbers,
            )
        return Check(passed=True, detail=f"{ran} of {len(convs)} convolutions ran without their bias", numbers=numbers)


def moved_bias(module: torch.nn.Module) -> torch.Tensor | None:
    """The bias, [C], that this convolution leaves out now, or that this norm puts into its running mean in its place; None of others."""
    layer = ForwardStack.of(module).get(SUBMODULE)
    pair = getattr(layer, "__self__", None)
    return pair.conv.bias.detach() if isinstance(pair, Pair) and pair.active() else None


@dataclass(slots=True, eq=False)
class Pair:
    """A convolution and the norm that takes its output."""

    name: str
    conv: Any
    norm: Any
    zeros: _Zeros

    def active(self) -> bool:
        return bool(self.conv.training and self.norm.training and not _averages_cumulatively(self.norm))

    def without_bias(self, inner: Callable[..., Any], module: torch.nn.Module) -> Callable[..., Any]:
        conv = self.conv

        def forward(x: torch.Tensor) -> torch.Tensor:
            if not self.active():
                return inner(x)  # type: ignore[no-any-return]  # torch has no type for it
            if not torch.compiler.is_compiling():
                _calls[conv] = _calls.get(conv, 0) + 1
                if torch.is_grad_enabled():
                    self.give_gradient()
            return conv._conv_forward(x, conv.weight, None)  # type: ignore[no-any-return]  # torch has no type for it

        return forward

    def with_whole_mean(self, inner: Callable[..., Any], module: torch.nn.Module) -> Callable[..., Any]:
        conv, norm = self.conv, self.norm

        def forward(x: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = inner(x)
            if self.active() and norm.track_running_stats and norm.running_mean is not None:
                # Through `.data`: autograd has saved the buffer, without using its value, and must not see a new version.
                norm.running_mean.data.add_(conv.bias.data, alpha=norm.momentum)
            return output

        return forward

    def give_gradient(self) -> None:
        """Give the bias a zero gradient if it has none."""
        bias = self.conv.bias
        if bias.requires_grad and bias.grad is None and not is_captured(bias):
            bias.grad = self.zeros.take(self)


class _Zeros:
    """Zero gradients for the biases of one root, each handed out once: a script may write to what it was given and keep it, and torch
    counts no writes through `.data`. One kernel fills all that a step takes.
    """

    def __init__(self) -> None:
        self.pairs: list[Pair] = []
        self._ready: dict[Pair, torch.Tensor] = {}

    def take(self, pair: Pair) -> torch.Tensor:
        """New zeros for this pair's bias."""
        if pair not in self._ready:
            self._ready = {one: torch.empty_like(one.conv.bias, requires_grad=False) for one in self.pairs}
            torch._foreach_zero_(list(self._ready.values()))
        return self._ready.pop(pair)


def _averages_cumulatively(norm: Any) -> bool:
    """Over all batches alike, so that no fixed share of the bias is in its running mean; `swa_utils.update_bn` sets a norm to that for a while."""
    return bool(norm.track_running_stats and norm.momentum is None)


def is_captured(bias: torch.Tensor) -> bool:
    """In a CUDA graph's capture it is a leaf of the graph's own, and each replay would fill once more what is zeros there."""
    return bias.is_cuda and torch.cuda.is_current_stream_capturing()


def _pairs(training: Training, root: RootModule) -> tuple[list[Pair], dict[str, str]]:
    """The convolutions of `root` whose bias can go, and why the others' cannot."""
    refused: dict[str, str] = {}
    candidates: dict[torch.nn.Module, str] = {}
    for name, module in root.module.named_modules():
        if isinstance(module, torch.nn.modules.conv._ConvNd) and module.bias is not None:
            why_not = _conv_refuses(module)
            if why_not:
                refused[name] = why_not
            else:
                candidates[module] = name
    if not candidates:
        return [], refused
    why_not = _root_refuses(training, root)
    if why_not:
        return [], refused | dict.fromkeys(candidates.values(), why_not)
    try:
        watched = _watch_outputs(root, list(candidates))
    except Exception as error:  # the forward is the script's own code
        why_not = f"its forward could not be run again ({type(error).__name__}: {error})"
        return [], refused | dict.fromkeys(candidates.values(), why_not)
    zeros = _Zeros()
    for conv, uses in watched.items():
        why_not = uses.refuses()
        if why_not:
            refused[candidates[conv]] = why_not
        else:
            zeros.pairs.append(Pair(candidates[conv], conv, uses.norm, zeros))
    return zeros.pairs, refused


def _root_refuses(training: Training, root: RootModule) -> str:
    if data_parallel(root.module):
        return "DistributedDataParallel waits for its bias's gradient"
    if isinstance(root.module, torch.nn.DataParallel) and len(root.module.device_ids) > 1:
        return "DataParallel runs replicas of it"
    if sharded(root.module.parameters()):
        return "its parameters are sharded"
    if not (root.args or root.kwargs):
        return "no call of the model was seen"
    if any(ForwardStack.of(target_of(training, root)).get(rank) for rank in (CAPTURE, GRAPH)):
        return "the model is compiled or captured already"
    if names := hooked(root.module):
        return f"the script's hook on {names[0]} would see the forward pass that shows who takes its output"
    return ""


def _conv_refuses(conv: Any) -> str:
    if type(conv) not in _CONVOLUTIONS:
        return f"a {type(conv).__name__} may use its bias in its own way"
    if not isinstance(conv.bias, torch.nn.Parameter) or not isinstance(conv.weight, torch.nn.Parameter):
        return "its parameters are computed (parametrization)"
    if conv in _calls:
        return "its bias is left out already"
    if any(hooks_of(conv)):
        return "a hook sees its output"
    if conv.bias._backward_hooks:
        return "a hook sees its bias's gradient"
    return "the script has replaced its forward" if "forward" in vars(conv) else ""


@dataclass(slots=True)
class _Uses:
    """Who took a convolution's output in one forward pass."""

    calls: int = 0
    output: ref[torch.Tensor] | None = None
    norm: Any = None
    norms: int = 0
    others: list[str] = field(default_factory=list)
    kept: bool = False

    def refuses(self) -> str:
        norm = self.norm
        if self.calls != 1:
            return f"runs {self.calls} times in a forward pass"
        if norm is None:
            return "no batch or instance norm takes its output"
        if self.norms != 1 or self.others:
            return "its output is used outside its norm too" + (f" ({self.others[0]})" if self.others else "")
        if self.kept:
            return "its output is kept after the forward pass"
        if _averages_cumulatively(norm):
            return "its norm averages cumulatively"
        return "" if norm.training else "its norm is in evaluation mode"


def _watch_outputs(root: RootModule, convs: list[torch.nn.Module]) -> dict[torch.nn.Module, _Uses]:
    uses = {conv: _Uses() for conv in convs}
    live: dict[int, _Uses] = {}  # id(output) → its convolution's uses
    inside: list[torch.nn.Module] = []  # the norm that is running
    norm_calls: dict[torch.nn.Module, int] = {}

    def find(value: Any) -> _Uses | None:
        use = live.get(id(value))
        return use if use is not None and use.output is not None and use.output() is value else None

    def produced(module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        use = uses[module]
        use.calls += 1
        use.output = ref(output)
        live[id(output)] = use

    def enters(module: torch.nn.Module, args: Any) -> None:
        inside.append(module)
        norm_calls[module] = norm_calls.get(module, 0) + 1
        use = find(args[0]) if args else None
        if use is not None:
            use.norm, use.norms = module, use.norms + 1

    def leaves(module: torch.nn.Module, args: Any, output: Any) -> None:
        inside.pop()

    class Consumers(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            for tensor in tensors_in((args, kwargs or {})):
                use = find(tensor)
                if use is not None and not (inside and inside[-1] is use.norm):
                    use.others.append(str(func))
            return func(*args, **(kwargs or {}))

    handles = [conv.register_forward_hook(produced) for conv in convs]
    for module in root.module.modules():
        if type(module) in _NORMS:
            handles.append(module.register_forward_pre_hook(enters))
            handles.append(module.register_forward_hook(leaves, always_call=True))
    try:
        with Consumers(), replaying(root) as output:  # type: ignore[no-untyped-call]  # torch's own, without types
            gc.collect()
            for use in uses.values():
                use.kept = use.output is not None and use.output() is not None
                if use.norm is not None and norm_calls[use.norm] != 1:
                    use.others.append("its norm runs more than once")
            del output
    finally:
        for handle in handles:
            handle.remove()
    return uses
