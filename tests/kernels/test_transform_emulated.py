"""A kernel family's transform in a training loop, with its kernels emulated: rewritten, run, effective, and taken back."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from advisor.loop.training import RootModule, Training
from advisor.ops import dispatch, match
from advisor.transforms import capture, registry


class Net(nn.Module):
    """A block with a shortcut, as ResNets write it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)) + x)
        return self.head(x.mean((2, 3)))


def step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    F.cross_entropy(model(x), torch.arange(len(x)) % 4).backward()
    return [p.grad.clone() for p in model.parameters()] + [b.clone() for b in model.buffers()]


@pytest.fixture
def nets() -> tuple[Net, Net, torch.Tensor]:
    torch._dynamo.reset()
    dispatch.clear()
    torch.manual_seed(0)
    model, plain = (Net().to(memory_format=torch.channels_last).train() for _ in range(2))
    plain.load_state_dict(model.state_dict())
    return model, plain, torch.randn(4, 3, 6, 6).to(memory_format=torch.channels_last)


def test_the_transform_puts_the_kernels_in_place_and_takes_them_back(emulated, nets) -> None:
    model, plain, x = nets
    fused = registry.get("fused_bn_act")
    training = Training(device=torch.device("cpu"), roots=[RootModule(module=model, name="Net", args=(x,))])
    undo = fused.apply(training, {})
    for _ in range(2):
        for mine, want in zip(step(model, x), step(plain, x), strict=True):
            torch.testing.assert_close(mine, want, rtol=2e-4, atol=2e-5)
    assert emulated.launches["batchnorm_act_held_forward"] == 4  # two norms, two steps
    found = fused.effect(training, None, None)
    assert found.passed, found.detail
    assert fused.sites(training) == (("bn1: bn+relu", "bn2: bn+add+relu"), ())
    undo.run()
    step(model, x)
    assert emulated.launches["batchnorm_act_held_forward"] == 4


def test_a_cumulative_average_runs_on_the_kernels(emulated, nets) -> None:
    model, plain, x = nets
    for net in (model, plain):
        net.bn1.momentum = None
    fused = registry.get("fused_bn_act")
    training = Training(device=torch.device("cpu"), roots=[RootModule(module=model, name="Net", args=(x,))])
    undo = fused.apply(training, {})
    for _ in range(2):
        for mine, want in zip(step(model, x), step(plain, x), strict=True):
            torch.testing.assert_close(mine, want, rtol=2e-4, atol=2e-5)
    assert emulated.launches["batchnorm_act_held_forward"] == 4
    undo.run()


class Parts(nn.Module):
    """A norm and a pooling, in a checkpoint or behind a break of the graph where that is asked for."""

    def __init__(self, *, checkpointed: bool = False, broken: bool = False, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8, momentum=momentum)
        self.head = nn.Linear(8, 4)
        self.checkpointed, self.broken = checkpointed, broken

    def block(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.bn(self.conv(x)))
        if self.broken:
            torch._dynamo.graph_break()
        return F.avg_pool2d(x, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.block, x, use_reentrant=False) if self.checkpointed else self.block(x)
        return self.head(x.mean((2, 3)))


# How a net is made, and the graphs that are captured of it. The norms' transform exchanges the forward of one with a cumulative average:
# where it reads its counter back there are three graphs, and then one.
WAYS = [({}, 1), ({"checkpointed": True}, 1), ({"broken": True}, 3), ({"momentum": None}, 3 + 1)]


@pytest.mark.parametrize(("way", "graphs"), WAYS, ids=["plain", "checkpointed", "broken", "cumulative"])
def test_sets_of_families_share_a_capture_and_each_runs_its_own(emulated, nets, way, graphs) -> None:
    """Of every set that a search switches between: what it launches, in whatever order, and the numbers of the plain net."""
    x = nets[2]
    torch.manual_seed(0)
    model, plain = (Parts(**way).to(memory_format=torch.channels_last).train() for _ in range(2))
    plain.load_state_dict(model.state_dict())
    training = Training(device=torch.device("cpu"), roots=[RootModule(module=model, name="Parts", args=(x,))])
    counters.clear()
    undos = {}

    def launched() -> set[str]:
        before = emulated.launches.copy()
        for mine, want in zip(step(model, x), step(plain, x), strict=True):
            torch.testing.assert_close(mine, want, rtol=2e-4, atol=2e-5)
        entries = emulated.launches - before
        return {"norm" if "batchnorm" in entry else "pooling" for entry in entries}

    for wanted in ({"pooling"}, {"pooling", "norm"}, {"norm"}, {"pooling", "norm"}, {"pooling"}, set(), {"pooling"}):
        for kind, transform in (("pooling", "fused_pooling"), ("norm", "fused_bn_act")):
            if kind in wanted and kind not in undos:
                undos[kind] = registry.get(transform).apply(training, {})
            elif kind not in wanted and kind in undos:
                undos.pop(kind).run()
        assert launched() == wanted
    assert counters["stats"]["unique_graphs"] == graphs
    undos.pop("pooling").run()


def test_with_inductor_the_operation_is_in_the_compiled_graph(emulated, nets, monkeypatch) -> None:
    """AOTAutograd and the operation's fake kernel, autograd and schema; Inductor's own code generation is left out."""
    from torch._dynamo.backends.debugging import aot_eager

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda graph, inputs, **_: aot_eager(graph, inputs))
    model, plain, x = nets
    families, mode = capture.set_family([model], "batchnorm_act"), capture.set_mode([model], "default")
    for _ in range(2):
        for mine, want in zip(step(model, x), step(plain, x), strict=True):
            torch.testing.assert_close(mine, want, rtol=2e-4, atol=2e-5)
    assert emulated.launches["batchnorm_act_held_forward"] == 4
    assert isinstance(capture.current(model).reports["batchnorm_act"], match.MatchReport)
    mode.run()
    families.run()


class Boxes(nn.Module):
    """A head over the boxes that are found, of which there may be none."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.LayerNorm(8)
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.bn(self.conv(x)))
        return F.gelu(self.head(self.norm(x.permute(0, 2, 3, 1))))


def test_with_inductor_an_empty_batch_is_pytorchs_own(emulated, monkeypatch) -> None:
    from torch._dynamo.backends.debugging import aot_eager

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda graph, inputs, **_: aot_eager(graph, inputs))
    model = Boxes().to(memory_format=torch.channels_last).train()
    with dispatch.everything():
        for family in ("batchnorm_act", "bias_act", "layer_norm"):
            capture.set_family([model], family)
        capture.set_mode([model], "default")
        for count in (0, 2):
            y = model(torch.randn(count, 3, 6, 6).to(memory_format=torch.channels_last))
            y.sum().backward()
            assert y.shape == (count, 6, 6, 8)
    assert emulated.launches["layer_norm_forward"] == 1


@pytest.mark.long
def test_in_code_that_inductor_generates(emulated, nets, tmp_path) -> None:
    """As above with Inductor's own: C++ around the operation, compiled here and not found in a cache."""
    from torch._inductor import config as inductor
    from torch._inductor.utils import fresh_inductor_cache

    model, plain, x = nets
    families, mode = capture.set_family([model], "batchnorm_act"), capture.set_mode([model], "default")
    with fresh_inductor_cache(dir=str(tmp_path)), inductor.patch(compile_threads=1):
        for _ in range(2):
            for mine, want in zip(step(model, x), step(plain, x), strict=True):
                torch.testing.assert_close(mine, want, rtol=2e-4, atol=2e-5)
        code = "".join(path.read_text() for path in tmp_path.rglob("*.py"))
        assert list(tmp_path.rglob("*.so"))
    assert {f"torch.ops.advisor.{name}.default(" in code for name in ("batchnorm_act", "batchnorm_act_backward")} == {
        True
    }
    assert emulated.launches["batchnorm_act_held_forward"] == emulated.launches["batchnorm_act_held_backward"] == 4
    mode.run()
    families.run()


class Lossy(nn.Module):
    """A norm behind what returns NCHW."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.plain, self.bn = nn.Conv2d(3, 8, 3, padding=1), Contiguous(), nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.bn(self.plain(self.conv(x))))


class Contiguous(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.contiguous()


def test_kernels_that_never_run_say_which_module_gives_them_nchw(emulated) -> None:
    torch._dynamo.reset()
    dispatch.clear()
    model = Lossy().to(memory_format=torch.channels_last).train()
    x = torch.randn(4, 3, 6, 6).to(memory_format=torch.channels_last)
    training = Training(device=torch.device("cpu"), roots=[RootModule(module=model, name="Lossy", args=(x,))])
    fused = registry.get("fused_bn_act")
    undo = fused.apply(training, {})
    model(x).sum().backward()
    found = fused.effect(training, None, None)
    assert found.passed is False
    assert "input is not channels_last" in found.detail
    assert "plain (Contiguous)" in found.detail
    undo.run()


def test_kernels_in_a_model_in_nchw_say_that(emulated, nets) -> None:
    model, _, x = nets
    model.to(memory_format=torch.contiguous_format)
    training = Training(
        device=torch.device("cpu"), roots=[RootModule(module=model, name="Net", args=(x.contiguous(),))]
    )
    fused = registry.get("fused_bn_act")
    undo = fused.apply(training, {})
    step(model, x.contiguous())
    found = fused.effect(training, None, None)
    assert found.passed is False
    assert "the model is in NCHW" in found.detail
    undo.run()
