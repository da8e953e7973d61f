"""Convolution biases before batch norm: left out in training, and nobody can tell."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from loops import CLASSES, Around, ConvNet, assert_close, check_undo_is_exact, make_loop, sharded_net, twins, values
from torch import nn

from advisor.transforms import conv_bias
from advisor.transforms.conv_bias import ConvBiasBeforeNorm
from advisor.transforms.forward import CAPTURE, ForwardStack


def names(lines: tuple[str, ...]) -> list[str]:
    return [line.partition(": ")[0] for line in lines]


def test_training_and_evaluation_stay_the_same() -> None:
    loop, plain = twins()
    transform = ConvBiasBeforeNorm()
    match = transform.match(loop.training, {})
    assert match.sites == ("ConvNet.conv1", "ConvNet.conv2")
    transform.apply(loop.training, {})
    assert transform.effect(loop.training, None, None).passed is False
    with torch.no_grad():
        for net in (loop.model, plain.model):
            net.conv1.bias.add_(torch.linspace(-1, 1, 8))
    torch.testing.assert_close(loop.run(4), plain.run(4), rtol=1e-5, atol=1e-6)
    ours, theirs = values(loop), values(plain)
    assert_close(ours, theirs, 1e-4)
    for name in ("bn1.running_mean", "bn2.running_mean", "conv1.bias", "conv2.bias"):
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-5)
    assert transform.effect(loop.training, None, None).passed
    assert torch.count_nonzero(loop.model.conv1.bias.grad) == 0
    x = next(loop.batches)[0]
    torch.testing.assert_close(loop.model.eval()(x), plain.model.eval()(x), rtol=1e-4, atol=1e-5)


def test_a_script_takes_the_norms_statistics_anew_in_mid_training() -> None:
    """As `update_bn` does with averaged weights that are back in the model itself: norms average cumulatively meanwhile."""
    loop, plain = twins()
    ConvBiasBeforeNorm().apply(loop.training, {})
    images = [torch.randn(4, 3, 8, 8) for _ in range(3)]
    for one in (loop, plain):
        with torch.no_grad():
            one.model.conv1.bias.add_(torch.linspace(-1, 1, 8))
        one.run(2)
        torch.optim.swa_utils.update_bn(images, one.model)
    for name in ("bn1.running_mean", "bn2.running_mean"):
        torch.testing.assert_close(values(loop)[name], values(plain)[name], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(loop.run(2), plain.run(2), rtol=1e-4, atol=1e-5)
    assert torch.count_nonzero(loop.model.conv1.bias.grad) == 0  # left out again


def test_undo_is_exact() -> None:
    loop, plain = twins()
    check_undo_is_exact(ConvBiasBeforeNorm(), loop, plain)


def test_match_leaves_the_training_alone() -> None:
    loop, plain = twins()
    ConvBiasBeforeNorm().match(loop.training, {})
    assert loop.run(2) == plain.run(2)
    assert all(torch.equal(a, b) for a, b in zip(values(loop).values(), values(plain).values(), strict=True))


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, CLASSES, 3), nn.BatchNorm2d(CLASSES)
        self.kept = None

    def forward(self, x):
        return self.combine(self.conv(x)).mean((2, 3))


class Twice(Base):
    def combine(self, y):
        return self.bn(y) + y


class Detached(Base):
    def combine(self, y):
        y.detach().abs().mean()
        return self.bn(y)


class Kept(Base):
    def combine(self, y):
        self.kept = y
        return self.bn(y)


class InPlace(Base):
    def combine(self, y):
        return self.bn(F.relu_(y))


class NoNorm(Base):
    def combine(self, y):
        return F.relu(y)


class Evaluating(Base):
    def combine(self, y):
        self.bn.eval()
        return self.bn(y)


class Cumulative(Base):
    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(CLASSES, momentum=None)

    def combine(self, y):
        return self.bn(y)


class Shared(Base):
    def combine(self, y):
        return self.bn(y) + self.bn(y * 2)


class Repeated(Base):
    def forward(self, x):
        return (self.bn(self.conv(x)) + self.conv(x)).mean((2, 3))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Twice, "outside its norm"),
        (Detached, "outside its norm"),
        (Kept, "kept after"),
        (InPlace, "no batch norm takes|outside"),
        (NoNorm, "no batch or instance norm"),
        (Evaluating, "evaluation mode"),
        (Cumulative, "cumulatively"),
        (Shared, "outside its norm"),
        (Repeated, "runs 2 times"),
    ],
)
def test_an_output_with_any_other_use_keeps_its_bias(model, reason) -> None:
    loop = make_loop(model=model, steps=1)
    match = ConvBiasBeforeNorm().match(loop.training, {})
    assert not match.applies
    assert any(part in match.unmatched[0] for part in reason.split("|")), match.unmatched


def test_compiled_training_keeps_the_running_mean() -> None:
    loop, plain = twins()
    expected = plain.run(3)
    ConvBiasBeforeNorm().apply(loop.training, {})
    ForwardStack.of(loop.model).set(
        CAPTURE, lambda inner, module: torch.compile(inner, backend="aot_eager", fullgraph=True)
    )
    torch.testing.assert_close(loop.run(3), expected, rtol=1e-5, atol=1e-6)
    for name in ("bn1.running_mean", "bn2.running_mean", "conv1.bias"):
        torch.testing.assert_close(values(loop)[name], values(plain)[name], rtol=1e-4, atol=1e-5)
    assert "left out already" in ConvBiasBeforeNorm().match(loop.training, {}).reason
    ForwardStack.of(plain.model).set(CAPTURE, lambda inner, module: inner)
    assert "compiled or captured" in ConvBiasBeforeNorm().match(plain.training, {}).reason


def test_switching_on_again_looks_no_second_time(monkeypatch) -> None:
    loop = make_loop()
    transform = ConvBiasBeforeNorm()
    transform.match(loop.training, {})
    monkeypatch.setattr(conv_bias, "replaying", None)
    undo = transform.apply(loop.training, {})
    first = loop.model.conv1.forward.composed
    undo.run()
    transform.apply(loop.training, {})
    assert loop.model.conv1.forward.composed is first
    transform.release(loop.training)
    assert loop.model not in conv_bias.found_pairs


class Once(Base):
    def combine(self, y):
        if self.kept:
            raise ValueError("only once")
        self.kept = True
        return self.bn(y)


def test_a_forward_that_cannot_run_again_is_left_alone() -> None:
    match = ConvBiasBeforeNorm().match(make_loop(model=Once, steps=1).training, {})
    assert "could not be run again" in match.reason


def test_hooks_and_subclasses_keep_their_bias() -> None:
    class Own(nn.Conv2d):
        pass

    class Net(ConvNet):
        def __init__(self) -> None:
            super().__init__()
            self.conv1 = Own(3, 8, 3, padding=1)

    loop = make_loop(model=Net)
    loop.model.conv2.register_forward_hook(lambda m, a, out: None)
    match = ConvBiasBeforeNorm().match(loop.training, {})
    assert not match.applies
    assert len(match.unmatched) == 2


def test_a_hook_of_the_script_is_not_called_once_more() -> None:
    """A hook that counts or collects would show the forward pass by which the pairs are found."""
    loop = make_loop()
    seen: list[int] = []
    loop.model.bn1.register_forward_hook(lambda m, a, out: seen.append(1))
    match = ConvBiasBeforeNorm().match(loop.training, {})
    assert not match.applies
    assert "the script's hook on bn1" in match.reason
    assert seen == []


def test_a_written_gradient_is_not_handed_out_again() -> None:
    loop = make_loop()
    ConvBiasBeforeNorm().apply(loop.training, {})
    loop.run(1)
    loop.model.conv1.bias.grad.add_(1.0)  # planted: gradient noise in the script
    loop.run(1)
    assert torch.count_nonzero(loop.model.conv1.bias.grad) == 0


def test_what_is_written_past_torchs_count_is_not_handed_out_again() -> None:
    loop, plain = twins()
    ConvBiasBeforeNorm().apply(loop.training, {})
    for twin in (loop, plain):

        def decay(optimizer, args, kwargs, twin=twin) -> None:
            for parameter in twin.model.parameters():
                parameter.grad.data.add_(parameter.data, alpha=0.1)

        twin.optimizer.register_step_pre_hook(decay)
    loop.run(1)
    kept = loop.model.conv1.bias.grad
    value = kept.clone()
    loop.run(3)
    plain.run(4)
    assert torch.equal(kept, value)
    torch.testing.assert_close(loop.model.conv1.bias.grad, plain.model.conv1.bias.grad, rtol=1e-4, atol=1e-6)


def test_a_capture_records_no_filling_of_zeros(monkeypatch) -> None:
    """It would be replayed in each forward, over what a gradient has become by then."""
    loop = make_loop()
    ConvBiasBeforeNorm().apply(loop.training, {})
    loop.model.zero_grad()
    monkeypatch.setattr(conv_bias, "is_captured", lambda bias: True)
    loop.model(next(loop.batches)[0])
    assert loop.model.conv1.bias.grad is None
    monkeypatch.undo()
    loop.model(next(loop.batches)[0])
    assert torch.count_nonzero(loop.model.conv1.bias.grad) == 0


def test_weight_decay_and_momentum_still_act_when_the_forward_is_not_python() -> None:
    loop = make_loop()
    ConvBiasBeforeNorm().apply(loop.training, {})
    loop.run(1)
    before = loop.model.conv1.bias.detach().clone()
    loop.model.conv1.bias.grad = None  # as after zero_grad with a captured forward
    loop.optimizer.step()
    assert not torch.equal(before, loop.model.conv1.bias)


def test_half_precision_and_two_forwards_before_backward() -> None:
    loop = make_loop()
    ConvBiasBeforeNorm().apply(loop.training, {})
    x = next(loop.batches)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = loop.model(x).float().sum() + loop.model(x + 1).float().sum()
    out.backward()
    assert torch.isfinite(loop.model.conv1.weight.grad).all()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("wrap", [nn.Identity(), Around, lambda held: torch.compile(held, backend="eager")])
def test_a_bias_whose_gradient_data_parallel_waits_for_stays(wrap: Callable[..., nn.Module]) -> None:
    loop = make_loop(model=lambda: wrap(nn.parallel.DistributedDataParallel(ConvNet())))
    match = ConvBiasBeforeNorm().match(loop.training, {})
    assert not match.applies
    assert "waits for its bias's gradient" in match.reason
    ConvBiasBeforeNorm().apply(loop.training, {})
    loop.run(2)


@pytest.mark.usefixtures("process_group")
def test_a_sharded_bias_stays() -> None:
    match = ConvBiasBeforeNorm().match(make_loop(model=sharded_net).training, {})
    assert not match.applies
    assert "its parameters are sharded" in match.reason


@pytest.mark.parametrize("tracking", [False, True])
def test_an_instance_norm_takes_the_bias_out_as_well(tracking: bool) -> None:
    class Styled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.next = nn.Conv2d(3, 8, 3), nn.Conv2d(8, CLASSES, 1)
            self.bn = nn.InstanceNorm2d(8, affine=True, track_running_stats=tracking)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.next(F.relu(self.bn(self.conv(x)))).mean((2, 3))

    loop, plain = twins(model=Styled)
    transform = ConvBiasBeforeNorm()
    match = transform.match(loop.training, {})
    assert match.sites == ("Styled.conv",)
    assert names(match.unmatched) == ["Styled.next"]
    undo = transform.apply(loop.training, {})
    with torch.no_grad():
        for net in (loop.model, plain.model):
            net.conv.bias.add_(torch.linspace(-1, 1, 8))
    torch.testing.assert_close(loop.run(3), plain.run(3), rtol=1e-5, atol=1e-6)
    assert_close(values(loop), values(plain), 1e-4)
    assert transform.effect(loop.training, None, None).passed
    assert torch.count_nonzero(loop.model.conv.bias.grad) == 0
    undo.run()
