import dataclasses
import math
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from clocks import Clock
from torch import nn

from advisor.core.findings import Semantics
from advisor.loop.training import RootModule, Training
from advisor.transforms.fused_optimizer import FusedOptimizer
from advisor.trials.numerics import appeal, bounds, plain, precision, replay
from advisor.trials.numerics.distance import Distance
from advisor.trials.numerics.gate import Gate
from advisor.trials.numerics.replay import AS_IT_WAS

torch.set_num_threads(1)


class Net(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.conv2, self.bn2 = nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.fc = nn.Linear(32 * 16, 10)
        self.dropout = dropout
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        x = F.dropout(x.flatten(1), self.dropout, self.training)
        return self.fc(x)


class Blurred(Net):
    """Its buffers are no ordinary tensors: one is expanded, one sparse."""

    def __init__(self, dropout=0.0):
        super().__init__(dropout)
        self.register_buffer("kernel", torch.full((1, 1, 3, 3), 1 / 9).expand(3, 1, 3, 3))
        self.register_buffer("rows", torch.eye(8).flip(0).to_sparse())

    def forward(self, x):
        x = torch.sparse.mm(self.rows, x.reshape(-1, 8).T).T.reshape(x.shape)
        return super().forward(F.conv2d(x, self.kernel, padding=1, groups=3))


class Embedded(Net):
    """A layer with sparse gradients."""

    def __init__(self, dropout=0.0):
        super().__init__(dropout)
        self.rows = nn.Embedding(1000, 8, sparse=True)

    def forward(self, x):
        rows = (10 * x[:, 0, 0, 0].detach().abs()).long()
        return super().forward(x * (1 + self.rows(rows)).view(-1, 1, 1, 8))


class Centred(Net):
    """Goes on from tensors that are no buffers, and leaves one for the loss."""

    def __init__(self, dropout=0.0):
        super().__init__(dropout)
        self.mean, self.total = torch.zeros(()), torch.zeros(3)

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean()
        self.total += x.mean((0, 2, 3))
        self.features = F.relu(x - self.mean + self.total.view(3, 1, 1))
        return super().forward(self.features)


class Counting(Net):
    """Counts the classes that it finds, and follows a mean in the complex plane."""

    def __init__(self, dropout=0.0):
        super().__init__(dropout)
        self.register_buffer("found", torch.zeros(10, dtype=torch.long))
        self.register_buffer("phase", torch.zeros(3, dtype=torch.cfloat))

    def forward(self, x):
        self.phase.mul_(0.9).add_(x.detach().mean((0, 2, 3)) * (0.1 + 0.2j))
        out = super().forward(x)
        self.found += torch.bincount(out.argmax(1), minlength=10)
        return out


class Keeping(Net):
    """Gives a buffer another tensor, fills lists of its own and of a hook's for the loss, adds up from None, draws from generators of its own."""

    def __init__(self, dropout=0.0):
        super().__init__(dropout)
        self.register_buffer("center", torch.zeros(3))
        self.parts, self.by_layer, self.total, self.hooked = [], {"bn1": []}, None, []
        self.torchs, self.pythons = torch.Generator().manual_seed(3), random.Random(3)
        self.numpys, self.older = np.random.default_rng(3), np.random.RandomState(3)
        hooked = self.hooked
        self.bn2.register_forward_hook(lambda module, args, output: hooked.append(output))

    def forward(self, x):
        self.center = 0.9 * self.center + 0.1 * x.detach().mean((0, 2, 3))
        drawn = torch.rand((), generator=self.torchs) + self.pythons.random() + self.numpys.random() + self.older.rand()
        x = x * drawn - self.center.view(3, 1, 1)
        self.parts.append(x.mean())
        self.by_layer["bn1"].append(x.mean())
        self.total = x.mean() if self.total is None else self.total + x.mean()
        return super().forward(x + sum(self.parts) + self.total)

    def step(self):
        """What the script does with them before it steps."""
        assert len(self.parts) == len(self.by_layer["bn1"]) == len(self.hooked) == 1
        self.total = None
        for filled in (self.parts, self.by_layer["bn1"], self.hooked):
            filled.clear()


class InFrequencySpace(Net):
    """A layer with complex weights."""

    def __init__(self, dropout=0.0):
        super().__init__(dropout)
        self.spectrum = nn.Parameter(1 + 0.1 * torch.randn(3, 8, 5, dtype=torch.cfloat))
        self.register_buffer("phase", torch.tensor(1j))

    def forward(self, x):
        return super().forward(torch.fft.irfft2(torch.fft.rfft2(x) * self.spectrum, s=x.shape[-2:]))


class Loop:
    """A training loop of one net, and a change that can be switched on and off in it."""

    def __init__(self, dropout=0.0, optimizer=torch.optim.SGD, kind=Net, **options):
        torch.manual_seed(0)
        self.net = kind(dropout)
        self.optimizer = optimizer(self.net.parameters(), lr=0.05, **options)
        self.training = Training(device=torch.device("cpu"), optimizers=[self.optimizer])
        self.root = RootModule(module=self.net, name="Net")
        self.training.roots.append(self.root)
        self.gate = Gate(self.training)
        self.is_on = False
        for _ in range(3):
            self.step()
        self.gate.arm()
        self.step(capture=True)
        assert self.gate.captured()

    def step(self, capture=False):
        x, y = torch.randn(16, 3, 8, 8), torch.randint(0, 10, (16,))
        out = self.net(x)
        out.retain_grad()
        loss = F.cross_entropy(out, y)
        self.optimizer.zero_grad()
        loss.backward()
        if isinstance(self.net, Keeping):
            self.net.step()
        self.optimizer.step()
        if capture:
            self.root.args, self.root.kwargs, self.root.output = (x,), {}, out
            self.root.output_grads = (out.grad.clone(),)

    def snapshot(self):
        tensors = [*self.net.parameters(), *self.net.buffers(), *(p.grad for p in self.net.parameters())]
        tensors += [v for s in self.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        return [t.detach().clone() for t in tensors], torch.get_rng_state(), random.getstate(), self.net.calls

    def judge(self, change, semantics=Semantics.REASSOCIATED, **options):
        def on():
            self.is_on = True
            self.net.__dict__["forward"] = change(type(self.net).forward.__get__(self.net))

        def off():
            self.is_on = False
            self.net.__dict__.pop("forward", None)

        return self.gate.judge(on, off, semantics, **options).check


@pytest.fixture
def loop():
    return Loop()


def same(forward):
    return forward


def wrong_element(forward):
    def changed(x):
        out = forward(x).clone()
        out[3, 2] = out[3, 2] + 0.5
        return out

    return changed


class ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


def wrong_gradient(forward):
    return lambda x: ScaledGradient.apply(forward(x), 1.3)


def nan_output(forward):
    def changed(x):
        out = forward(x)
        return out * torch.where(torch.arange(10) == 4, float("nan"), 1.0)

    return changed


def nan_gradient(forward):
    return lambda x: ScaledGradient.apply(forward(x), float("nan"))


def stale_output(forward):
    held = []

    def changed(x):
        if not held:
            held.append(x.clone())
        return forward(held[0])  # computes on the batch it has seen first

    return changed


def stale_after_a_while(forward):
    held = []

    def changed(x):
        held.append(x.clone())
        return forward(x if len(held) <= 3 else held[1])

    return changed


def missing_buffer_update(forward):
    net = forward.__self__

    def changed(x):
        before = net.bn2.running_mean.clone(), net.bn2.running_var.clone()
        out = forward(x)
        net.bn2.running_mean.data.copy_(before[0])
        net.bn2.running_var.data.copy_(before[1])
        return out

    return changed


def missing_counter(forward):
    net = forward.__self__

    def changed(x):
        out = forward(x)
        net.bn1.num_batches_tracked -= 1
        return out

    return changed


def missing_replacement(forward):
    """The tensor that the forward puts in a buffer's place is not what it should be."""
    net = forward.__self__

    def changed(x):
        out = forward(x)
        net.center = net.center.clone().fill_(0.5)
        return out

    return changed


def test_a_buffer_that_the_step_replaces_is_compared():
    assert Loop(kind=Keeping).judge(missing_replacement).passed is False


@pytest.mark.parametrize("semantics", list(Semantics)[:3])
@pytest.mark.parametrize("name", ["found", "phase"])
def test_a_buffer_of_any_numbers_that_is_not_updated_is_found(name, semantics):
    def lost(forward):
        buffer = getattr(forward.__self__, name)

        def changed(x):
            before = buffer.clone()
            out = forward(x)
            buffer.copy_(before)
            return out

        return changed

    check = Loop(kind=Counting).judge(lost, semantics)
    assert check.passed is False, check


def no_gradient_for_a_layer(forward):
    net = forward.__self__

    def changed(x):
        net.fc.weight.requires_grad_(False)
        try:
            return forward(x)
        finally:
            net.fc.weight.requires_grad_(True)

    return changed


def other_dtype(forward):
    return lambda x: forward(x).double()


def other_structure(forward):
    return lambda x: (forward(x),)


FAULTS = [
    wrong_element, wrong_gradient, nan_output, nan_gradient, stale_output, stale_after_a_while, missing_buffer_update,
    missing_counter, no_gradient_for_a_layer, other_dtype, other_structure,
]  # fmt: skip


@pytest.mark.parametrize("semantics", [Semantics.EXACT, Semantics.REASSOCIATED, Semantics.PRECISION])
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_rejected(loop, fault, semantics):
    if fault is wrong_element and semantics is Semantics.PRECISION:
        pytest.skip("half an output's scale off in one element is within what bf16 may do to it")
    check = loop.judge(fault, semantics)
    assert check.passed is False, check


@pytest.mark.parametrize("semantics", list(Semantics)[:3])
def test_no_change_passes_in_every_class(loop, semantics):
    check = loop.judge(same, semantics)
    assert check.passed is True, check


def reordered(forward):
    net = forward.__self__

    def changed(x):  # the same maths in another order, and channels last
        x = x.contiguous(memory_format=torch.channels_last)
        halves = [
            F.conv2d(x, w, b, padding=1)
            for w, b in zip(net.conv1.weight.split(8), net.conv1.bias.split(8), strict=True)
        ]
        net.calls += 1
        x = F.relu(net.bn1(torch.cat(halves, 1)))
        x = F.max_pool2d(F.relu(net.bn2(net.conv2(x))), 2)
        return net.fc(F.dropout(x.flatten(1), net.dropout, net.training))

    return changed


class ConjugateGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.conj()


def wrong_phase(forward):
    net = forward.__self__

    def changed(x):  # the same values, and of the complex weights the conjugate gradient
        spectrum = torch.fft.rfft2(x) * ConjugateGradient.apply(net.spectrum)
        return Net.forward(net, torch.fft.irfft2(spectrum, s=x.shape[-2:]))

    return changed


def test_complex_gradients_are_compared_in_both_parts():
    check = Loop(kind=InFrequencySpace).judge(wrong_phase)
    assert check.passed is False, check


def test_complex_outputs_are_replayed():
    gradient = torch.randn(4, 3, dtype=torch.cfloat)
    like = replay.random_like(gradient)
    assert like.dtype == gradient.dtype
    assert float(like.real.std()) > 0
    assert float(like.imag.std()) > 0
    moved = replay.jittered(gradient.conj(), 2.0**-9, torch.Generator().manual_seed(1))
    assert 0 < float((moved - gradient.conj()).abs().max()) < 0.05


@pytest.mark.parametrize("kind", [Blurred, Embedded, Centred, Counting, Keeping, InFrequencySpace])
def test_no_kind_of_tensor_is_in_the_way(kind):
    for semantics in list(Semantics)[:3]:
        assert Loop(kind=kind).judge(same, semantics).passed is True
    check = Loop(kind=kind).judge(wrong_gradient)
    assert check.passed is False, check


def test_another_order_is_reassociation_and_not_exact():
    assert Loop().judge(reordered, Semantics.REASSOCIATED).passed is True

    def nudged(forward):
        return lambda x: forward(x * (1 + 1e-6))

    assert Loop().judge(nudged, Semantics.EXACT).passed is False


def autocast(forward):
    def changed(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = forward(x)
        return out.float()

    return changed


def frozen(name):
    def change(forward):
        parameter = forward.__self__.get_parameter(name)

        def changed(x):
            parameter.requires_grad_(False)
            try:
                return forward(x)
            finally:
                parameter.requires_grad_(True)

        return changed

    return change


def negated(name):
    def change(forward):
        owner, leaf = forward.__self__.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]

        def changed(x):
            parameter = owner._parameters.pop(leaf)
            object.__setattr__(owner, leaf, 2 * parameter.detach() - parameter)
            try:
                return forward(x)
            finally:
                del owner.__dict__[leaf]
                owner._parameters[leaf] = parameter

        return changed

    return change


@pytest.mark.parametrize("fault", [frozen, negated])
@pytest.mark.parametrize("name", ["bn1.weight", "bn1.bias", "bn2.weight", "bn2.bias", "fc.bias"])
def test_one_small_parameter_counts_where_the_loop_computes_in_half_precision(fault, name):
    check = Loop().judge(fault(name), computes_in="half")
    assert check.passed is False, check
    check = Loop().judge(lambda forward: autocast(fault(name)(forward)), Semantics.PRECISION)
    assert check.passed is False, check


def test_bf16_is_a_precision_change_and_no_reassociation():
    assert Loop().judge(autocast, Semantics.PRECISION).passed is True
    assert Loop().judge(autocast, Semantics.REASSOCIATED).passed is False


def half_the_bits_lost_twice(forward):
    return lambda x: autocast(forward)(x) + 0.2 * torch.randn(16, 10)


def test_bf16_with_noise_on_top_is_rejected():
    assert Loop().judge(half_the_bits_lost_twice, Semantics.PRECISION).passed is False


def drawn_anew(draws):
    """A change under which dropout draws other numbers, as on a GPU under another dtype, or by kernels in another order."""

    def change(forward):
        def changed(x):
            torch.rand(draws)
            return forward(x)

        return changed

    return change


def no_dropout(forward):
    net = forward.__self__

    def changed(x):
        kept, net.dropout = net.dropout, 0.0
        try:
            return forward(x)
        finally:
            net.dropout = kept

    return changed


def same_mask(forward):
    def changed(x):
        state = torch.get_rng_state()
        torch.manual_seed(5)
        try:
            return forward(x)
        finally:
            torch.set_rng_state(state)

    return changed


def mask_of_the_capture(forward):
    """The mask of the state that a graph was captured in: in the gate's other replays it is the right one."""
    held = []

    def changed(x):
        held.append(torch.get_rng_state())
        torch.set_rng_state(held[0])
        return forward(x)

    return changed


@pytest.mark.parametrize("semantics", list(Semantics)[:3])
@pytest.mark.parametrize("fault", [no_dropout, same_mask, mask_of_the_capture])
def test_dropout_that_is_off_or_always_the_same_is_rejected(fault, semantics):
    check = Loop(dropout=0.3).judge(fault, semantics)
    assert check.passed is False, check


def test_dropout_with_other_random_numbers_is_compared_in_distribution():
    assert Loop(dropout=0.3).judge(drawn_anew(7)).passed is True
    assert Loop(dropout=0.3).judge(same).passed is True
    assert Loop(dropout=0.3).judge(lambda forward: lambda x: 3.0 * no_dropout(forward)(x)).passed is False


class SometimesLeftOut(Net):
    """A layer is left out in one step of five: two draws are often alike."""

    def forward(self, x):
        kept = torch.rand(()) < 0.8
        return super().forward(torch.where(kept, x, 0.9 * x))


class LeftOutByPython(Net):
    """A block is left out in every other step, by Python's, NumPy's or PyTorch's random numbers: then its layers have no gradients."""

    def __init__(self, dropout=0.0, draw=random.random):
        super().__init__(dropout)
        self.wide, self.narrow, self.draw = nn.Conv2d(3, 64, 3, padding=1), nn.Conv2d(64, 3, 3, padding=1), draw

    def forward(self, x):
        return super().forward(x + self.narrow(F.relu(self.wide(x))) if float(self.draw()) < 0.5 else x)


def draw_of_the_capture(forward):
    """As `mask_of_the_capture`, of what Python decides: a CUDA graph runs no Python."""
    held = []

    def changed(x):
        held.append((torch.get_rng_state(), random.getstate(), np.random.get_state()))
        for put, state in zip((torch.set_rng_state, random.setstate, np.random.set_state), held[0], strict=True):
            put(state)
        return forward(x)

    return changed


@pytest.mark.parametrize("state", range(4))
@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: torch.rand(())])
def test_a_layer_that_is_left_out_now_and_then_stays_so(draw, state):
    for change, passes in ((same, True), (draw_of_the_capture, False)):
        loop = Loop(kind=lambda dropout: LeftOutByPython(dropout, draw))
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(state)
        check = loop.judge(change)
        assert check.passed is passes, check


@pytest.mark.parametrize("state", range(8))
def test_draws_that_are_alike_by_chance_do_not_make_a_change_wrong(state):
    loop = Loop(kind=SometimesLeftOut)
    torch.manual_seed(state)
    assert loop.judge(same).passed is True


class Classifier(nn.Module):
    """What of a VGG draws: two dropouts behind convolutions, whose gradients hang on what they leave of few rows."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(4),
        )
        self.head = nn.Sequential(
            nn.Linear(32 * 4, 64),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(64, 64),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(64, 20),
        )

    def forward(self, x):
        return self.head(self.features(x).flatten(1))


def test_one_more_draw_of_dropout_is_no_fault_in_a_training_under_way():
    torch.manual_seed(0)
    net = Classifier()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.randn(16, 3, 16, 16), torch.randint(20, (16,))
    root = RootModule(module=net, name="Classifier")
    training = Training(device=torch.device("cpu"), optimizers=[optimizer], roots=[root])
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    verdicts = []
    for draws in range(1, 21):
        gate = Gate(training)
        gate.arm()
        out = net(x)
        out.retain_grad()
        F.cross_entropy(out, y).backward()
        root.args, root.output, root.output_grads = (x,), out, (out.grad.clone(),)
        assert gate.captured()
        changed = drawn_anew(draws)(net.forward)
        judged = gate.judge(
            lambda f=changed: setattr(net, "forward", f), lambda: net.__dict__.pop("forward", None), Semantics.PRECISION
        )
        net.__dict__.pop("forward", None)
        verdicts.append(judged.check)
    assert sum(check.passed is not True for check in verdicts) <= 1, [check.detail for check in verdicts]


@pytest.mark.parametrize("change", [same, wrong_gradient, stale_output, autocast])
def test_the_training_is_left_as_it_was(change):
    loop = Loop(dropout=0.2, momentum=0.9)
    before = loop.snapshot()
    loop.judge(change)
    after = loop.snapshot()
    assert all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True))
    assert torch.equal(before[1], after[1])
    assert before[2:] == after[2:]
    assert loop.is_on


@pytest.mark.parametrize("kind", [Net, Centred, Keeping])
def test_the_next_steps_are_bit_equal_with_and_without_a_gate(kind):
    first, second = Loop(momentum=0.9, kind=kind), Loop(momentum=0.9, kind=kind)
    second.judge(same)
    for loop in (first, second):
        torch.manual_seed(5)
        for _ in range(3):
            loop.step()
    assert all(torch.equal(a, b) for a, b in zip(first.net.parameters(), second.net.parameters(), strict=True))


def test_a_change_that_raises_leaves_the_state():
    loop = Loop()
    before = loop.snapshot()

    def broken(forward):
        def changed(x):
            loop.net.bn1.running_mean.add_(1.0)
            raise RuntimeError("out of memory")

        return changed

    with pytest.raises(RuntimeError, match="out of memory"):
        loop.judge(broken)
    assert all(torch.equal(a, b) for a, b in zip(before[0], loop.snapshot()[0], strict=True))


def test_a_change_that_writes_parameters_on_the_way_is_put_back_or_named(loop):
    def replaced(forward):
        net = forward.__self__

        def changed(x):
            net.fc.bias = nn.Parameter(net.fc.bias.detach().clone())
            return forward(x)

        return changed

    check = loop.judge(replaced)
    assert check.passed is False


class OptimizerChange:
    """Another optimizer step, switched through the instance attribute as transforms do."""

    def __init__(self, loop, step):
        self.loop, self.new = loop, step

    def on(self):
        self.loop.optimizer.__dict__["step"] = self.new

    def off(self):
        self.loop.optimizer.__dict__.pop("step", None)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_optimizer_changes_are_compared_by_one_update(optimizer):
    options = {"momentum": 0.9} if optimizer is torch.optim.SGD else {}
    loop = Loop(optimizer=optimizer, **options)
    before = loop.snapshot()
    plain = type(loop.optimizer).step

    change = OptimizerChange(loop, lambda: plain(loop.optimizer))
    assert loop.gate.judge(change.on, change.off, Semantics.REASSOCIATED).check.passed is True

    def half_lr():
        for group in loop.optimizer.param_groups:
            group["lr"] *= 0.5
        plain(loop.optimizer)
        for group in loop.optimizer.param_groups:
            group["lr"] *= 2.0

    wrong = OptimizerChange(loop, half_lr)
    check = loop.gate.judge(wrong.on, wrong.off, Semantics.REASSOCIATED).check
    assert check.passed is False
    assert "update" in check.detail
    after = loop.snapshot()
    assert all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True))


def without_its_state(optimizer, plain):
    """Reads the state and never moves it."""

    def step():
        before = [(v, v.clone()) for state in optimizer.state.values() for v in state.values()]
        plain(optimizer)
        for value, old in before:
            value.copy_(old)

    return step


def without_its_second_moment(optimizer, plain):
    def step():
        names = ("exp_avg_sq", "momentum_buffer")
        before = [(v, v.clone()) for state in optimizer.state.values() for k, v in state.items() if k in names]
        plain(optimizer)
        for value, old in before:
            value.copy_(old)

    return step


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("semantics", [Semantics.EXACT, Semantics.REASSOCIATED])
@pytest.mark.parametrize("fault", [without_its_state, without_its_second_moment])
def test_what_an_optimizer_leaves_out_is_found(fault, semantics, optimizer):
    options = {"momentum": 0.9} if optimizer is torch.optim.SGD else {}
    loop = Loop(optimizer=optimizer, **options)
    before = loop.snapshot()
    change = OptimizerChange(loop, fault(loop.optimizer, type(loop.optimizer).step))
    check = loop.gate.judge(change.on, change.off, semantics).check
    assert check.passed is False, check
    assert check.detail.startswith(optimizer.__name__)
    assert all(torch.equal(a, b) for a, b in zip(before[0], loop.snapshot()[0], strict=True))


def test_a_parameter_that_is_left_out_is_found_however_little_of_the_update_it_is():
    loop = Loop()
    bias = loop.net.fc.bias
    rest = [p.grad for p in loop.net.parameters() if p is not bias]
    mean = math.sqrt(sum(float((g**2).sum()) for g in rest) / sum(g.numel() for g in rest))
    bias.grad.fill_(0.02 * mean)  # six ten-thousandths of the whole

    def step():
        gradient, bias.grad = bias.grad, None
        torch.optim.SGD.step(loop.optimizer)
        bias.grad = gradient

    change = OptimizerChange(loop, step)
    check = loop.gate.judge(change.on, change.off, Semantics.REASSOCIATED).check
    assert check.passed is False, check
    assert "update of one parameter (10)" in check.detail


SGD, ADAM, ADAMW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (SGD, {}),
        (SGD, {"momentum": 0.9, "weight_decay": 1e-4}),
        (SGD, {"momentum": 0.9, "nesterov": True}),
        (SGD, {"momentum": 0.9, "maximize": True, "dampening": 0.1}),
        (ADAM, {"weight_decay": 0.01}),
        (ADAM, {"amsgrad": True, "maximize": True}),
        (ADAMW, {"betas": (0.9, 0.9999)}),
        (ADAMW, {"amsgrad": True, "weight_decay": 0.1}),
    ],
)
def test_a_fused_optimizer_passes(optimizer, options, steps):
    loop = Loop(optimizer=optimizer, **options)
    if not steps:
        loop.optimizer.state.clear()
    undo = []
    transform = FusedOptimizer()
    assert transform.match(loop.training, {}).applies
    loop_state = loop.snapshot()[0]

    def on():
        undo.append(transform.apply(loop.training, {}))

    check = loop.gate.judge(on, lambda: undo.pop().run(), Semantics.REASSOCIATED).check
    assert check.passed is True, check
    undo.pop().run()
    assert all(torch.equal(a, b) for a, b in zip(loop_state, loop.snapshot()[0], strict=True))


def test_parameters_that_update_in_backward_cannot_be_replayed():
    loop = Loop()
    hook = loop.net.fc.weight.register_post_accumulate_grad_hook(lambda p: None)
    check = loop.judge(same)
    hook.remove()
    assert check.passed is None


def test_a_plain_step_with_nan_says_so():
    loop = Loop()
    loop.gate._calls[0].grads[0][0, 0] = float("nan")
    assert loop.judge(same).passed is None


@pytest.mark.parametrize("slow", [[1.0], [0.0, 0.0, 0.0, 1.0], [0.5, 0.0, 0.0, 0.5]])
def test_replays_tell_what_switching_on_costs(loop, slow, monkeypatch):
    """In the first of them, as a compiler, or in a later one, as a graph's capture. Counted once."""
    clock, waits = Clock(), slow[::-1]
    monkeypatch.setattr(replay, "time", clock)

    def on():
        plain = type(loop.net).forward.__get__(loop.net)
        loop.net.__dict__["forward"] = lambda x: (clock.sleep(waits.pop() if waits else 0.0), plain(x))[1]

    assert loop.gate.judge(on, lambda: None, Semantics.REASSOCIATED).first_us == pytest.approx(1e6)
    assert not waits


EDGE = 3e4  # in roundings of the products: a few of the 2048 activations are as near to zero as one


class Knife(nn.Module):
    """Some activations are within some roundings of zero, so that another order of sums lets other gradients through."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 128))
        self.register_buffer("edge", torch.zeros(16, 128))

    def forward(self, x):
        return F.relu(x @ self.weight - self.edge)


class OnEdge(Loop):
    def __init__(self):
        torch.manual_seed(0)
        self.net = Knife()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.0)
        self.training = Training(device=torch.device("cpu"), optimizers=[self.optimizer])
        self.root = RootModule(module=self.net, name="Knife")
        self.training.roots.append(self.root)
        self.gate = Gate(self.training)
        self.is_on = False
        x = torch.randn(16, 64)
        with torch.no_grad():
            sums = x @ self.net.weight
            self.net.edge.copy_(sums + EDGE * 2.0**-24 * torch.randn(16, 128))
        self.gate.arm()
        out = self.net(x)
        self.root.args, self.root.kwargs, self.root.output = (x,), {}, out
        self.root.output_grads = (torch.randn(16, 128),)
        assert self.gate.captured()


def moved_by(roundings):
    """The products off by so many roundings of their size, as another order of summation leaves them."""

    def change(forward):
        net = forward.__self__
        noise = torch.randn(16, 128, generator=torch.Generator().manual_seed(1))

        def changed(x):
            return F.relu(x @ net.weight + roundings * 8 * 2.0**-24 * noise - net.edge)

        return changed

    return change


def test_activations_at_the_edge_of_zero_do_not_make_another_order_wrong(monkeypatch):
    assert OnEdge().judge(moved_by(24)).passed
    monkeypatch.setattr(appeal, "LAYERED_SEEDS", ())
    assert not OnEdge().judge(moved_by(24)).passed  # what one rounding at the start shows is not enough
    monkeypatch.undo()
    assert not OnEdge().judge(wrong_gradient).passed
    assert not OnEdge().judge(moved_by(1e4)).passed


class OneOnEdge(OnEdge):
    """One activation of 2048 is at zero, all others are far from it."""

    def __init__(self):
        super().__init__()
        (x,) = self.root.args
        with torch.no_grad():
            sums = x @ self.net.weight
            self.net.edge.copy_(sums + torch.where(torch.rand_like(sums) < 0.5, -1.0, 1.0))
            self.net.edge[3, 5] = sums[3, 5] + 1e-5


def one_let_through(forward):
    """The activation at zero is a few roundings higher: right, and its gradient comes through."""
    net = forward.__self__
    higher = torch.zeros(16, 128)
    higher[3, 5] = 2e-5
    return lambda x: F.relu(x @ net.weight - net.edge + higher)


def slightly_wrong_gradient(forward):
    return lambda x: ScaledGradient.apply(one_let_through(forward)(x), 1.01)


def wrong_output(forward):
    return lambda x: one_let_through(forward)(x) * 1.001


def wrong_gradient_now_and_then(forward):
    calls = [0]

    def changed(x):
        calls[0] += 1
        return ScaledGradient.apply(forward(x), 1.05 if calls[0] % 2 else 1.0)

    return changed


def test_what_hangs_on_one_activation_is_judged_at_points_close_by(monkeypatch):
    monkeypatch.setattr(appeal, "LAYERED_SEEDS", ())  # six draws may miss it
    check = OneOnEdge().judge(one_let_through)
    assert check.passed, check
    assert "4 of 4 points close by" in check.detail
    for wrong in (slightly_wrong_gradient, wrong_gradient, wrong_output, wrong_gradient_now_and_then, stale_output):
        assert not OneOnEdge().judge(wrong).passed, wrong
    monkeypatch.setattr(appeal, "CLOSE_SEEDS", ())
    assert not OneOnEdge().judge(one_let_through).passed


class KnifeOfRows(Knife):
    def forward(self, x, edge):
        return F.relu(x @ self.weight - edge)


class RowsOnEdge(OnEdge):
    """As `OnEdge`, but what is near zero goes with its row when rows change places."""

    def __init__(self):
        super().__init__()
        self.net.__class__ = KnifeOfRows
        edge = self.net.edge.clone()
        self.gate.arm()
        (x,) = self.root.args
        out = self.net(x, edge)
        self.root.args, self.root.output, self.root.output_grads = (x, edge), out, (torch.randn(16, 128),)
        assert self.gate.captured()


def test_noise_is_looked_for_in_both_orders_of_the_rows(monkeypatch):
    """What is seen with the rows rolled counts, and is enough where nothing is seen on the batch as it was."""
    monkeypatch.setattr(appeal, "CLOSE_SEEDS", ())
    replayed = plain.replay

    def replay(call, saved, how=AS_IT_WAS, **options):
        quiet = how.jitter > precision.EPSILON["fp32"] and not how.rolled
        return replayed(call, saved, dataclasses.replace(how, jitter=0.0) if quiet else how, **options)

    def moved(forward):
        net = forward.__self__
        noise = torch.randn(16, 128, generator=torch.Generator().manual_seed(1))
        return lambda x, edge: F.relu(x @ net.weight + 24 * 8 * 2.0**-24 * noise - edge)

    monkeypatch.setattr(plain, "replay", replay)
    assert RowsOnEdge().judge(moved).passed


class Offset(nn.Module):
    def forward(self, x):
        return x + 16.0


class FarFromZero(nn.Module):
    """Values of many times their spread, as after a ReLU: what rounding loses shows when the mean is taken away."""

    def __init__(self):
        super().__init__()
        self.first, self.offset, self.norm = nn.Linear(64, 128, bias=False), Offset(), nn.LayerNorm(128)
        self.last = nn.Linear(128, 128, bias=False)

    def forward(self, x):
        return self.last(self.norm(self.offset(self.first(x))))


class LoopFarFromZero(Loop):
    def __init__(self):
        torch.manual_seed(0)
        self.net = FarFromZero()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05)
        self.training = Training(device=torch.device("cpu"), optimizers=[self.optimizer])
        self.root = RootModule(module=self.net, name="FarFromZero", args=(torch.randn(256, 64),))
        self.training.roots.append(self.root)
        self.gate = Gate(self.training)
        self.gate.arm()
        self.root.output = self.net(*self.root.args)
        self.root.output_grads = (torch.randn(256, 128),)
        assert self.gate.captured()


def wrong_gradient_in_bf16(forward):
    return lambda x: ScaledGradient.apply(autocast(forward)(x), 1.3)


def test_what_rounding_every_layer_costs_does_not_make_bf16_wrong(monkeypatch):
    assert LoopFarFromZero().judge(autocast, Semantics.PRECISION).passed
    assert not LoopFarFromZero().judge(wrong_gradient_in_bf16, Semantics.PRECISION).passed
    assert not LoopFarFromZero().judge(lambda forward: lambda x: 1.5 * autocast(forward)(x), Semantics.PRECISION).passed
    assert not LoopFarFromZero().judge(autocast, Semantics.REASSOCIATED).passed
    monkeypatch.setattr(appeal, "ROUNDED_FACTOR", 0.0)
    assert (
        not LoopFarFromZero().judge(autocast, Semantics.PRECISION).passed
    )  # what moving weights once shows is not enough


def converged():
    """A loop whose running statistics are those of the batch it goes on seeing, all but a trace."""
    loop = Loop()
    x = loop.root.args[0]
    saved = {name: value.clone() for name, value in loop.net.named_parameters()}
    with torch.no_grad():
        for _ in range(150):
            loop.net(x)
        for name, value in loop.net.named_parameters():
            assert torch.equal(value, saved[name])
    return loop


def test_statistics_that_have_converged_on_their_batch_do_not_make_bf16_wrong():
    check = converged().judge(autocast, Semantics.PRECISION, precision="half")
    assert check.passed, check.detail


def test_statistics_of_another_batch_are_wrong_however_far_they_have_converged():
    loop = converged()

    def too_wide(forward):
        """Counts every value 1.5 times as far from zero in the second norm's statistics."""
        halved = autocast(forward)

        def changed(x):
            before = loop.net.bn2.running_var.clone()
            out = halved(x)
            loop.net.bn2.running_var.data.add_(1.25 * loop.net.bn2.momentum * before)
            return out

        return changed

    check = loop.judge(too_wide, Semantics.PRECISION, precision="half")
    assert check.passed is False
    assert "bn2" in check.detail


@pytest.mark.parametrize(
    ("draw", "error", "passes"),
    [(1.44, 1.99, True), (1.44, 2.2, False), (0.3, 1.4, True), (0.3, 1.6, False), (0.1, 0.95, False)],
)
def test_where_rounding_leaves_no_direction_a_change_may_be_as_far_as_draws_are(draw, error, passes):
    def off(by):
        return Distance(l2={"gradient of fc1.weight": by})

    ratio, group, _ = bounds.worst_ratio(off(error), [off(0.5 * draw), off(draw)], "half")
    assert group == "gradient of fc1.weight"
    assert (ratio <= 1.0) is passes
