"""Mixed precision around the roots, and fp16's loss scaling. On a CPU it is slow but true."""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import dataclass

import pytest
import torch
from loops import ConvNet, assert_equal, check_undo_is_exact, make_loop, twins, values
from torch import nn
from torch.utils.checkpoint import checkpoint

from advisor.core.profile import KernelRow
from advisor.loop import ranks
from advisor.transforms import scaling
from advisor.transforms.autocast import AutocastBf16, AutocastFp16
from advisor.transforms.base import Undo
from advisor.transforms.fused_optimizer import FusedOptimizer

ANYWAY = {"cpu": "always"}
BOTH = pytest.mark.parametrize("transform", [AutocastBf16(), AutocastFp16()], ids=["bf16", "fp16"])


@BOTH
def test_training_is_close_and_outputs_stay_fp32(transform) -> None:
    loop, plain = twins()
    assert transform.match(loop.training, ANYWAY).applies
    expected = plain.run(4)
    transform.apply(loop.training, ANYWAY)
    seen = []
    loop.model.conv1.register_forward_hook(lambda m, a, out: seen.append(out.dtype))
    losses = loop.run(4)
    assert set(seen) == {transform.dtype}
    assert loop.training.roots[0].output.dtype == torch.float32
    torch.testing.assert_close(losses, expected, rtol=0.05, atol=0.02)
    assert losses != expected
    assert all(p.dtype == torch.float32 and p.grad.dtype == torch.float32 for p in loop.model.parameters())
    assert transform.effect(loop.training, None, None).passed


@dataclass(frozen=True)
class Logits:
    values: torch.Tensor
    names: tuple[str, ...] = ("a", "b")


def test_outputs_in_a_dataclass_stay_fp32() -> None:
    loop = make_loop(steps=0)
    plain = type(loop.model).forward
    loop.model.__class__ = type("Named", (type(loop.model),), {"forward": lambda self, x: Logits(plain(self, x))})
    AutocastBf16().apply(loop.training, ANYWAY)
    found = loop.model(next(loop.batches)[0])
    assert (type(found), found.values.dtype, found.names) == (Logits, torch.float32, ("a", "b"))


@BOTH
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_undo_is_exact(transform, optimizer) -> None:
    loop, plain = twins(optimizer=optimizer)
    check_undo_is_exact(transform, loop, plain, ANYWAY)
    assert transform.effect(loop.training, None, None).passed is False


class ScriptAutocast(ConvNet):
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x).float()


@BOTH
def test_it_refuses_what_has_mixed_precision_already(transform) -> None:
    assert "casts its weights already" in transform.match(make_loop(model=ScriptAutocast).training, ANYWAY).reason
    loop = make_loop(model=lambda: ConvNet().bfloat16(), steps=0)
    assert "bfloat16" in transform.match(loop.training, ANYWAY).reason
    loop = make_loop()
    loop.training.scalers.append(object())
    assert "GradScaler" in transform.match(loop.training, ANYWAY).reason


def test_fp16_can_still_be_tried_where_bf16_stands() -> None:
    loop = make_loop()
    undo = AutocastBf16().apply(loop.training, ANYWAY)
    loop.run(1)
    assert "applied already" in AutocastBf16().match(loop.training, ANYWAY).reason
    assert AutocastFp16().match(loop.training, ANYWAY).applies
    undo.run()
    AutocastFp16().apply(loop.training, ANYWAY)  # with bf16 casts still in the graph of the last output
    assert AutocastFp16().effect(loop.training, None, None).passed


def test_data_parallel_over_one_device_is_seen_through() -> None:
    loop = make_loop()
    inner, wrapped = loop.model, nn.DataParallel(loop.model, device_ids=None)
    wrapped.device_ids = [0]
    loop.training.roots[0].module = wrapped
    AutocastBf16().apply(loop.training, ANYWAY)
    assert "forward" in vars(inner)
    assert "forward" not in vars(wrapped)


def test_a_script_that_enters_autocast_itself_keeps_its_own() -> None:
    loop = make_loop()
    AutocastBf16().apply(loop.training, {})
    x = next(loop.batches)[0]
    with torch.autocast("cpu", dtype=torch.float16):
        assert loop.model(x).dtype == torch.float16
    check = AutocastBf16().effect(loop.training, None, None)
    assert check.passed is False
    assert "own autocast" in check.detail


def test_it_refuses_bce_and_slow_cpus(monkeypatch) -> None:
    class Bad(ConvNet):
        def __init__(self) -> None:
            super().__init__()
            self.loss = nn.BCELoss()

    assert "BCELoss" in AutocastBf16().match(make_loop(model=Bad).training, ANYWAY).reason
    monkeypatch.setattr("advisor.transforms.autocast._cpu_has_bf16", lambda: False)
    assert "bf16 instructions" in AutocastBf16().match(make_loop().training, {}).reason
    assert "GPUs" in AutocastFp16().match(make_loop().training, {}).reason


def test_nested_outputs_come_back_as_fp32() -> None:
    class Dictionary(ConvNet):
        def forward(self, x):
            out = super().forward(x)
            return {"out": out, "aux": (out * 2, [out.argmax(1)])}

    model = Dictionary()
    loop = make_loop(steps=0)
    loop.training.roots[0].module = model
    AutocastBf16().apply(loop.training, {})
    result = model(next(loop.batches)[0])
    assert result["out"].dtype == result["aux"][0].dtype == torch.float32
    assert result["aux"][1][0].dtype == torch.int64


def test_effect_reads_the_trace(profile) -> None:
    loop = make_loop()
    transform = AutocastBf16()
    transform.apply(loop.training, {})
    fp32 = profile(KernelRow(name="k", kind="conv", dtype="fp32", time_us=5))
    bf16 = profile(KernelRow(name="k", kind="conv", dtype="bf16", time_us=5))
    assert transform.effect(loop.training, fp32, fp32).passed is False
    assert transform.effect(loop.training, fp32, bf16).passed is True


# ---- loss scaling: planted on fp32 models, where scaling must be invisible bit for bit


def scaled_only(monkeypatch) -> AutocastFp16:
    monkeypatch.setattr(AutocastFp16, "dtype", torch.float32)
    monkeypatch.setattr("advisor.transforms.autocast._layer", lambda *a: lambda inner, module: inner)
    return AutocastFp16()


@pytest.mark.parametrize("fused", [False, True])
def test_scaling_is_bit_exact_in_fp32(monkeypatch, fused) -> None:
    loop, plain = twins()
    if fused:
        FusedOptimizer().apply(loop.training, {})
        FusedOptimizer().apply(plain.training, {})
    expected = plain.run(3)
    scaled_only(monkeypatch).apply(loop.training, {})
    seen: list[float] = []
    loop.model.register_forward_hook(
        lambda m, a, out: out.register_hook(lambda g: seen.append(g.abs().max().item())) and None
    )
    assert loop.run(3) == expected
    assert min(seen) > 100  # the gradient at the output is scaled
    assert_equal(values(loop), values(plain))
    for ours, theirs in zip(loop.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    assert not hasattr(loop.optimizer, "found_inf")


def test_accumulation_clipping_and_inspection_see_true_gradients(monkeypatch) -> None:
    def accumulate(loop) -> list[torch.Tensor]:
        seen = []
        loop.optimizer.zero_grad()
        for _ in range(3):
            x, y = next(loop.batches)
            (nn.functional.cross_entropy(loop.model(x), y) / 3).backward()
            seen.append(loop.model.conv1.weight.grad.clone())
        seen.append(nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1))
        loop.optimizer.step()
        return seen

    loop, plain = twins()
    expected = accumulate(plain)
    scaled_only(monkeypatch).apply(loop.training, {})
    for ours, theirs in zip(accumulate(loop), expected, strict=True):
        assert torch.equal(ours, theirs)
    assert_equal(values(loop), values(plain))


def test_what_another_thread_trains_is_not_scaled(monkeypatch) -> None:
    """Its gradients would be brought to another scale in the middle of its own backward pass."""
    loop, (other, plain) = make_loop(), twins()
    expected = plain.run(4)
    undo = scaled_only(monkeypatch).apply(loop.training, {})
    graphs = []
    for parameter in other.model.parameters():
        parameter.register_hook(lambda gradient: graphs.append(float(gradient.abs().max())))
    losses = []
    thread = threading.Thread(target=lambda: losses.extend(other.run(4)))
    thread.start()
    while thread.is_alive():
        loop.run(1)
    thread.join()
    assert losses == expected
    assert_equal(values(other), values(plain))
    assert max(graphs) < 1e3  # not times 65,536
    undo.run()


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflowing_step_is_skipped_and_the_scale_halves(fused) -> None:
    loop = make_loop()
    if fused:
        FusedOptimizer().apply(loop.training, {})
    AutocastFp16().apply(loop.training, ANYWAY)
    loop.run(1)
    before = values(loop)
    x, y = next(loop.batches)
    loop.optimizer.zero_grad()
    (nn.functional.cross_entropy(loop.model(x), y) * 1e30).backward()
    assert not all(torch.isfinite(parameter.grad).all() for parameter in loop.model.parameters())
    loop.optimizer.step()
    after = values(loop)
    assert_equal(
        {k: v for k, v in before.items() if "running" not in k and "num_batches" not in k},
        {k: v for k, v in after.items() if "running" not in k and "num_batches" not in k},
    )
    losses = loop.run(3)
    assert all(torch.isfinite(value).all() for value in values(loop).values() if value.is_floating_point())
    assert all(loss < 10 for loss in losses)


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_a_step_whose_closure_overflows_is_skipped_too(monkeypatch, optimizer, fused, by_name) -> None:
    loop, other = twins(optimizer=optimizer, steps=0)
    for each in (loop, other):
        if fused:
            FusedOptimizer().apply(each.training, {})
        undo = scaled_only(monkeypatch).apply(each.training, ANYWAY)
        for large in (True, False, False, True, True, False):

            def closure(each=each, factor=1e36 if large else 1.0) -> torch.Tensor:
                x, y = next(each.batches)
                each.optimizer.zero_grad()
                loss = nn.functional.cross_entropy(each.model(x), y) * factor
                loss.backward()
                return loss

            if each is other:
                closure()
                each.optimizer.step()
            else:
                loss = each.optimizer.step(closure=closure) if by_name else each.optimizer.step(closure)
                assert torch.isfinite(loss)
                assert all(parameter.grad.isfinite().all() for parameter in each.model.parameters()) != large
        undo.run()
    assert all(parameter.isfinite().all() for parameter in loop.model.parameters())
    assert_equal(values(loop), values(other))


LARGE = 1e36  # a loss times this overflows fp32 at usual scales


def scale_at(loop, factor: float) -> float:
    """One more backward pass; the scale that its loss had."""
    x, y = next(loop.batches)
    loss = nn.functional.cross_entropy(loop.model(x), y) * factor
    seen = []
    loss.register_hook(lambda gradient: seen.append(gradient.item()))
    loss.backward()
    return seen[0]


def finite(optimizer) -> bool:
    return all(p.grad.isfinite().all() for group in optimizer.param_groups for p in group["params"])


@pytest.mark.parametrize("zero_to_none", [False, True])
@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("leaves_out", [False, True])
def test_the_scale_is_a_grad_scalers(monkeypatch, leaves_out, passes, zero_to_none) -> None:
    """Also where the script itself leaves out a step whose gradients have overflowed; and several passes before a step count once."""
    interval = 2000 if leaves_out else 2  # a pass behind a step that was left out is not counted
    monkeypatch.setattr("advisor.transforms.scaling._GROWTH_INTERVAL", interval)
    loop = make_loop()
    scaled_only(monkeypatch).apply(loop.training, {})
    scaler = torch.amp.GradScaler("cpu", growth_interval=interval)
    scaler.scale(torch.zeros(()))  # which makes its tensors
    for overflows in ([1], [], [], [], [0], [0, 1], [1], [], [], [], [], [], [0]):
        loop.optimizer.zero_grad(set_to_none=zero_to_none)
        for number in range(passes):
            scale = scale_at(loop, LARGE if number in overflows else 1.0)
            assert number or scale == scaler.get_scale()
        assert finite(loop.optimizer) == (not any(number < passes for number in overflows))
        if finite(loop.optimizer) or not leaves_out:
            loop.optimizer.step()
        scaler._per_optimizer_states[0]["found_inf_per_device"] = {
            "cpu": torch.tensor(float(not finite(loop.optimizer)))
        }
        scaler.update()


def test_an_overflow_counts_once_whoever_leaves_out_its_step(monkeypatch) -> None:
    # Each loss reaches what both optimizers train, as a GAN's does, and each clears its own gradients alone.
    loop = make_loop()
    parameters = list(loop.model.parameters())
    optimizers = [torch.optim.SGD(parameters[:4], lr=0.01), torch.optim.SGD(parameters[4:], lr=0.01)]
    loop.training.optimizers[:] = optimizers
    scaled_only(monkeypatch).apply(loop.training, {})
    for turn in range(6):
        optimizers[turn % 2].zero_grad()
        assert scale_at(loop, LARGE) == 2.0 ** (16 - turn)
        assert not finite(optimizers[turn % 2])
    for turn in range(2):
        optimizers[turn].zero_grad()
        assert scale_at(loop, 1.0) == 2.0**10
        optimizers[turn].step()
    assert all(parameter.isfinite().all() for parameter in parameters)
    del optimizers[:], loop.training.optimizers[:]  # of one that the next epoch makes anew nobody knows before its step
    gc.collect()
    for turn in range(3):
        loop.model.zero_grad()
        assert scale_at(loop, LARGE) == 2.0 ** (10 - turn)


@pytest.mark.parametrize("late", [False, True])
def test_two_optimizers_and_explicit_start_gradients(monkeypatch, late) -> None:
    loop, plain = twins()
    seconds = {}
    for each in (loop, plain):
        extra = nn.Linear(5, 1)
        torch.manual_seed(3)
        nn.init.normal_(extra.weight)
        nn.init.zeros_(extra.bias)
        seconds[id(each)] = torch.optim.Adam(extra.parameters())
        each.training.optimizers.append(seconds[id(each)])
        each.training.roots.append(type(each.training.roots[0])(module=extra, name="Linear"))
    for each in (plain, loop):
        if each is loop:
            if late:  # the script's second optimizer has not stepped yet, so nobody knows of it
                loop.training.optimizers.pop()
            scaled_only(monkeypatch).apply(loop.training, {})
        extra, second = each.training.roots[1].module, seconds[id(each)]
        for _ in range(3):
            x, _ = next(each.batches)
            out = each.model(x)
            torch.autograd.backward([extra(out), out], [torch.ones(4, 1), torch.full((4, 5), 0.5)])
            each.optimizer.step()
            second.step()
    assert_equal(values(loop), values(plain))
    for ours, theirs in zip(
        loop.training.roots[1].module.parameters(), plain.training.roots[1].module.parameters(), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_optimizers_that_share_parameters_see_true_gradients(monkeypatch) -> None:
    # Two heads over one trunk, each with an optimizer of its own.
    loop, plain = twins()
    for each in (plain, loop):
        second = torch.optim.SGD(each.model.parameters(), lr=0.05)
        each.training.optimizers.append(second)
        if each is loop:
            scaled_only(monkeypatch).apply(loop.training, {})
        for _ in range(2):
            each.step()
            second.step()
    assert_equal(values(loop), values(plain))


def test_an_optimizer_made_anew_over_the_same_parameters_sees_true_gradients(monkeypatch) -> None:
    loop, plain = twins()
    gone, seen = [], {id(loop): [], id(plain): []}
    for each in (plain, loop):
        if each is loop:
            scaled_only(monkeypatch).apply(loop.training, {})
        for epoch in range(4):
            each.training.optimizers.clear()
            gone.append(weakref.ref(each.optimizer))
            kept = each.optimizer if epoch % 2 else None  # gone before the first step of the new one, or after it
            each.optimizer = torch.optim.SGD(each.model.parameters(), lr=0.05, momentum=0.9)
            gc.collect()
            for _ in range(2):
                x, y = next(each.batches)
                each.optimizer.zero_grad()
                nn.functional.cross_entropy(each.model(x), y).backward()
                seen[id(each)].append(nn.utils.clip_grad_norm_(each.model.parameters(), 1.0))
                each.optimizer.step()
            del kept
    assert seen[id(loop)] == seen[id(plain)]
    assert_equal(values(loop), values(plain))
    gc.collect()
    assert not any(optimizer() for optimizer in gone)


class Checkpointed(ConvNet):
    def forward(self, x):
        x = nn.functional.relu(self.bn1(self.conv1(x)))
        x = checkpoint(lambda x: nn.functional.relu(self.bn2(self.conv2(x))), x, use_reentrant=True)
        return self.head(self.conv3(x).mean((2, 3)))


def test_a_backward_pass_inside_another_is_not_scaled_again(monkeypatch) -> None:
    loop, plain = twins(model=Checkpointed)
    scaled_only(monkeypatch).apply(loop.training, {})
    assert loop.run(3) == plain.run(3)
    assert_equal(values(loop), values(plain))


def test_leaves_of_the_scripts_own_see_true_gradients(monkeypatch) -> None:
    """An image whose gradient it wants, as for adversarial examples, and weights of its loss, with an optimizer later or none."""
    loop, plain = twins()
    found = []
    for each in (plain, loop):
        if each is loop:
            scaled_only(monkeypatch).apply(loop.training, {})
        seen: list[torch.Tensor] = []
        by_hand, late = torch.ones((), requires_grad=True), torch.ones((), requires_grad=True)
        for _ in range(3):
            x, y = next(each.batches)
            x.requires_grad_(True)
            for _ in range(2):
                (nn.functional.cross_entropy(each.model(x) * by_hand, y) * late).backward()
                seen += [leaf.grad.clone() for leaf in (x, by_hand, late)]
            with torch.no_grad():
                by_hand -= 0.1 * by_hand.grad
            by_hand.grad = None
        torch.optim.SGD([late], lr=0.1).step()
        seen += [by_hand.detach(), late.detach()]
        found.append(seen)
    assert all(map(torch.equal, *found))


def test_leaves_that_are_gone_are_not_looked_after(monkeypatch) -> None:
    loop = make_loop()
    state = scaling.LossScale(torch.device("cpu"), Undo())
    monkeypatch.setattr(scaling, "LossScale", lambda device, undo: state)
    scaled_only(monkeypatch).apply(loop.training, {})
    for _ in range(5):
        x, _ = next(loop.batches)
        loop.model(x.requires_grad_(True)).sum().backward()
        del x
    assert len(state.parameters) <= len(list(loop.model.parameters())) + 2


def test_parameters_that_come_later_see_true_gradients(monkeypatch) -> None:
    loop, plain = twins()
    seen = {id(loop): [], id(plain): []}
    for each in (plain, loop):
        first, second = each.model.conv1, [p for n, p in each.model.named_parameters() if not n.startswith("conv1")]
        first.requires_grad_(False)
        each.optimizer = torch.optim.SGD(second, lr=0.05, momentum=0.9)
        each.training.optimizers[:] = [each.optimizer]
        if each is loop:
            scaled_only(monkeypatch).apply(loop.training, {})
        each.step()
        first.requires_grad_(True)  # thawed
        each.optimizer.add_param_group({"params": list(first.parameters())})
        for step in range(2):
            if step:  # made anew, while the other one lives
                kept = each.optimizer
                each.optimizer = torch.optim.SGD(each.model.parameters(), lr=0.05, momentum=0.9)
            each.optimizer.zero_grad()
            for _ in range(3):
                x, y = next(each.batches)
                nn.functional.cross_entropy(each.model(x), y).backward()
                seen[id(each)] += [parameter.grad.clone() for parameter in each.model.parameters()]
            each.optimizer.step()
        del kept
    assert all(map(torch.equal, seen[id(loop)], seen[id(plain)]))
    assert_equal(values(loop), values(plain))


@pytest.mark.usefixtures("process_group")
def test_scaling_refuses_gradients_that_the_script_brings_together_itself(monkeypatch) -> None:
    """They may have overflowed in one process alone, which no flag of the others tells."""
    plain, wrapped = make_loop(), make_loop(model=lambda: nn.parallel.DistributedDataParallel(ConvNet()))
    assert AutocastFp16().match(plain.training, ANYWAY).applies
    monkeypatch.setattr(ranks, "joined", lambda: (0, 2))
    assert "in one of the processes alone" in AutocastFp16().match(plain.training, ANYWAY).reason
    assert AutocastFp16().match(wrapped.training, ANYWAY).applies
    assert AutocastBf16().match(plain.training, ANYWAY).applies


def test_scaling_refuses_gradient_hooks_foreign_parameters_and_input_gradients() -> None:
    transform = AutocastFp16()
    loop = make_loop()
    handle = loop.model.conv1.weight.register_hook(lambda g: g)
    assert "gradient hooks" in transform.match(loop.training, ANYWAY).reason
    handle.remove()
    for register in (nn.Module.register_full_backward_hook, nn.Module.register_full_backward_pre_hook):
        handle = register(loop.model.conv3, lambda *_: None)
        assert "conv3 has backward hooks" in transform.match(loop.training, ANYWAY).reason
        handle.remove()
    handle = nn.modules.module.register_module_full_backward_hook(lambda *_: None)
    assert "hooks of all modules" in transform.match(loop.training, ANYWAY).reason
    handle.remove()
    assert transform.match(loop.training, ANYWAY).applies
    loop.training.optimizers = [torch.optim.SGD(loop.model.head.parameters(), lr=0.1)]
    assert "no known optimizer" in transform.match(loop.training, ANYWAY).reason
    loop = make_loop()
    loop.training.roots[0].args = (torch.zeros(1, 3, 8, 8, requires_grad=True),)
    assert "requires a gradient" in transform.match(loop.training, ANYWAY).reason
