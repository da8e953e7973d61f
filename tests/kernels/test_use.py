"""Two nets that have an operation of every captured family between them, its kernels emulated, used in the ways in which people use a
model: one in fp32, and one with the families that take half precision alone, under autocast.

Values, gradients and buffers are those of the plain net; `advisor.transforms` says what is done, these tests that it does no harm.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from advisor.ops import catalog, dispatch
from advisor.transforms import capture

FAMILIES = [family.id for family in catalog.FAMILIES if family.captured]
LARGE = {
    "large_depthwise",
    "fft_conv",
    "winograd",
}  # taps that reach over such small images; channels that so small a net has not
# Without measurements on file, so that networks get PyTorch's own: the tests of each have it in a network.
UNMEASURED = {"bias_add", "few_channels", "padding", "prelu", "volume_pooling"}
IN_HALF = {
    "batchnorm_act", "batchnorm_concat", "conv3x3", "first_conv", "pointwise", "pooling", "strided_pointwise",
}  # fmt: skip
IN_FP32 = {
    "batchnorm_act", "batchnorm_max_pool", "bias_act", "depthwise", "exact_conv", "group_norm", "layer_norm", "pooling", "squeeze_excite",
    "upsample",
}  # fmt: skip


class Gate(nn.Module):
    """Squeeze-and-excite."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.squeeze, self.excite = nn.AdaptiveAvgPool2d(1), nn.Conv2d(16, 8, 1), nn.Conv2d(8, 16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(self.excite(F.relu(self.squeeze(self.pool(x)))))


class PixelNorm(nn.LayerNorm):
    """Over the channels of each pixel, as ConvNeXt has it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class Net(nn.Module):
    def __init__(self, checkpointed: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.stem, self.bn0 = nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16)
        self.depthwise, self.bn1 = nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False), nn.BatchNorm2d(16)
        self.grouped, self.bn2 = nn.Conv2d(16, 16, 3, padding=1, groups=2, bias=False), nn.BatchNorm2d(16)
        self.gate, self.conv = Gate(), nn.Conv2d(16, 16, 1)
        self.shortcut = nn.Conv2d(16, 16, 1, stride=2, bias=False)
        self.layer_norm, self.group_norm = PixelNorm(16), nn.GroupNorm(2, 16)
        self.head = nn.Linear(32, 4)

    def block(self, x: torch.Tensor) -> torch.Tensor:
        y = self.gate(F.relu(self.bn1(self.depthwise(x))))
        return F.relu(self.conv(F.relu(self.bn2(self.grouped(y)) + x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.bn0(self.stem(x))), 2)
        x = self.block(x) if self.checkpointed is None else checkpoint(self.block, x, **self.checkpointed)
        y = F.avg_pool2d(F.silu(self.group_norm(self.layer_norm(x))), 2) + self.shortcut(x)
        y = F.interpolate(y, scale_factor=2, mode="bilinear", align_corners=False)
        return self.head(torch.cat([y, x], 1).mean((2, 3)))


class Layer(nn.Module):
    """DenseNet's."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(channels), nn.Conv2d(channels, 32, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(32), nn.Conv2d(32, 32, 3, padding=1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv2(F.relu(self.norm2(self.conv1(F.relu(self.norm1(x))))))


class HalfNet(nn.Module):
    """A dense block, and a bottleneck of stride 2."""

    def __init__(self, checkpointed: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.layers = nn.ModuleList(Layer(16 + 32 * i) for i in range(2))
        self.norm = nn.BatchNorm2d(80)
        self.conv1, self.bn1 = nn.Conv2d(80, 64, 1, stride=2, bias=False), nn.BatchNorm2d(64)
        self.conv2, self.bn2 = nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64)
        self.conv3, self.bn3 = nn.Conv2d(64, 64, 1, bias=False), nn.BatchNorm2d(64)
        self.shortcut, self.bn4 = nn.Conv2d(80, 64, 1, stride=2, bias=False), nn.BatchNorm2d(64)
        self.head = nn.Linear(64, 4)

    def block(self, x: torch.Tensor) -> torch.Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        x = F.relu(self.norm(torch.cat(features, 1)))
        y = F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))
        return F.relu(self.bn3(self.conv3(y)) + self.bn4(self.shortcut(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = self.block(x) if self.checkpointed is None else checkpoint(self.block, x, **self.checkpointed)
        return self.head(x.mean((2, 3)))


def images(n: int = 2, seed: int = 0) -> torch.Tensor:
    x = torch.randn(n, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
    return x.to(memory_format=torch.channels_last)


def pair(checkpointed: dict[str, Any] | None = None, kind: type[nn.Module] = Net) -> tuple[Any, Any]:
    """The net with all families' kernels in its graphs, and the same net without."""
    torch.manual_seed(0)
    net = kind(checkpointed).to(memory_format=torch.channels_last).train()
    plain = copy.deepcopy(net)
    for family in FAMILIES:
        capture.set_family([net], family)
    return net, plain


@pytest.fixture(autouse=True)
def _nothing_compiled(emulated: Any) -> Iterator[None]:
    torch._dynamo.reset()
    dispatch.clear()
    yield
    torch._dynamo.reset()


def step(
    net: nn.Module, call: Callable[[torch.Tensor], torch.Tensor] | None = None, n: int = 2, **autocast: Any
) -> Any:
    """Outputs, gradients and buffers of a training step."""
    net.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=bool(autocast)):
        y = (net if call is None else call)(images(n))
    F.cross_entropy(y.float(), torch.arange(n) % 4).backward()
    return [y.detach().float(), *(p.grad.clone() for p in net.parameters()), *(b.clone() for b in net.buffers())]


def alike(mine: Any, theirs: Any, tolerance: float = 1e-3) -> None:
    """Each tensor's largest error is within this share of its largest element."""
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0.0, atol=tolerance * max(1.0, float(b.abs().max())))


def as_near(mine: Any, theirs: Any, exact: Any) -> None:
    """Each tensor is, but for a factor of 2 and a hundredth, as near to what fp32 gives as PyTorch's own is."""
    for number, (a, b, c) in enumerate(zip(mine, theirs, exact, strict=True)):
        ours, others = (float((t - c).float().norm()) for t in (a, b))
        assert ours <= 2 * others + 0.01 * float(c.float().norm()), (number, ours, others)


def assert_all_ran(net: nn.Module) -> None:
    """Every family that has a place in the net's graphs ran its kernels, and PyTorch's own ran in none of them."""
    assert all(sum(dispatch.engaged[family].values()) for family in sites(net))
    assert not any(sum(fell_back.values()) for fell_back in dispatch.fell_back.values())


def sites(net: nn.Module) -> dict[str, list[str]]:
    layer = capture.current(net)
    assert layer is not None
    return {family: list(report.matched) for family, report in layer.reports.items() if report.matched}


def test_the_nets_have_an_operation_of_every_captured_family_between_them() -> None:
    assert IN_FP32 | IN_HALF | UNMEASURED | {"grouped", *LARGE} == set(FAMILIES)


def test_batches_of_changing_size_and_what_the_report_says_of_them(emulated) -> None:
    net, plain = pair()
    alike(step(net), step(plain))
    first = sites(net)
    for n in (3, 2):
        alike(step(net, n=n), step(plain, n=n))
    assert sites(net) == first  # the same places in another graph are no more places
    assert first["batchnorm_act"] == ["bn1", "bn2"]
    assert first["bias_act"] == ["conv"]
    (place,) = first["batchnorm_max_pool"]  # a function's place is a line
    assert place.startswith("x (test_use.py:")
    assert set(first) >= IN_FP32
    assert_all_ran(net)


@pytest.mark.parametrize("kind", [Net, HalfNet])
def test_autocast(emulated, kind: type[nn.Module]) -> None:
    net, plain = pair(kind=kind)
    exact = copy.deepcopy(plain)
    for _ in range(2):  # the second time without a capture
        as_near(step(net, bfloat16=True), step(plain, bfloat16=True), step(exact))
    assert set(sites(net)) >= (IN_HALF if kind is HalfNet else {*IN_FP32 - {"exact_conv"}, "first_conv", "grouped"})
    assert_all_ran(net)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", [Net, HalfNet])
def test_activation_checkpoints_inside_and_around(emulated, kind: type[nn.Module], reentrant: bool) -> None:
    half = {"bfloat16": True} if kind is HalfNet else {}

    net, plain = pair({"use_reentrant": reentrant}, kind)
    exact = copy.deepcopy(plain)
    as_near(step(net, **half), step(plain, **half), step(exact))
    assert set(sites(net)) >= (IN_HALF if half else IN_FP32)
    assert_all_ran(net)
    net, plain = pair(kind=kind)
    exact = copy.deepcopy(plain)

    def around(net: nn.Module, **autocast: Any) -> Any:
        x = images().requires_grad_()
        net.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bool(autocast)):
            y = checkpoint(net, x, use_reentrant=reentrant)
        F.cross_entropy(y.float(), torch.arange(2)).backward()
        return [x.grad, *(p.grad for p in net.parameters())]

    dispatch.clear()
    as_near(around(net, **half), around(plain, **half), around(exact))
    assert dispatch.engaged["batchnorm_act"]


def test_evaluation_and_back(emulated) -> None:
    net, plain = pair()
    for mode in (True, False, True):
        net.train(mode), plain.train(mode)
        alike(step(net), step(plain))
        for without in (torch.no_grad, torch.inference_mode):
            with without():
                alike([net(images(5))], [plain(images(5))])


def test_copies_pickles_and_checkpoints_are_the_plain_nets(emulated) -> None:
    net, plain = pair()
    step(net), step(plain)
    assert list(net.state_dict()) == list(plain.state_dict())
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    want = step(plain)
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net)), torch.load(file, weights_only=False)):
        alike(step(twin), want)
    alike(step(net), want)


def test_compiled_by_the_user(emulated) -> None:
    net, plain = pair()
    compiled = torch.compile(net, backend="aot_eager")
    alike(step(net, compiled), step(plain))


@pytest.mark.long
def test_in_code_that_inductor_generates(emulated, tmp_path: Path) -> None:
    """C++ around the operations, forward and backward, compiled here and not found in a cache."""
    from torch._inductor import config as inductor
    from torch._inductor.utils import fresh_inductor_cache

    net, plain = pair()
    capture.set_mode([net], "default")
    with fresh_inductor_cache(dir=str(tmp_path)), inductor.patch(compile_threads=1):
        for _ in range(2):
            mine, theirs = step(net), step(plain)
            as_near(mine, theirs, theirs)
        code = "".join(path.read_text() for path in tmp_path.rglob("*.py"))
        assert list(tmp_path.rglob("*.so"))
    named = {"layer_norm", "group_norm", "squeeze_excite", "batchnorm_act", "batchnorm_max_pool", "upsample_concat"}
    for operation in {*named, "depthwise_conv2d", "bias_act", "avg_pool2d", "global_avg_pool2d"}:
        assert f"torch.ops.advisor.{operation}." in code, operation
    assert set(sites(net)) >= IN_FP32
    assert_all_ran(net)


def test_functional_transforms(emulated) -> None:
    net, plain = pair()
    for norm in (m for twin in (net, plain) for m in twin.modules() if isinstance(m, nn.BatchNorm2d)):
        norm.track_running_stats = False  # torch.func allows nobody to write into buffers
        norm.running_mean = norm.running_var = norm.num_batches_tracked = None

    def gradients(net: nn.Module) -> list[torch.Tensor]:
        def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
            return torch.func.functional_call(net, parameters, (x,)).square().sum()

        return list(torch.func.grad(loss)(dict(net.named_parameters())).values())

    x = images()
    alike(gradients(net), gradients(plain))


def test_second_derivatives(emulated) -> None:
    net, plain = pair()

    def penalty(net: nn.Module) -> list[torch.Tensor]:
        x = images().requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(net(x), torch.arange(2)), x, create_graph=True)
        net.zero_grad()
        (1e3 * slope.square().sum()).backward()
        return [p.grad for p in net.parameters() if p.grad is not None]

    alike(penalty(net), penalty(plain), 1e-2)
    assert dispatch.engaged["batchnorm_act"]


def _rank(rank: int, folder: str) -> None:
    """One process of a data-parallel training on emulated kernels; leaves what it found in `folder`."""
    from emulation import device
    from torch.distributed import destroy_process_group, init_process_group
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    patch = pytest.MonkeyPatch()
    running = device.emulated.__wrapped__(patch)
    next(running)
    init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for kind, half in ((Net, {}), (HalfNet, {"bfloat16": True})):
        net, plain = pair(kind=kind)
        nets = net, plain, copy.deepcopy(plain)
        mine, theirs, exact = (DistributedDataParallel(twin, static_graph=True) for twin in nets)
        for _ in range(2):
            as_near(
                step(net, lambda _, twin=mine: twin(images(2, rank)), **half),
                step(plain, lambda _, twin=theirs: twin(images(2, rank)), **half),
                step(nets[2], lambda _, twin=exact: twin(images(2, rank))),
            )
        assert set(sites(net)) >= (IN_HALF if half else IN_FP32)
        assert_all_ran(net)
    destroy_process_group()
    Path(folder, f"rank-{rank}").touch()


@pytest.mark.long
def test_data_parallel_in_two_processes(emulated, tmp_path: Path) -> None:
    mp.spawn(_rank, (str(tmp_path),), nprocs=2)
    assert {path.name for path in tmp_path.glob("rank-*")} == {"rank-0", "rank-1"}
