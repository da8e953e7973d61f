"""channels_last: same values, other strides, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from loops import (
    Around,
    ConvNet,
    Loop,
    ViewNet,
    assert_close,
    batches,
    check_undo_is_exact,
    make_loop,
    set_values,
    twins,
    values,
)
from torch import nn

from advisor.core.profile import KernelRow
from advisor.loop import ranks
from advisor.loop.training import RootModule, Training
from advisor.transforms.channels_last import ChannelsLast
from advisor.transforms.forward import CAPTURE, GRAPH, ForwardStack
from advisor.transforms.graphs import calls


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("model", [ConvNet, ViewNet])
def test_training_goes_on_in_nhwc_with_the_same_values(optimizer, model) -> None:
    loop, plain = twins(optimizer=optimizer, model=model)
    transform = ChannelsLast()
    assert transform.match(loop.training, {}).applies
    parameters = list(loop.model.parameters())
    transform.apply(loop.training, {})
    losses, expected = loop.run(3), plain.run(3)
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
    assert_close(values(loop), values(plain), 1e-3)
    assert all(a is b for a, b in zip(loop.model.parameters(), parameters, strict=True))
    check = transform.effect(loop.training, None, None)
    assert check.passed, check.detail
    weight = next(p for p in loop.model.parameters() if p.dim() == 4)
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert not weight.is_contiguous()
    for tensor in [weight.grad, *loop.optimizer.state[weight].values()]:
        if tensor.shape == weight.shape:
            assert tensor.stride() == weight.stride()


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_undo_puts_strides_back(optimizer) -> None:
    loop, plain = twins(optimizer=optimizer)
    check_undo_is_exact(ChannelsLast(), loop, plain)


def test_undo_also_straightens_state_that_appeared_meanwhile() -> None:
    loop, plain = twins(optimizer=torch.optim.Adam, steps=0)
    undo = ChannelsLast().apply(loop.training, {})
    loop.run(1)
    undo.run()
    plain.run(1)
    for ours, theirs in zip(loop.optimizer.state.values(), plain.optimizer.state.values(), strict=True):
        assert ours["exp_avg"].stride() == theirs["exp_avg"].stride()
    set_values(plain, values(loop))
    loop.batches, plain.batches = batches(torch.device("cpu"), 3), batches(torch.device("cpu"), 3)
    assert loop.run(1) == plain.run(1)


@pytest.mark.usefixtures("process_group")
@pytest.mark.filterwarnings("ignore:Grad strides do not match bucket view strides")
def test_gradients_that_are_views_of_data_parallel_buckets_stay_right() -> None:
    """Applied between two steps, when DDP's buckets have been built: their views are then the gradients themselves."""
    loop = make_loop(model=lambda: nn.parallel.DistributedDataParallel(ConvNet(), gradient_as_bucket_view=True))
    check_trains_as(loop, make_loop())


@pytest.mark.usefixtures("process_group")
@pytest.mark.filterwarnings("ignore:Grad strides do not match bucket view strides")  # of dimensions of one
@pytest.mark.parametrize("nested", [False, True])
def test_a_data_parallel_training_keeps_its_gradients(nested: bool) -> None:
    """Applied between two steps, when DDP's buckets have been laid out by the weights' strides."""
    wrap = Around if nested else nn.Identity()
    loop = make_loop(model=lambda: wrap(nn.parallel.DistributedDataParallel(ConvNet())))
    plain = make_loop()
    torch.testing.assert_close(loop.run(2), plain.run(2))
    check_trains_as(loop, plain)


def check_trains_as(loop: Loop, plain: Loop) -> None:
    """A training under DistributedDataParallel, whose weights have other names, with the change on and behind it."""
    undo = ChannelsLast().apply(loop.training, {})
    assert_close(dict(zip(values(plain), values(loop).values(), strict=True)), values(plain))
    check = ChannelsLast().effect(loop.training, None, None)
    assert check.passed, check.detail
    torch.testing.assert_close(loop.run(4), plain.run(4), rtol=1e-4, atol=1e-5)
    undo.run()
    torch.testing.assert_close(loop.run(4), plain.run(4), rtol=1e-4, atol=1e-5)
    assert_close(dict(zip(values(plain), values(loop).values(), strict=True)), values(plain), 1e-3)


def test_weights_that_a_script_sends_itself_keep_their_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank may flatten a gradient to log its norm, and it would lie there in another order than in the ranks it is summed with."""
    monkeypatch.setattr(ranks, "joined", lambda: (0, 2))
    loop, plain = twins()
    ChannelsLast().apply(loop.training, {})
    torch.testing.assert_close(loop.run(3), plain.run(3), rtol=1e-4, atol=1e-5)
    assert all(p.is_contiguous() and p.grad is not None and p.grad.is_contiguous() for p in loop.model.parameters())
    check = ChannelsLast().effect(loop.training, None, None)
    assert check.passed, check.detail


def test_one_channel_images_are_nhwc_too() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    loop = make_loop()
    loop.training.roots[0].module, loop.training.roots[0].args = model, (torch.randn(2, 1, 8, 8),)
    plain = model(*loop.training.roots[0].args)
    ChannelsLast().apply(loop.training, {})
    torch.testing.assert_close(model(*loop.training.roots[0].args), plain)
    check = ChannelsLast().effect(loop.training, None, None)
    assert check.numbers == {"nhwc_inputs": 2.0, "convolutions": 2.0}


def test_a_view_that_is_wrong_anyway_still_raises() -> None:
    loop = make_loop(model=ViewNet)
    undo = ChannelsLast().apply(loop.training, {})
    with pytest.raises(RuntimeError):
        torch.zeros(2, 3, 4, 4).contiguous(memory_format=torch.channels_last).view(7, -1)
    with pytest.raises(RuntimeError):
        torch.zeros(4, 6).t().view(-1)
    assert torch.zeros(2, 3).view(dtype=torch.int32).dtype == torch.int32
    undo.run()
    with pytest.raises(RuntimeError):
        torch.zeros(2, 3, 4, 4).contiguous(memory_format=torch.channels_last).view(2, -1)


def _cut(weight: torch.Tensor) -> None:
    weight.data.view(-1)[:10] = 0


def _bound(weight: torch.Tensor) -> None:
    rows = weight.detach().flatten(1)
    rows.div_(rows.norm(dim=1, keepdim=True))


def _mask(weight: torch.Tensor) -> None:
    gradient = weight.grad.data
    gradient.reshape(-1)[:10] = 0
    gradient.mul_(3)


def _scale_one_filter(weight: torch.Tensor) -> None:
    weight.grad[2].view(-1).mul_(2)


def _add_within(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.ravel().add_(0.1)


def check_what_is_written_is_there(loop: Loop, plain: Loop, write: Callable[[torch.Tensor], None]) -> None:
    undo = ChannelsLast().apply(loop.training, {})
    for _ in range(2):
        for one in (loop, plain):
            one.step()
            write(one.model.conv1.weight)
            one.optimizer.step()
        assert_close(values(loop), values(plain))
    undo.run()
    torch.testing.assert_close(loop.run(2), plain.run(2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("write", [_cut, _bound, _mask, _scale_one_filter, _add_within])
def test_what_a_script_writes_through_a_flat_view_of_a_weight_is_there(write: Callable[[torch.Tensor], None]) -> None:
    loop, plain = twins()
    loop.run(2), plain.run(2)
    check_what_is_written_is_there(loop, plain, write)


def test_a_weight_that_nobody_writes_into_through_a_copy_stays_nhwc() -> None:
    loop, plain = twins()
    ChannelsLast().apply(loop.training, {})
    found = [
        torch.autograd.grad(one.model.conv1.weight.view(-1)[:10].square().sum(), one.model.conv1.weight)
        for one in (loop, plain)
    ]
    torch.testing.assert_close(*found)
    with torch.no_grad():  # views of NHWC memory as well
        loop.model.conv1.weight.view(torch.int32)
        loop.model.conv1.weight.flatten(2)
    assert not loop.model.conv1.weight.is_contiguous()


def test_it_says_where_it_does_not_apply() -> None:
    loop = make_loop(model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 5)))
    assert "no convolution modules" in ChannelsLast().match(loop.training, {}).reason
    loop = make_loop()
    loop.model.conv1.weight.data = loop.model.conv1.weight.data.contiguous(memory_format=torch.channels_last)
    buffer = torch.zeros(loop.model.conv2.weight.numel() + 1)
    loop.model.conv2.weight.data = buffer[1:].view_as(loop.model.conv2.weight)
    match = ChannelsLast().match(loop.training, {})
    assert match.applies
    assert [line.partition(": ")[2] for line in match.unmatched] == [
        "already channels_last",
        "its weight is a view of a larger buffer",
    ]
    view = loop.model.conv2.weight.data_ptr()
    undo = ChannelsLast().apply(loop.training, {})
    assert loop.model.conv2.weight.data_ptr() == view
    undo.run()
    assert loop.model.conv1.weight.is_contiguous(memory_format=torch.channels_last)


class Stacking(ConvNet):
    """Takes its images one by one, as detectors do."""

    def forward(self, images):
        return super().forward(torch.stack(list(images)))


def test_a_model_that_stacks_its_images_itself_computes_in_nhwc() -> None:
    loop = make_loop(model=Stacking)
    root = loop.training.roots[0]
    root.args = (list(root.args[0]),)
    transform = ChannelsLast()
    assert transform.match(loop.training, {}).applies
    transform.apply(loop.training, {})
    seen = []
    loop.model.conv2.register_forward_hook(lambda module, args, output: seen.append(args[0]))
    loop.step()
    assert seen[0].is_contiguous(memory_format=torch.channels_last)
    root.args = (torch.zeros(4, dtype=torch.long),)
    assert "3 or 4 dimensions" in transform.match(loop.training, {}).reason


def test_no_effect_is_seen_as_such(profile) -> None:
    loop = make_loop()
    transform = ChannelsLast()
    assert transform.effect(loop.training, None, None).passed is not True
    undo = transform.apply(loop.training, {})
    ForwardStack.of(loop.model).clear(10)  # planted fault: the input stays NCHW
    loop.model.conv1.weight.data = loop.model.conv1.weight.data.contiguous()
    loop.run(1)
    assert transform.effect(loop.training, None, None).passed is False
    nchw = profile(
        KernelRow(name="k", kind="conv", layout="nchw", time_us=9),
        KernelRow(name="k", kind="conv", layout="nhwc", time_us=1),
    )
    assert transform.effect(loop.training, nchw, nchw).passed is False
    undo.run()


def test_a_compiled_model_is_not_looked_into() -> None:
    loop = make_loop()
    ForwardStack.of(loop.model).set(CAPTURE, lambda inner, module: inner)
    ChannelsLast().apply(loop.training, {})
    assert ChannelsLast().effect(loop.training, None, None).passed is None


def test_a_compiler_can_trace_the_view() -> None:
    loop = make_loop(model=ViewNet)
    ChannelsLast().apply(loop.training, {})
    x = next(loop.batches)[0]
    compiled = torch.compile(loop.model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), loop.model(x))


def test_behind_captured_graphs_the_inputs_are_seen_in_an_eager_forward() -> None:
    loop = make_loop()
    transform = ChannelsLast()
    transform.apply(loop.training, {})
    loop.run(1)
    paused = []

    def replays(inner, module):
        def forward(*args):
            paused.append(calls.paused_now)
            return inner(*args)

        return forward

    ForwardStack.of(loop.model).set(GRAPH, replays)
    check = transform.effect(loop.training, None, None)
    assert check.passed, check.detail
    assert paused == [True]  # a replay would have run no hook


class VolumeNet(nn.Module):
    """3-D convolutions, one transposed, with a norm between; flattened by `view`."""

    def __init__(self, channels: int = 2) -> None:
        super().__init__()
        self.conv1 = nn.Conv3d(channels, 4, 3, padding=1)
        self.norm = nn.BatchNorm3d(4)
        self.up = nn.ConvTranspose3d(4, 3, 2, 2)
        self.head = nn.Linear(3 * 8 * 8 * 8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool3d(F.relu(self.norm(self.conv1(x))), 2)
        return self.head(self.up(x).view(-1, 3 * 8 * 8 * 8))


def volumes(channels: int = 2) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    while True:
        x = torch.randn(2, channels, 8, 8, 8, generator=generator)
        yield x, torch.randint(5, (2,), generator=generator)


def solid_twins(channels: int = 2) -> tuple[Loop, Loop]:
    loops = tuple(make_loop(model=lambda: VolumeNet(channels), steps=0) for _ in range(2))
    for loop in loops:
        loop.batches = volumes(channels)
        loop.run(2)
    return loops


@pytest.mark.parametrize("channels", [1, 2])
def test_volumes_are_ndhwc_with_the_same_values(channels: int) -> None:
    loop, plain = solid_twins(channels)
    transform = ChannelsLast()
    assert set(transform.match(loop.training, {}).sites) == {"VolumeNet.conv1", "VolumeNet.up"}
    undo = transform.apply(loop.training, {})
    torch.testing.assert_close(loop.run(3), plain.run(3), rtol=1e-4, atol=1e-5)
    assert loop.model.up.weight.is_contiguous(memory_format=torch.channels_last_3d)
    assert not loop.model.up.weight.is_contiguous()
    check = transform.effect(loop.training, None, None)
    assert check.passed, check.detail
    assert check.numbers == {"nhwc_inputs": 2.0, "convolutions": 2.0}
    undo.run()
    assert loop.model.up.weight.is_contiguous()
    torch.testing.assert_close(loop.run(2), plain.run(2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("write", [_cut, _bound, _mask, _scale_one_filter, _add_within])
def test_what_a_script_writes_through_a_flat_view_of_a_solid_weight_is_there(
    write: Callable[[torch.Tensor], None],
) -> None:
    loop, plain = solid_twins()
    check_what_is_written_is_there(loop, plain, write)


def test_frames_that_a_flat_model_sees_one_by_one_stay_as_they_are() -> None:
    """[batch, time, C, H, W]: the second dimension is no channel."""
    seen = []

    class Frames(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(x.is_contiguous())
            return self.conv(x.flatten(0, 1))

    net = Frames()
    training = Training(device=torch.device("cpu"), roots=[RootModule(net, "Frames", args=(torch.rand(1, 3, 8, 8),))])
    ChannelsLast().apply(training, {})
    net(torch.rand(2, 5, 3, 8, 8))
    assert seen == [True]
