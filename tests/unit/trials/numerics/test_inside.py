"""What the judge of single layers must not be led astray by: each with a fault or a right change that was judged wrongly."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from numerics import faults, right
from numerics.loops import Change, Loop, Switch
from numerics.nets import KINDS, Classifier, Kind, conv_norm, images, labelled, supervised
from torch import nn

from advisor.core.findings import Semantics
from advisor.core.verdict import Check
from advisor.ops import dispatch
from advisor.ops.batchnorm_act import reference
from advisor.transforms import capture, conv_bias
from advisor.transforms.forward import CAPTURE, ForwardStack
from advisor.trials.numerics import inside, layers, operations, plain, room, seen
from advisor.trials.numerics.plain import PlainStep
from advisor.trials.numerics.replay import ReplayedCall

torch.set_num_threads(1)


def loop_of(name: str) -> Loop:
    return Loop(next(kind for kind in KINDS if kind.name == name), 2)


def bf16(loop: Loop) -> tuple[Switch, ...]:
    return next(change.parts for change in right.changes(loop) if change.name == "bf16")


def planted(loop: Loop, name: str, place: int) -> Switch:
    where, make = faults.IN_LAYERS[name]
    module = where(loop)[place]
    return right.patched(module, lambda forward: make(module, forward))


def captured(loop: Loop, fault: Switch | None) -> Switch:
    """A captured graph in the model's place, as advisor's are: it steps aside where modules have hooks. `fault` is in the graph only."""
    model = loop.script.models[0]

    def layer(inner: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
        def forward(*args: Any) -> Any:
            if fault is None or any(part._forward_hooks for part in module.modules()):
                return inner(*args)
            off = fault()
            try:
                return inner(*args)
            finally:
                off()

        return forward

    def switch() -> Callable[[], None]:
        ForwardStack.of(model).set(CAPTURE, layer)
        return lambda: ForwardStack.of(model).clear(CAPTURE)

    return switch


def test_layers_do_not_speak_for_a_captured_graph() -> None:
    loop = loop_of("classifier, ResNet")
    assert loop.judge(Change("right", (*bf16(loop), captured(loop, None)), Semantics.PRECISION)).passed
    for name in ("weight's gradient negated", "activation's mask lost", "padding off by one"):
        part = captured(loop, planted(loop, name, 2))
        check = loop.judge(Change(name, (*bf16(loop), part), Semantics.PRECISION))
        assert check.passed is False, (name, check)


def test_a_captured_graph_that_is_right_is_no_worse_than_its_layers() -> None:
    """Of a net whose gradients half precision turns away from end to end."""
    loop = loop_of("segmentation, atrous, deep")
    check = loop.judge(Change("right", (*bf16(loop), captured(loop, None)), Semantics.PRECISION))
    assert check.passed, check


@pytest.mark.parametrize("fault", [False, True])
def test_captured_kernels_that_round_elsewhere_are_no_fault_of_a_deep_net(
    fault: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gradients are another step's then. How the graph is joined is told with PyTorch's operations in it."""
    loop = loop_of("segmentation, atrous, deep")
    model = loop.script.models[0]
    real = reference.batchnorm_act

    def kernel(x: torch.Tensor, *args: Any) -> torch.Tensor:
        """Rounds up where PyTorch rounds down, in half of the places."""
        y = real(x, *args)
        if dispatch.refusal("", ""):
            return y
        signs = (torch.arange(y.numel()).view(y.shape) % 2) * 2.0 - 1.0
        return (y.float() * (1.0 + 2.0**-8 * signs)).to(y.dtype)

    monkeypatch.setattr(reference, "batchnorm_act", kernel)
    monkeypatch.setattr(inside, "outputs_off", lambda plain, right: "")  # tested by itself
    if fault:
        run = operations.Interpreter.run

        def lost(self: Any, *args: Any, **kwargs: Any) -> Any:
            return run(self, *(2.0 * arg if isinstance(arg, torch.Tensor) else arg for arg in args), **kwargs)

        monkeypatch.setattr(operations.ByPyTorch, "run", lost)
    parts = (*bf16(loop), lambda: capture.set_family([model], "batchnorm_act").run)
    check = loop.judge(Change("kernels", parts, Semantics.PRECISION))
    assert check.passed is not fault, check
    assert not fault or "captured it is another step" in check.detail


@pytest.mark.parametrize("fault", ["", "gradient", "output"])
def test_kernels_in_a_captured_graph_are_held_against_pytorchs_operations(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else bf16 hides from end to end what one of them does wrong."""
    loop = loop_of("classifier, ResNet")
    model = loop.script.models[0]
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    real, calls, at = reference.batchnorm_act, 0, norms[len(norms) // 2].weight.data_ptr()

    def kernel(x: torch.Tensor, *args: Any) -> torch.Tensor:
        """On a CPU PyTorch's operation stands for the kernel, which is wrong in one place."""
        nonlocal calls
        y, weight = real(x, *args), args[3]
        if dispatch.refusal("", "") or weight.data_ptr() != at:  # where PyTorch's own is asked for
            return y
        calls += 1
        return {"": y, "gradient": faults.other_gradient(y, lambda g: 1.5 * g), "output": faults.few_bits(y)}[fault]

    monkeypatch.setattr(reference, "batchnorm_act", kernel)
    parts = (*bf16(loop), lambda: capture.set_family([model], "batchnorm_act").run)
    check = loop.judge(Change("kernels", parts, Semantics.PRECISION))
    assert calls
    assert not any("held against" in reason for reason in dispatch.fell_back["batchnorm_act"])
    assert "could not be checked" not in check.detail
    assert check.passed is not bool(fault), check
    assert not fault or "of batchnorm_act at" in check.detail


def test_two_wrong_gradients_are_not_excused_by_what_holds_both() -> None:
    """The sequence around two layers says nothing of their parameters' gradients."""
    loop = loop_of("classifier, plain")
    two = [planted(loop, "weight's gradient too large", place) for place in (0, 1)]
    check = loop.judge(Change("two", (*bf16(loop), *two), Semantics.PRECISION))
    assert check.passed is False, check


def test_one_dropout_of_several_that_always_drops_the_same_is_found() -> None:
    loop = loop_of("1-D, dropout 0.8")
    stuck = planted(loop, "dropout always the same", 3)
    check = loop.judge(Change("stuck", (*bf16(loop), stuck), Semantics.PRECISION))
    assert check.passed is False, check
    assert "drops the same whatever the seed" in check.detail
    stuck()  # the script's own is as stuck
    assert loop.judge(Change("bf16", bf16(loop), Semantics.PRECISION)).passed


def test_a_gradient_that_is_lost_or_cut_is_seen_in_spite_of_dropout() -> None:
    """The block is run again with what its dropouts had dropped, so that nothing of it is random."""
    loop = loop_of("1-D, dropout 0.8")
    for name in ("block's gradient cut", "gradient of the input lost"):
        check = loop.judge(Change(name, (planted(loop, name, 1),)))
        assert check.passed is False, (name, check)


def test_what_is_smaller_as_a_whole_shows_where_noise_is_as_large() -> None:
    """Noise of a fifth hides an error of 0.3 in all directions, and not along the gradient itself."""
    base = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(4096, generator=torch.Generator().manual_seed(1))
    name = "gradient of its input 0.0"
    block: Any = SimpleNamespace(holds=True, left_out="", plain=SimpleNamespace(target_class="half"))
    usual = layers.apart({name: base + 0.2 * noise}, {name: base})

    def told(found: torch.Tensor) -> float:
        return layers.error_ratios(block, {name: base}, usual, layers.apart({name: found}, {name: base}))[name]

    assert told(base + 0.3 * noise) <= 1.0
    assert told(0.7 * base) > 1.0
    assert told(1.3 * base + 0.2 * noise) > 1.0


def test_a_bias_left_to_the_norm_behind_it_is_no_fault() -> None:
    """Trained, so that it counts: then the norm's statistics are off by it, and right in the block that holds both."""
    loop = loop_of("segmentation, UNet")
    convs = [m for m in loop.script.models[0].modules() if isinstance(m, nn.Conv2d) and m.bias is not None]
    with torch.no_grad():
        for conv in convs:
            conv.bias.copy_(0.5 * torch.randn_like(conv.bias))
    parts = next(change.parts for change in right.changes(loop) if change.name == "bias before norm")
    check = loop.judge(Change("bf16 and it", (*parts, *bf16(loop)), Semantics.PRECISION))
    assert check.passed, check
    norm = planted(loop, "frozen statistics", 1)
    check = loop.judge(Change("frozen", (*parts, *bf16(loop), norm), Semantics.PRECISION))
    assert check.passed is False, check


def learnt() -> Kind:
    """A model that computes its loss itself, and has nearly learnt its batch: as denoising diffusion is written."""

    class Learnt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(*(conv_norm(c, 12) for c in (3, 12, 12, 12)), nn.Conv2d(12, 3, 3, padding=1))
            self.batch = images()
            with torch.no_grad():
                wanted = self.net(self.batch)
            self.wanted = wanted + 0.05 * wanted.std() * torch.randn_like(wanted)

        def forward(self, x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
            return nn.functional.mse_loss(self.net(x), wanted)

    def make() -> Any:
        model = Learnt()
        batch = model.batch, model.wanted, model.batch
        return supervised(model, lambda: batch, lambda loss, _: loss, lr=0.0)

    return Kind("learnt", make)


def test_a_gradient_is_no_surer_than_the_difference_that_it_is_of() -> None:
    """Denoising diffusion on an H200: exact changes were refused, for gradients of the last layers off by 0.10 and 0.16 in fp16."""
    loop = Loop(learnt(), 1)
    check = loop.judge(Change("right", bf16(loop), Semantics.PRECISION))
    assert check.passed, check
    model = loop.script.models[0]
    for factor in (0.0, 0.5, 2.0):

        def scaled(inner: Any, factor: float = factor) -> Any:
            def forward(x: torch.Tensor) -> torch.Tensor:
                y = inner(x)
                return factor * y + (1.0 - factor) * y.detach()

            return forward

        part = right.patched(model.net, scaled)
        check = loop.judge(Change("another gradient", (*bf16(loop), part), Semantics.PRECISION))
        assert check.passed is False, (factor, check)


def test_half_precision_is_torchs_own_in_the_layout_that_it_is_given() -> None:
    """Of two samples pooled to a pixel a norm's gradient nearly cancels, and torch's kernel for NHWC leaves its roundings of it (ASPP in
    bf16 and channels_last on a CPU was refused)."""

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = conv_norm(3, 16)
            self.pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), conv_norm(16, 16, 1))
            self.head = nn.Conv2d(32, 5, 1)
            with torch.no_grad():
                self.pooled[1][0].weight *= 100.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.features(x)
            return self.head(torch.cat([x, self.pooled(x).expand_as(x)], 1)).mean((2, 3))

    kind = Kind("pooled", lambda: supervised(Pooled(), labelled(rows=2), nn.functional.cross_entropy))
    loop = Loop(kind, 2)
    parts = next(change.parts for change in right.changes(loop) if change.name == "bf16 and the rest")
    check = loop.judge(Change("right", parts, Semantics.PRECISION))
    assert check.passed, check


def flat() -> Kind:
    """Convolutions with trained biases, each before a norm, in a model that no block divides."""

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.norm1 = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
            self.conv2, self.norm2 = nn.Conv2d(16, 16, 3, padding=1), nn.InstanceNorm2d(16, affine=True)
            self.head = nn.Linear(16, 5)
            with torch.no_grad():
                for conv in (self.conv1, self.conv2):
                    conv.bias.copy_(torch.randn(16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.relu(self.norm1(self.conv1(x)))
            x = torch.relu(self.norm2(self.conv2(x)))
            return self.head(x.mean((2, 3)))

    return Kind("flat", lambda: supervised(Flat(), labelled(), nn.functional.cross_entropy))


def test_a_bias_that_is_known_to_be_left_out_is_told_without_a_block_around(monkeypatch: pytest.MonkeyPatch) -> None:
    """RAFT's encoders: what holds the two gives several tensors, or is the model."""
    loop = Loop(flat(), 2)
    parts = next(change.parts for change in right.changes(loop) if change.name == "bias before norm")
    check = loop.judge(Change("bf16 and it", (*parts, *bf16(loop)), Semantics.PRECISION))
    assert check.passed, check
    monkeypatch.setattr(conv_bias.Pair, "with_whole_mean", lambda self, inner, module: inner)
    loop = Loop(flat(), 2)
    parts = next(change.parts for change in right.changes(loop) if change.name == "bias before norm")
    check = loop.judge(Change("no share of it in the mean", (*parts, *bf16(loop)), Semantics.PRECISION))
    assert check.passed is False, check


def test_a_module_of_two_names_is_inside_of_all_that_hold_it() -> None:
    """RAFT's blocks have a norm that is also the end of their downsampling."""
    norm = nn.BatchNorm2d(8)
    block = nn.Sequential()
    block.norm, block.down = norm, nn.Sequential(nn.Conv2d(3, 8, 1), norm)
    root = nn.Sequential(block)
    parts = seen.inside(root, ["0", "0.norm", "0.down", "0.down.0"])
    assert parts["0.down"] == {"0.down.0", "0.norm"}
    assert parts["0"] == {"0.norm", "0.down", "0.down.0"}
    assert parts["0.norm"] == frozenset()


def test_a_bias_that_a_norm_without_statistics_cancels_is_no_fault() -> None:
    """Then the convolution alone is off, by a constant a channel."""

    def make() -> Any:
        block = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.InstanceNorm2d(16), nn.ReLU())
        return supervised(
            Classifier(nn.Sequential(block, conv_norm(16, 32)), 32), labelled(), nn.functional.cross_entropy
        )

    loop = Loop(Kind("instance", make), 2)
    conv = loop.script.models[0].features[0][0]
    with torch.no_grad():
        conv.bias.copy_(torch.randn(16))

    def judged(fault: Callable[[torch.Tensor], torch.Tensor]) -> Check:
        part = right.patched(conv, lambda forward: lambda x: fault(forward(x)))
        return loop.judge(Change("bf16", (*bf16(loop), part), Semantics.PRECISION))

    check = judged(lambda y: y - conv.bias.view(1, -1, 1, 1).to(y.dtype))
    assert check.passed, check
    assert judged(faults.zeroed_channel).passed is False


def test_a_layer_without_a_word_of_its_own_is_judged_with_what_holds_it() -> None:
    """One that gives several tensors is not compared; its weight is then the holding module's to judge."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(16, 32, 3, padding=1)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return tuple(self.conv(x).chunk(2, 1))

    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both = Both()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a, b = self.both(x)
            return a * torch.sigmoid(b)

    root = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), Holds())
    modules = {name: module for name, module in root.named_modules() if name in ("0", "1")}
    owned = layers.owned(root, modules)
    assert {id(p) for p in owned["1"]} == {id(p) for p in root[1].parameters()}
    assert {id(p) for p in owned["0"]} == {id(p) for p in root[0].parameters()}


def test_what_torchs_own_half_precision_adds_up_is_right() -> None:
    """A kernel of torch's that sums in bf16 is off by more than roundings of what goes in, and is what autocast runs."""

    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            bias = self.bias.view(1, -1, 1, 1)
            if not torch.is_autocast_enabled("cpu"):
                return x + bias
            return faults.other_gradient(x + bias.expand_as(x), lambda g: g) + 0.3 * (bias - bias.detach())

    def make() -> Any:
        features = nn.Sequential(conv_norm(3, 16), Sums(), conv_norm(16, 32))
        return supervised(Classifier(features, 32), labelled(), nn.functional.cross_entropy)

    loop = Loop(Kind("sums", make), 2)
    model = loop.script.models[0]

    def judged(*parts: Switch) -> Check:
        return loop.judge(Change("bf16", (*bf16(loop), *parts), Semantics.PRECISION))

    assert judged().passed
    wrong = right.patched(
        model.features[1], lambda forward: lambda x: faults.other_gradient(forward(x), lambda g: 2.0 * g)
    )
    assert judged(wrong).passed is False


def test_layers_that_work_in_place_are_looked_at() -> None:
    loop = loop_of("classifier, ResNet")
    for module in loop.script.models[0].modules():
        if isinstance(module, nn.ReLU):
            module.inplace = True
    check = loop.judge(Change("bf16", bf16(loop), Semantics.PRECISION))
    assert check.passed, check
    assert "could not be checked" not in check.detail
    wrong = planted(loop, "norm's bias left out of the gradient", 2)
    check = loop.judge(Change("wrong", (*bf16(loop), wrong), Semantics.PRECISION))
    assert check.passed is False, check
    assert "by itself" in check.detail


def test_a_layer_that_writes_to_what_it_is_given_is_looked_at() -> None:
    class Adds(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x += 0.5
            return x * 2

    def make() -> Any:
        features = nn.Sequential(conv_norm(3, 16), nn.Conv2d(16, 16, 3, padding=1), Adds(), conv_norm(16, 32))
        return supervised(Classifier(features, 32), labelled(), nn.functional.cross_entropy)

    loop = Loop(Kind("adds", make), 2)
    check = loop.judge(Change("bf16", bf16(loop), Semantics.PRECISION))
    assert check.passed, check
    assert "could not be checked" not in check.detail


def test_an_operation_that_fails_while_it_is_looked_at_leaves_autocast_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = loop_of("classifier, ResNet")
    model = loop.script.models[0]
    parts = (*bf16(loop), lambda: capture.set_family([model], "batchnorm_act").run)
    monkeypatch.setattr(operations, "listed", lambda result: 1 / 0)
    check = loop.judge(Change("kernels", parts, Semantics.PRECISION))
    assert "could not be checked (ZeroDivisionError" in check.detail
    assert not torch.is_autocast_enabled("cpu")
    torch.clear_autocast_cache()
    weight, seen_as = nn.Parameter(torch.ones(2, 2)), []
    for _ in range(2):  # its copy in bf16 is kept as long as anybody is inside of an autocast
        with torch.autocast("cpu", dtype=torch.bfloat16):
            seen_as.append(float(torch.mm(torch.ones(2, 2), weight).detach()[0, 0]))
        with torch.no_grad():
            weight.mul_(2.0)
    assert seen_as == [2.0, 4.0]


def test_a_captured_graph_that_fails_leaves_no_autocast_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one does that a CUDA graph cannot hold: from then on weights would be seen as they were."""
    loop = loop_of("classifier, ResNet")
    model = loop.script.models[0]
    x = torch.randn(4, 3, 16, 16)
    offs = [part() for part in (*bf16(loop), lambda: capture.set_family([model], "batchnorm_act").run)]
    model(x)
    before = capture.autocasts_around()
    with monkeypatch.context() as patched:
        patched.setattr(reference, "batchnorm_act", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(x)
    assert capture.autocasts_around() == before
    for off in reversed(offs):
        off()


def test_a_script_may_have_set_another_default_device() -> None:
    loop = loop_of("classifier, plain")
    change = Change("bf16", bf16(loop), Semantics.PRECISION)
    torch.set_default_device("meta")
    try:
        with torch.device("cpu"):
            loop.advance(1)
        check = loop.judge(change)
    finally:
        torch.set_default_device(None)
    assert check.passed, check
    assert "could not be checked" not in check.detail


def test_one_copy_serves_where_values_are_the_same_and_no_longer() -> None:
    copies = seen.SeenCopies()
    x = torch.ones(4)
    first = copies.of(x)
    assert copies.of(x) is first
    x.add_(1.0)
    second = copies.of(x)
    assert second is not first
    assert first.tolist() == [1.0] * 4
    assert second.tolist() == [2.0] * 4
    copies.same(alias := x.view_as(x), x)
    assert copies.of(alias) is second
    copies.same(clone := x.clone(), x)
    assert copies.of(clone) is second
    clone.relu_()
    assert copies.of(clone) is not second  # though it is at the version now that `x` was at


class Residual(nn.Module):
    """Adds in place and then acts in place, as the ResNets of most libraries do."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        last = nn.Conv2d(channels, channels, 3, padding=1)
        self.inner = nn.Sequential(conv_norm(channels, channels), last, nn.BatchNorm2d(channels))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.inner(x)
        out += x
        return self.relu(out)


def test_an_activation_in_place_behind_a_sum_in_place_is_seen_as_it_is() -> None:
    def make() -> Any:
        torch.manual_seed(0)
        blocks = nn.Sequential(conv_norm(3, 16), *(Residual(16) for _ in range(10)))
        return supervised(Classifier(blocks, 16), labelled(), nn.functional.cross_entropy)

    loop = Loop(Kind("residual", make), 2)
    check = loop.judge(Change("bf16", bf16(loop), Semantics.PRECISION))
    assert check.passed, check
    wrong = planted(loop, "norm's bias left out of the gradient", 2)
    check = loop.judge(Change("wrong", (*bf16(loop), wrong), Semantics.PRECISION))
    assert check.passed is False, check


def test_no_room_to_look_at_layers_leaves_the_word_from_end_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise torch.cuda.OutOfMemoryError("no room")

    loop = loop_of("classifier, plain")
    monkeypatch.setattr(inside, "observed", full)
    state = [p.detach().clone() for p in loop.script.models[0].parameters()]
    check = loop.judge(Change("bf16", bf16(loop), Semantics.PRECISION))
    assert check.passed, check
    assert "its layers could not be checked (OutOfMemoryError: no room)" in check.detail
    moved = [p for p, before in zip(loop.script.models[0].parameters(), state, strict=True) if torch.equal(p, before)]
    assert not moved  # by the step of the script's that was captured, and by nothing else


def _with_room_for(most: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Copies of more samples than this have no room; how many were tried."""
    tried: list[int] = []
    real = inside.observed

    def observed(plain: Any, *args: Any) -> Any:
        tried.append(plain.call.args[0].size(0))
        if tried[-1] > most:
            raise torch.cuda.OutOfMemoryError("no room")
        return real(plain, *args)

    monkeypatch.setattr(inside, "observed", observed)
    return tried


@pytest.mark.parametrize("fault", ["", "weight's gradient too large"])
def test_layers_are_judged_on_as_many_samples_as_have_room(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = _with_room_for(3, monkeypatch)
    loop = loop_of("classifier, ResNet")
    parts = (*bf16(loop), *([planted(loop, fault, 1)] if fault else []))
    check = loop.judge(Change("bf16", parts, Semantics.PRECISION))
    assert len(tried) > 1
    assert tried[-1] <= 3 < tried[-2]
    assert "could not be checked" not in check.detail
    assert check.passed is not bool(fault), check


@pytest.mark.parametrize("fault", ["", "weight's gradient too large"])
def test_layers_for_which_there_is_no_time_are_not_judged(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is right passes by the word from end to end, and says so; what is wrong in a layer that had its turn is found."""
    clock = itertools.count()
    monkeypatch.setattr(layers, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    monkeypatch.setattr(layers, "MOST_S", 4.5)
    monkeypatch.setattr(layers, "MOST_STEPS", 0.0)
    monkeypatch.setattr(layers, "BATCH_ELEMENTS", 0)
    loop = loop_of("classifier, ResNet")
    parts = (*bf16(loop), *([planted(loop, fault, 0)] if fault else []))
    check = loop.judge(Change("bf16", parts, Semantics.PRECISION))
    assert check.passed is not bool(fault), check
    assert ("by itself" if fault else "could not all be checked (no time for") in check.detail


def test_a_long_step_is_replayed_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for long_s in (math.inf, 0.0):
        made: list[dict[str, Any]] = []
        real = plain.replay

        def counted(*args: Any, made: list[dict[str, Any]] = made, real: Any = real, **options: Any) -> Any:
            made.append(options)
            return real(*args, **options)

        monkeypatch.setattr(plain, "LONG_S", long_s)
        monkeypatch.setattr(plain, "replay", counted)
        loop = loop_of("1-D, dropout 0.8")
        check = loop.judge(Change("bf16", bf16(loop), Semantics.PRECISION))
        assert check.passed, check
        counts.append(sum("lift" not in options for options in made))
        monkeypatch.setattr(plain, "replay", real)
    assert counts[1] <= counts[0] - 6


def test_a_call_is_cut_where_all_that_it_is_given_and_gives_is_of_as_many_samples() -> None:
    def call(*args: Any, grads: tuple[int, ...] = (8, 10)) -> ReplayedCall:
        return ReplayedCall(None, args, {"scale": torch.ones(())}, [torch.ones(grads)], (False, torch.bfloat16))  # type: ignore[arg-type]  # no model is called

    images, steps = torch.arange(8.0).view(8, 1, 1, 1).requires_grad_(), torch.arange(8)
    cut = room.cut(call(images, steps), 3)
    assert cut.args[0].flatten().tolist() == cut.args[1].tolist() == [0, 1, 2]
    assert cut.args[0].requires_grad
    assert cut.grads[0].shape == (3, 10)
    assert cut.kwargs["scale"].shape == ()
    assert room.count(call(images, steps)) == 8
    assert room.count(call(images, torch.ones(5))) == 0
    assert room.count(call(images, grads=(4, 10))) == 0


def test_samples_by_room_and_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "LONG_S", 0.5)
    images, gib = torch.ones(16, 1), 2.0**30
    call = ReplayedCall(None, (images,), {}, [images], (False, torch.bfloat16))  # type: ignore[arg-type]  # no model is called

    def tried(free: float, step: float, seconds: float) -> list[int]:
        monkeypatch.setattr(room, "free_bytes", lambda device: free)
        monkeypatch.setattr(room, "step_bytes", lambda device: step)
        saved, base = SimpleNamespace(device=torch.device("cpu")), SimpleNamespace(seconds=seconds)
        plain = PlainStep(call, saved, base, None, "half")  # type: ignore[arg-type]  # nor replayed
        return [part.call.args[0].size(0) for part in room.fewer(plain)]

    assert tried(100 * gib, 10 * gib, 0.1) == [16, 8, 4, 2, 1]
    assert tried(20 * gib, 20 * gib, 0.1) == [2, 1]
    assert tried(1 * gib, 100 * gib, 0.1) == [1]
    assert tried(100 * gib, 0, 0.1)[0] == 16
    assert tried(100 * gib, 10 * gib, 1.0)[0] == 8
    assert tried(100 * gib, 10 * gib, 60.0)[0] == 4


def test_operations_are_looked_at_a_part_at_a_time_where_all_have_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = loop_of("classifier, ResNet")
    model = loop.script.models[0]
    by_room: dict[float, list[list[str]]] = {0.0: [], math.inf: []}
    real = operations.observed

    def observed(plain: Any, _: float) -> Any:
        for size, runs in by_room.items():
            found = list(real(plain, size))
            runs[:] = [[call.place for call in calls] for calls in found]
        yield from found

    monkeypatch.setattr(operations, "observed", observed)
    parts = (*bf16(loop), lambda: capture.set_family([model], "batchnorm_act").run)
    assert loop.judge(Change("kernels", parts, Semantics.PRECISION)).passed
    one_each, at_once = by_room.values()
    assert len(at_once) == 1
    assert len(at_once[0]) > 2
    assert [place for calls in one_each for place in calls] == at_once[0]
    assert all(len(calls) == 1 for calls in one_each)


class Head(nn.Module):
    """Takes its values as one dict, as DeepLab's heads do, and as keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = conv_norm(16, 16), nn.Conv2d(16, 32, 3, padding=1)

    def forward(self, found: dict[str, torch.Tensor], *, scale: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.low(found["low"]), self.high(found["high"]) * scale], 1)


class Pyramid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = conv_norm(3, 16), conv_norm(16, 16), Head()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = self.first(x)
        return self.head({"low": low, "high": self.second(low)}, scale=low.mean())


class LeavesOut(torch.autograd.Function):
    """Two values; of the second no gradient comes back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(gate)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * 0.5, None


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.gate = conv_norm(3, 32), nn.Conv2d(3, 32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return LeavesOut.apply(self.conv(x), self.gate(x))


class Reads(nn.Module):
    """Is not to be called by itself: it reads what its model has set for it and takes away again."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.size = nn.Conv2d(16, 32, 3, padding=1), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.conv2d(x, self.conv.weight, padding=1)[..., : self.size[0]]


class Sets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.reads = conv_norm(3, 16), Reads()
        self.reads.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.reads.size = x.shape[-1:]
        result = self.reads(self.first(x)) * self.reads.weight
        self.reads.size = None
        return result


@pytest.mark.parametrize("features", [Pyramid, Gated])
def test_a_layer_is_judged_whatever_it_is_given_and_whoever_sends_no_gradient(
    features: Callable[[], nn.Module],
) -> None:
    def make() -> Any:
        torch.manual_seed(0)
        channels = 48 if features is Pyramid else 32
        return supervised(Classifier(nn.Sequential(features()), channels), labelled(), nn.functional.cross_entropy)

    loop = Loop(Kind("head", make), 2)
    check = loop.judge(Change("bf16", bf16(loop), Semantics.PRECISION))
    assert check.passed, check
    assert "could not" not in check.detail
    convolution = next(m for m in loop.script.models[0].modules() if isinstance(m, nn.Conv2d))
    wrong = right.patched(
        convolution, lambda forward: lambda x: faults.other_gradient(forward(x), lambda g: torch.zeros_like(g))
    )
    check = loop.judge(Change("wrong", (*bf16(loop), wrong), Semantics.PRECISION))
    assert check.passed is False, check


def test_one_layer_that_is_not_to_be_called_by_itself_leaves_the_others_judged() -> None:
    def make() -> Any:
        return supervised(Classifier(nn.Sequential(Sets()), 32), labelled(), nn.functional.cross_entropy)

    loop = Loop(Kind("sets", make), 2)
    assert loop.judge(Change("bf16", bf16(loop), Semantics.PRECISION)).passed
    wrong = planted(loop, "norm's bias left out of the gradient", 0)
    check = loop.judge(Change("wrong", (*bf16(loop), wrong), Semantics.PRECISION))
    assert check.passed is False, check
    assert "by itself" in check.detail, check


@pytest.mark.parametrize(("left_out", "zero", "wrong"), [(True, True, False), (True, False, True), (False, True, True)])
def test_the_gradient_of_a_bias_that_is_left_out_is_held_against_no_residue(
    left_out: bool, zero: bool, wrong: bool
) -> None:
    """What an instance norm's backward has rounded in bf16, summed over a CycleGAN's 65,536 pixels, is five times what one more rounding
    moves it by: zero was "1.6 times as far off" as it allows.
    """
    name, other = "gradient of parameter 1", "gradient of parameter 0"
    base = {other: torch.ones(16, 3), name: torch.linspace(1e-3, 2e-3, 16)}
    found = {other: base[other], name: base[name] * (0.0 if zero else -1.0)}
    rerun: Any = SimpleNamespace(
        left_out=name if left_out else "",
        found=lambda: found,
        holds=False,
        plain=SimpleNamespace(target_class="half"),
    )
    noisy = dict.fromkeys(base, layers.Apart(error=0.2))
    ratios = layers.error_ratios(rerun, base, noisy, layers.apart(found, base))
    assert (ratios[name] > 1.0) is wrong
    assert ratios[other] <= 1.0


def test_a_target_drawn_inside_of_the_model_may_be_another_seeds() -> None:
    """denoising-diffusion-pytorch: the noise to predict is drawn like the images, and NHWC draws it in another order."""

    class Diffusion(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.SiLU(), nn.Conv2d(16, 3, 3, padding=1))
            self.nhwc = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            like = x.contiguous(memory_format=torch.channels_last) if self.nhwc else x
            noise = torch.randn_like(like)
            return nn.functional.mse_loss(self.net(0.8 * x + 0.6 * noise), noise)

    def make() -> Any:
        return supervised(Diffusion(), labelled(), lambda loss, y: loss)

    loop = Loop(Kind("diffusion", make), 2)
    model = loop.script.models[0]

    def nhwc() -> Callable[[], None]:
        model.nhwc = True
        return lambda: setattr(model, "nhwc", False)

    check = loop.judge(Change("NHWC", (nhwc,), Semantics.REASSOCIATED))
    assert check.passed, check
    lost = right.patched(model.net[2], lambda forward: lambda x: 0.0 * forward(x) + forward(x).detach())
    assert loop.judge(Change("no gradient", (nhwc, lost), Semantics.REASSOCIATED)).passed is False
