"""What a loop's objects tell about the model, without the hooks that see its calls."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from advisor.loop.training import RootModule, Training
from advisor.profiling.inside.facts import model_facts


def net(channels_last: bool) -> nn.Module:
    """As a MobileNet: most weights of more than one tap are depthwise."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3)]
    for _ in range(4):
        layers += [nn.Conv2d(16, 16, 3, groups=16), nn.Conv2d(16, 16, 1)]
    made = nn.Sequential(*layers)
    return made.to(memory_format=torch.channels_last) if channels_last else made


@pytest.mark.parametrize("channels_last", [True, False])
def test_weights_that_are_contiguous_both_ways_tell_no_layout(channels_last: bool) -> None:
    root = RootModule(module=net(channels_last), name="net")
    facts = model_facts(Training(device=torch.device("cpu"), roots=[root]))
    assert not any(conv.layout for conv in facts.convs)  # no call was seen, as inside a captured forward
    assert facts.channels_last is channels_last


def test_depthwise_weights_alone_tell_none() -> None:
    alone = nn.Conv2d(16, 16, 3, groups=16).to(memory_format=torch.channels_last)
    facts = model_facts(Training(device=torch.device("cpu"), roots=[RootModule(module=alone, name="net")]))
    assert facts.channels_last is False


def test_the_walk_of_a_data_parallel_over_one_device_is_timed() -> None:
    wrapped = nn.DataParallel(nn.Sequential(*(nn.BatchNorm2d(4) for _ in range(20))))

    def walk_us(devices: list[int]) -> float | None:
        wrapped.device_ids = devices
        training = Training(device=torch.device("cpu"), roots=[RootModule(module=wrapped, name="net")])
        return model_facts(training).data_parallel_us

    assert walk_us([]) is None  # without a GPU it passes on at once
    assert walk_us([0, 1]) is None
    walked = walk_us([0])
    assert walked is not None
    assert walked > 5.0  # a hundred tensors, some microseconds each


def trained(*held: nn.Module, roots: dict[str, nn.Module]) -> tuple[str, ...]:
    """What is told as untrained behind a backward pass through all roots, one after the other; `held`: what the optimizer has."""
    optimizer = torch.optim.SGD([p for module in held for p in module.parameters()], lr=0.1)
    x = torch.ones(1, 4)
    for root in roots.values():
        x = root(x)
    x.sum().backward()
    found = [RootModule(module=module, name=name) for name, module in roots.items()]
    return model_facts(Training(device=torch.device("cpu"), roots=found, optimizers=[optimizer])).untrained


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.BatchNorm1d(4).eval())


def test_a_teacher_that_records_a_graph_is_untrained_whole() -> None:
    teacher, student = layers(), layers()
    assert trained(student, roots={"Teacher": teacher, "Student": student}) == ("Teacher.0", "Teacher.2", "Teacher.*")


def test_an_optimizer_that_was_given_the_head_alone_leaves_the_rest_untrained() -> None:
    net = nn.Sequential(layers(), nn.Linear(4, 2))
    assert trained(net[1], roots={"Net": net}) == ("Net.0.0", "Net.0.2")


def test_what_is_frozen_or_held_by_an_optimizer_that_was_not_stepped_yet_is_not_told() -> None:
    frozen, later, now = layers().requires_grad_(False), layers(), layers()
    waiting = torch.optim.SGD(later.parameters(), lr=0.1)
    assert trained(now, roots={"Frozen": frozen, "Later": later, "Now": now}) == ()
    assert waiting.param_groups


def test_without_any_optimizer_the_script_updates_its_weights_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("advisor.profiling.inside.untrained.living_optimizers", list)
    net = layers()
    net(torch.ones(1, 4)).sum().backward()
    training = Training(device=torch.device("cpu"), roots=[RootModule(module=net, name="Net")])
    assert model_facts(training).untrained == ()


@pytest.mark.parametrize(
    ("asked", "configured", "device", "told"),
    [
        (None, None, "cpu", "gloo"),  # "undefined" is what torch calls it
        ("gloo", None, "cpu", "gloo"),
        ("gloo", "cpu:gloo,cuda:nccl", "cuda", "nccl"),
        ("gloo", "cpu:gloo", "cuda", "gloo"),
    ],
)
def test_the_backend_is_the_one_of_the_trainings_device(
    asked: str | None, configured: str | None, device: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    distributed = torch.distributed
    distributed.init_process_group(asked, store=distributed.HashStore(), rank=0, world_size=1)
    try:
        if configured is not None:
            monkeypatch.setattr(distributed, "get_backend_config", lambda: configured)
        assert model_facts(Training(device=torch.device(device))).backend == told
    finally:
        distributed.destroy_process_group()


@pytest.fixture
def old_setting_warns(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As torch 2.9 does, whose warning is an exception in a script that runs under `-W error`."""

    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip("torch 2.8 has the old setting alone")

    def warn() -> bool:
        raise UserWarning("Please use the new API settings to control TF32 behavior")

    monkeypatch.setattr(torch._C, "_get_cublas_allow_tf32", warn)
    matmul = torch.backends.cuda.matmul.fp32_precision
    yield
    torch.backends.cuda.matmul.fp32_precision = matmul


@pytest.mark.usefixtures("old_setting_warns")
def test_tf32_is_asked_for_without_a_warning() -> None:
    flags = model_facts(Training(device=torch.device("cpu"))).flags
    assert (flags["tf32_matmul"], flags["tf32_conv"]) == (False, True)  # torch's defaults
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    assert model_facts(Training(device=torch.device("cpu"))).flags["tf32_matmul"]


def test_nvidias_own_switch_rules_tf32_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    flags = model_facts(Training(device=torch.device("cpu"))).flags
    assert (flags["tf32_matmul"], flags["tf32_conv"]) == (False, False)


def test_the_optimizer_is_the_one_with_most_parameters() -> None:
    small, large = (torch.nn.Parameter(torch.zeros(n)) for n in (2, 9))
    first, second = torch.optim.SGD([small], lr=0.1, fused=True), torch.optim.AdamW([large], fused=False)
    found = model_facts(Training(device=torch.device("cpu"), optimizers=[first, second]))
    assert (found.optimizers, found.optimizer_fused) == (("AdamW", "SGD"), False)
    found = model_facts(
        Training(device=torch.device("cpu"), optimizers=[second, torch.optim.SGD([small, large], fused=True)])
    )
    assert (found.optimizers, found.optimizer_fused) == (("SGD", "AdamW"), True)
