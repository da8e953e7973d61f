"""Fused optimizers: switched live, exactly undone, checkpoints as the plain script's."""

from __future__ import annotations

import copy

import pytest
import torch
from loops import assert_close, assert_equal, check_undo_is_exact, make_loop, sharded_net, twins, values

from advisor.core.profile import KernelRow
from advisor.transforms.fused_optimizer import FusedOptimizer

FUSED = [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad]


@pytest.mark.parametrize("optimizer", FUSED)
def test_fused_training_is_close_and_flags_are_on(optimizer) -> None:
    loop, plain = twins(optimizer=optimizer)
    transform = FusedOptimizer()
    assert transform.match(loop.training, {}).applies
    transform.apply(loop.training, {})
    assert all(group["fused"] for group in loop.optimizer.param_groups)
    assert transform.effect(loop.training, None, None).passed
    loop.run(3)
    plain.run(3)
    assert_close(values(loop), values(plain), 1e-4)
    assert not transform.match(loop.training, {}).applies


@pytest.mark.parametrize("optimizer", FUSED)
def test_undo_is_exact(optimizer) -> None:
    loop, plain = twins(optimizer=optimizer)
    check_undo_is_exact(FusedOptimizer(), loop, plain)


@pytest.mark.parametrize("optimizer", FUSED)
def test_checkpoints_look_like_the_plain_scripts_and_load_both_ways(optimizer) -> None:
    loop, plain = twins(optimizer=optimizer)
    FusedOptimizer().apply(loop.training, {})
    ours, theirs = loop.optimizer.state_dict(), plain.optimizer.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours.keys() == theirs.keys()
    assert all(group["fused"] for group in loop.optimizer.param_groups)
    fresh = make_loop(optimizer=optimizer, steps=0)
    fresh.optimizer.load_state_dict(copy.deepcopy(ours))
    assert not any(group["fused"] for group in fresh.optimizer.param_groups)
    loop.optimizer.load_state_dict(copy.deepcopy(theirs))
    assert all(group["fused"] for group in loop.optimizer.param_groups)
    assert loop.optimizer.defaults["fused"]
    loop.run(1)


def test_steps_are_written_to_the_host_in_checkpoints() -> None:
    from advisor.transforms.fused_optimizer import moved_to_host

    steps = moved_to_host([torch.tensor(3.0), torch.tensor(4.0)])
    assert [step.item() for step in steps] == [3.0, 4.0]
    assert all(step.dim() == 0 for step in steps)


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW])
def test_step_counters_are_what_the_fused_kernel_reads_under_a_default_of_fp64(
    optimizer, capturable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def counters() -> set[tuple[torch.dtype, float]]:
        return {(state["step"].dtype, state["step"].item()) for state in loop.optimizer.state.values()}

    loop = make_loop(optimizer=optimizer, steps=0)
    loop.run(1)
    monkeypatch.setattr(torch, "get_default_dtype", lambda: torch.float64)
    for group in loop.optimizer.param_groups:
        group["capturable"] = capturable
    for state in loop.optimizer.state.values():
        state["step"] = state["step"].double()  # as torch makes them then
    saved = copy.deepcopy(loop.optimizer.state_dict())
    undo = FusedOptimizer().apply(loop.training, {})
    loop.run(1)
    assert counters() == {(torch.float32, 2.0)}
    loop.optimizer.load_state_dict(saved)
    assert counters() == {(torch.float32, 1.0)}
    undo.run()
    assert counters() == {(torch.float64, 1.0)}


def test_what_it_refuses() -> None:
    transform = FusedOptimizer()

    class Own(torch.optim.SGD):
        pass

    for optimizer, options, reason in (
        (torch.optim.SGD, {"fused": True}, "fused already"),
        (torch.optim.RMSprop, {}, "where it helps already"),
        (torch.optim.LBFGS, {"steps": 0}, "neither"),
        (Own, {}, "where it helps already"),
    ):
        match = transform.match(make_loop(optimizer=optimizer, **options).training, {})
        assert not match.applies
        assert reason in match.reason, match.reason
    loop = make_loop()
    weight = next(loop.model.parameters())
    weight.grad = torch.zeros_like(weight).to_sparse()
    assert "sparse" in transform.match(loop.training, {}).reason


def test_looking_makes_no_optimizer_step() -> None:
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    steps = []
    handle = register_optimizer_step_pre_hook(lambda *args: steps.append(args))
    try:
        for optimizer in FUSED:
            loop = make_loop(optimizer=optimizer, steps=0)
            assert FusedOptimizer().match(loop.training, {}).applies
            FusedOptimizer().apply(loop.training, {})
    finally:
        handle.remove()
    assert steps == []


def test_a_group_added_meanwhile_gets_the_scripts_own_flags_back() -> None:
    loop = make_loop(optimizer=torch.optim.Adam)
    undo = FusedOptimizer().apply(loop.training, {})
    loop.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    assert loop.optimizer.param_groups[1]["fused"]
    undo.run()
    assert loop.optimizer.param_groups[1]["fused"] is None
    assert loop.optimizer.param_groups[1]["foreach"] is None


def test_a_first_step_that_overflows_leaves_no_uninitialised_momentum() -> None:
    loop, plain = twins(steps=0)
    FusedOptimizer().apply(loop.training, {})
    before = values(loop)
    for parameter in loop.model.parameters():
        parameter.grad = torch.full_like(parameter, torch.inf)
    loop.optimizer.grad_scale, loop.optimizer.found_inf = None, torch.ones(())  # as GradScaler does
    loop.optimizer.step()
    del loop.optimizer.grad_scale, loop.optimizer.found_inf
    assert not any("momentum_buffer" in state for state in loop.optimizer.state.values())
    assert_equal(values(loop), before)
    assert all(torch.isinf(parameter.grad).all() for parameter in loop.model.parameters())
    loop.run(2)
    plain.run(2)
    assert_close(values(loop), values(plain), 1e-4)


@pytest.mark.parametrize(
    "options",
    [{}, {"nesterov": True}, {"maximize": True}, {"dampening": 0.3, "maximize": True}, {"dampening": 0.3, "weight_decay": 0.1}],
)  # fmt: skip
@pytest.mark.parametrize("scale", [None, 4.0])
def test_a_layer_that_is_unfrozen_later_joins_as_in_the_plain_script(options, scale) -> None:
    loop, plain = twins(steps=0, **options)
    for twin in (loop, plain):
        twin.model.conv1.requires_grad_(False)
    FusedOptimizer().apply(loop.training, {})
    for twin in (loop, plain):
        twin.run(2)
        twin.model.conv1.requires_grad_(True)
    if scale:  # as GradScaler does, of an overflow first, which the plain script leaves out
        for overflow in (1.0, 0.0):
            x, y = next(loop.batches)
            loop.optimizer.zero_grad()
            (torch.nn.functional.cross_entropy(loop.model(x), y) * scale).backward()
            loop.optimizer.grad_scale, loop.optimizer.found_inf = torch.tensor(scale), torch.tensor(overflow)
            loop.optimizer.step()
            del loop.optimizer.grad_scale, loop.optimizer.found_inf
            assert ("momentum_buffer" in loop.optimizer.state.get(loop.model.conv1.weight, {})) is not bool(overflow)
        plain.optimizer.zero_grad()
        plain.model(next(plain.batches)[0])  # the norms see the batch of the step that is left out
        plain.run(1)
    loop.run(2)
    plain.run(2)
    assert_close(values(loop), values(plain), 1e-4)
    ours, theirs = (twin.optimizer.state[twin.model.conv1.weight]["momentum_buffer"] for twin in (loop, plain))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_no_change_of_kernels_is_no_effect(profile) -> None:
    loop = make_loop()
    transform = FusedOptimizer()
    assert transform.effect(loop.training, None, None).passed is False
    undo = transform.apply(loop.training, {})
    same = profile(
        KernelRow(name="multi_tensor", kind="optimizer", op="aten::_foreach_add_", phase="optimizer", calls=8)
    )
    # The traced window ends inside the optimizer's step: its kernels may be of no phase that is known.
    fused = profile(KernelRow(name="multi_tensor", kind="optimizer", op="aten::_fused_sgd_", phase="other", calls=2))
    assert transform.effect(loop.training, same, same).passed is False
    assert transform.effect(loop.training, same, fused).passed is True
    assert transform.effect(loop.training, fused, fused).passed is False
    undo.run()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("optimizer", FUSED)
def test_sharded_parameters_are_fused_where_torch_can(optimizer) -> None:
    loop = make_loop(optimizer=optimizer, model=sharded_net)
    match = FusedOptimizer().match(loop.training, {})
    assert match.applies is (optimizer in (torch.optim.Adam, torch.optim.AdamW)), match.reason
    assert match.applies or "sharded" in match.reason
    FusedOptimizer().apply(loop.training, {})
    loop.run(2)


class Muon(torch.optim.Optimizer):
    """An optimizer of the script's own, which works on a matrix at a time."""

    def __init__(self, params, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad / (parameter.grad.norm() + 1e-6), alpha=-group["lr"])


class Several:
    """Two optimizers behind one backward, gradients zeroed by the script itself, an average of weights behind the updates."""

    def __init__(self, first, second, dtype: torch.dtype = torch.float32) -> None:
        loop = make_loop(steps=0)
        self.net, self.training = loop.model.to(dtype), loop.training
        parameters = list(self.net.parameters())
        self.optimizers = [first(parameters[:4], lr=1e-2), second(parameters[4:], lr=1e-2)]
        self.training.optimizers[:] = self.optimizers
        self.average = [p.detach().clone() for p in parameters]

    def run(self, steps: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(1)
        for _ in range(steps):
            for p in self.net.parameters():
                if p.grad is not None:
                    p.grad.detach_()
                    p.grad.zero_()
            x = torch.randn(4, 3, 8, 8, dtype=next(self.net.parameters()).dtype)
            torch.nn.functional.cross_entropy(self.net(x).float(), torch.arange(4)).backward()
            for optimizer in self.optimizers:
                optimizer.step()
            for target, source in zip(self.average, self.net.parameters(), strict=True):
                target.detach().mul_(0.9).add_(source.detach(), alpha=0.1)
        named = dict(self.net.named_parameters())
        averages = zip(named, self.average, strict=True)
        found = {**named, **{f"{name} averaged": average for name, average in averages}}
        return {name: value.detach().float().clone() for name, value in found.items()}


@pytest.mark.parametrize("second", FUSED)
def test_two_optimizers_with_an_average_behind_them(second) -> None:
    plain, fused = (Several(torch.optim.AdamW, second) for _ in range(2))
    fused.net.load_state_dict(plain.net.state_dict())
    fused.average = [t.clone() for t in plain.average]
    transform = FusedOptimizer()
    match = transform.match(fused.training, {})
    assert len(match.sites) == 2
    undo = transform.apply(fused.training, {})
    assert_close(fused.run(5), plain.run(5), 1e-4)
    assert all(group["fused"] for optimizer in fused.optimizers for group in optimizer.param_groups)
    undo.run()
    assert_close(fused.run(2), plain.run(2), 1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_in_half_precision(dtype: torch.dtype) -> None:
    """All-half trainings: the fused kernel computes each update in fp32 and rounds once, PyTorch's loop after each operation."""
    plain, fused = (Several(torch.optim.SGD, torch.optim.SGD, dtype) for _ in range(2))
    fused.net.load_state_dict(plain.net.state_dict())
    fused.average = [t.clone() for t in plain.average]
    assert FusedOptimizer().match(fused.training, {}).applies
    FusedOptimizer().apply(fused.training, {})
    assert_close(fused.run(3), plain.run(3), 3e-2)


def test_an_optimizer_of_the_scripts_own_is_told() -> None:
    mixed = Several(torch.optim.AdamW, torch.optim.AdamW)
    mixed.optimizers[1] = mixed.training.optimizers[1] = Muon(list(mixed.net.parameters())[4:])
    match = FusedOptimizer().match(mixed.training, {})
    assert match.sites == ("AdamW (fused)",)
    assert match.unmatched == ("Muon: has neither a fused nor a multi-tensor implementation",)
    FusedOptimizer().apply(mixed.training, {})
    mixed.run(2)
