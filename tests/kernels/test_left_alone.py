"""What looks like a family's pattern and computes something else: it is left alone, and the report says why.

Each net trains as the plain one; on the CPU the operations run PyTorch's own, so only what a rewrite makes of a graph is tested.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from advisor.ops import catalog, dispatch, dynamo, match

C = 16  # as many as pixels in a row: broadcasting alone does not tell a channel from a pixel


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, C, 3, padding=1), nn.Conv2d(3, C, 3, padding=1)
        self.norm = nn.BatchNorm2d(C)

    def branches(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.a(x), self.norm(self.b(x))


class ShortcutWrittenInto(Base):
    """`y += …` changes the shortcut, and something that has kept that sees the sum."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, branch = self.branches(x)
        kept = y
        y += branch
        return torch.cat([kept, F.relu(y)], 1)


class InputWrittenInto(Base):
    """Who called has the shortcut still."""

    def forward(self, x: torch.Tensor, shortcut: torch.Tensor) -> torch.Tensor:
        shortcut.add_(self.branches(x)[1])
        return F.relu(shortcut)


class ShortcutChangedAfterTheSum(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut, branch = self.branches(x)
        y = branch + shortcut
        shortcut[:, :4].mul_(2.0)
        return F.relu(y) + shortcut


class AddendChangedAfterTheSum(Base):
    """The same without a norm, and with the change in a view that is older than the sum."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut, branch = self.a(x), self.b(x)
        part = shortcut.flatten(2)
        y = branch + shortcut
        part.mul_(2.0)
        return F.relu(y) + shortcut


class FrozenTrunk(Base):
    """The norm is no part of what is trained."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            features = self.norm(self.b(x))
        return F.relu(features + self.a(x))


class FrozenConvolution(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            features = self.a(x)
        return self.norm(F.relu(features) + self.b(x))


class FrozenScale(Base):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(C, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            branch = self.a(x) * self.scale
        return branch + self.b(x)


class FrozenPermutes(Base):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LayerNorm(C)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        with torch.no_grad():
            pixels = y.permute(0, 2, 3, 1)
        return self.layer(pixels).permute(0, 3, 1, 2) + y


class FrozenStart(nn.Module):
    """A dense block whose first norms record no gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(3, C, 1), *(nn.Conv2d(C * i, C, 1) for i in (1, 2, 3))])
        self.norms = nn.ModuleList(nn.BatchNorm2d(C * i) for i in (1, 2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = [self.convs[0](x)]
        for i, norm in enumerate(self.norms):
            with torch.set_grad_enabled(i == 2):
                y = F.relu(norm(torch.cat(features, 1)))
            features.append(self.convs[i + 1](y))
        return torch.cat(features, 1)


class Dense(nn.Module):
    """A dense block with the one activation that the norms' kernels do not know."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(3, C, 1), nn.Conv2d(C, C, 1), nn.Conv2d(2 * C, C, 1)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(C), nn.BatchNorm2d(2 * C)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = [self.convs[0](x)]
        for norm, conv in zip(self.norms, self.convs[1:], strict=True):
            features.append(conv(F.gelu(norm(torch.cat(features, 1)), approximate="tanh")))
        return torch.cat(features, 1)


class DenseOfWhatChanges(Dense):
    """The second concatenation has another first feature map than the first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.convs[0](x)
        second = self.convs[1](self.norms[0](torch.cat([first], 1)))
        first.flatten(2).mul_(2.0)
        return self.convs[2](self.norms[1](torch.cat([first, second], 1)))


class FrozenNormWhoseInputChanges(Base):
    """Nothing needs the norm's input for a backward, so it may change before the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.repeat(1, 8, 1, 1)[:, :C].contiguous()
        z = self.norm(y)
        y.flatten(2).mul_(2.0)
        return F.relu(z + self.a(x)) + y


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.down, self.up = nn.Conv2d(3, C, 3, padding=1), nn.Linear(C, 8), nn.Linear(8, C)

    def gate(self, mean: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.up(F.relu(self.down(mean))))


class GateOfColumns(Gate):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        return y * self.gate(y.mean((2, 3))).view(len(y), 1, 1, C)


class GateOfRows(Gate):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        return y * self.gate(y.mean((2, 3))).view(len(y), 1, C, 1)


class FrozenGate(Gate):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        with torch.no_grad():
            gate = self.gate(y.mean((2, 3)))
        return y * gate.view(len(y), C, 1, 1)


class FrozenSqueeze(Gate):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        with torch.no_grad():
            mean = y.mean((2, 3))
        return y * self.gate(mean).view(len(y), C, 1, 1)


class ScaledWhatHasChanged(Gate):
    """The gate belongs to what the tensor was."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        rows = y.flatten(2)
        gate = self.gate(y.mean((2, 3))).view(len(y), C, 1, 1)
        rows.mul_(2.0)
        return y * gate


class ChangedBeforeTheConcatenation(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, branch = self.branches(x)
        part = y[:, :, ::2, ::2]
        large = F.interpolate(y, scale_factor=2)
        part.mul_(2.0)
        return torch.cat([large, F.interpolate(branch, scale_factor=2)], 1)


class ByHand(Base):
    """Layer normalisation as ConvNeXt's own code has it, but for what a keyword changes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(C)), nn.Parameter(torch.rand(C))

    def difference(self, y: torch.Tensor) -> torch.Tensor:
        return y - y.mean(1, keepdim=True)

    def power(self, y: torch.Tensor) -> torch.Tensor:
        return y.pow(2)

    def root(self, square: torch.Tensor) -> torch.Tensor:
        return torch.sqrt(square.mean(1, keepdim=True) + 1e-6)

    def normalised(self, y: torch.Tensor) -> torch.Tensor:
        y = self.difference(y)
        y = y / self.root(self.power(y))
        return self.weight[:, None, None] * y + self.bias[:, None, None]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.normalised(self.a(x))


class LessTwiceTheMean(ByHand):
    def difference(self, y: torch.Tensor) -> torch.Tensor:
        return torch.sub(y, y.mean(1, keepdim=True), alpha=2)


class MoreThanEpsilon(ByHand):
    def root(self, square: torch.Tensor) -> torch.Tensor:
        return torch.sqrt(torch.add(square.mean(1, keepdim=True), 1e-6, alpha=1_000_000))


class CubedByKeyword(ByHand):
    def power(self, y: torch.Tensor) -> torch.Tensor:
        return torch.pow(y.abs(), exponent=3)


class InstanceNorm(Base):
    """Of a channels_last input PyTorch's norm keeps a copy for its backward, so that it may change."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm2d(C, affine=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x).contiguous(memory_format=torch.channels_last) * 1.0
        z = self.norm(y)
        self.change(y)
        return z + y

    def change(self, y: torch.Tensor) -> None:
        y[:, 8:].zero_()


class InstanceNormWhoseInputIsSeen(InstanceNorm):
    def change(self, y: torch.Tensor) -> None:
        torch._dynamo.graph_break()
        y.flatten(2).mul_(2.0)


class ByHandOfWhatChanges(ByHand):
    """The plain backward reads the difference alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        z = self.normalised(y)
        self.change(y)
        return z + y

    def change(self, y: torch.Tensor) -> None:
        y[:, 8:].zero_()


class ByHandOfWhatIsSeen(ByHandOfWhatChanges):
    def change(self, y: torch.Tensor) -> None:
        torch._dynamo.graph_break()
        y.flatten(2).mul_(2.0)


class ConcatenatedIntoABuffer(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(2, 2 * C, 2 * C, 2 * C))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, branch = self.branches(x)
        with torch.no_grad():
            torch.cat([F.interpolate(y, scale_factor=2), F.interpolate(branch, scale_factor=2)], 1, out=self.kept)
        return y + self.kept.mean()


class MeansInAnotherDtype(Gate):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        gate = self.gate(y.mean((2, 3), dtype=torch.float64).float()).view(len(y), C, 1, 1)
        return y * gate + y.mean((2, 3), keepdim=True, dtype=torch.float64)


# Net → family, what is matched all the same, and what is said of the rest.
NETS: dict[type[nn.Module], tuple[str, set[str], set[str]]] = {
    ShortcutWrittenInto: ("batchnorm_act", {"bn+add"}, set()),
    InputWrittenInto: ("batchnorm_act", {"bn"}, set()),
    ShortcutChangedAfterTheSum: ("batchnorm_act", {"bn"}, set()),
    AddendChangedAfterTheSum: ("bias_act", set(), set()),
    FrozenTrunk: ("batchnorm_act", {"bn"}, set()),
    FrozenConvolution: ("bias_act", set(), set()),
    FrozenScale: ("bias_act", set(), set()),
    FrozenPermutes: ("layer_norm", {"layernorm"}, set()),
    FrozenStart: (
        "batchnorm_concat",
        {"bn+relu over 1 feature maps", "bn+relu over 2 feature maps"},
        {"no other norm"},
    ),
    Dense: ("batchnorm_concat", {"bn over 1 feature maps", "bn over 2 feature maps"}, set()),
    GateOfColumns: ("squeeze_excite", set(), {"its gate is no factor a sample and channel"}),
    GateOfRows: ("squeeze_excite", set(), {"its gate is no factor a sample and channel"}),
    ScaledWhatHasChanged: ("squeeze_excite", set(), {"its input is changed in place elsewhere"}),
    ChangedBeforeTheConcatenation: ("upsample", {"nearest+cat"}, {"its input is changed in place elsewhere"}),
    LessTwiceTheMean: ("layer_norm", set(), set()),
    MoreThanEpsilon: ("layer_norm", set(), set()),
    CubedByKeyword: ("layer_norm", set(), set()),
    InstanceNorm: ("group_norm", set(), {"its input is changed in place elsewhere"}),
    InstanceNormWhoseInputIsSeen: ("group_norm", set(), {"its input leaves the graph"}),
    ByHandOfWhatChanges: ("layer_norm", set(), {"its input is changed in place elsewhere"}),
    ByHandOfWhatIsSeen: ("layer_norm", set(), {"its input leaves the graph"}),
    DenseOfWhatChanges: ("batchnorm_concat", set(), {"a feature map is changed in place"}),
    FrozenNormWhoseInputChanges: ("batchnorm_act", set(), {"its input is changed in place elsewhere"}),
    MeansInAnotherDtype: ("pooling", set(), set()),
    ConcatenatedIntoABuffer: ("upsample", {"nearest"}, set()),
    FrozenGate: ("squeeze_excite", set(), {"a part of it runs without gradients"}),
    FrozenSqueeze: ("squeeze_excite", set(), {"a part of it runs without gradients"}),
}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with dispatch.everything():
        yield
    torch._dynamo.reset()


def trained(net: nn.Module, run: object) -> dict[str, torch.Tensor | None]:
    """What a forward and a backward leave: output, gradients, buffers, and what the caller handed in."""
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(2, 3, C, C, generator=generator)]
    if isinstance(net, InputWrittenInto):
        given.append(torch.randn(2, C, C, C, generator=generator))
    y = run(*given)
    (y * torch.randn(y.shape, generator=generator)).sum().backward()
    left = {f"grad {name}": p.grad for name, p in net.named_parameters()}
    left |= dict(net.named_buffers())
    return left | {"y": y.detach()} | {f"given {i}": x.detach() for i, x in enumerate(given)}


def captured(net: nn.Module) -> tuple[dict[str, match.MatchReport], dict[str, torch.Tensor | None]]:
    """The reports of all families, and what a training step on the rewritten graph leaves."""
    reports = {family.id: match.MatchReport() for family in catalog.FAMILIES if family.captured}
    run = torch.compile(net.forward, backend=dynamo.backend(reports, mode=None), dynamic=False)
    return reports, trained(net, run)


def alike(net: nn.Module) -> dict[str, match.MatchReport]:
    """The reports, once the net is seen to train as the plain one."""
    plain = copy.deepcopy(net)
    want = trained(plain, plain)
    reports, got = captured(net)
    for name, tensor in want.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-3, atol=1e-3, msg=lambda text, at=name: f"{at}: {text}")
    assert not [why for report in reports.values() for why in report.unmatched.values() if "failed" in why]
    return reports


@pytest.mark.parametrize("net", NETS)
def test_it_trains_as_the_plain_net(net: type[nn.Module]) -> None:
    torch.manual_seed(0)
    family, matched, reasons = NETS[net]
    report = alike(net().train())[family]
    assert set(report.matched.values()) == matched
    assert len(reasons) == len({r for r in reasons if any(r in why for why in report.unmatched.values())})


class Around(Base):
    """Something without gradients stands between, in the order of the program only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut, branch = self.branches(x)
        with torch.no_grad():
            level = x.mean()
        return F.relu(branch + shortcut) * level


class WrittenIntoTheBranch(Base):
    """`out += shortcut`, as ResNets write it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut, out = self.branches(x)
        out += shortcut
        return F.relu(out, inplace=True) + shortcut


class ByStatement(Base):
    """`out.add_(shortcut)`, whose result is not taken up."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut, out = self.branches(x)
        out.add_(shortcut)
        return F.relu(out) + shortcut


class ChangedBeforeTheNorm(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        y.mul_(2.0)
        return F.relu(self.norm(y))


class ByKeyword(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(input=self.norm(self.a(x)))
        return F.max_pool2d(input=F.relu(input=self.b(x), inplace=True), kernel_size=2).mean() + y


class WholeMomentum(Base):
    """A number, as users write it: only the last batch counts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(C, momentum=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.norm(self.a(x)))


@pytest.mark.parametrize(
    ("net", "family", "found"),
    [
        (Around, "batchnorm_act", {"bn+add+relu"}),
        (ByHand, "layer_norm", {"layernorm with its permutes"}),
        (WrittenIntoTheBranch, "batchnorm_act", {"bn+add+relu"}),
        (ByStatement, "batchnorm_act", {"bn+add+relu"}),
        (ChangedBeforeTheNorm, "batchnorm_act", {"bn+relu"}),
        (ByKeyword, "batchnorm_act", {"bn+relu"}),
        (ByKeyword, "pooling", {"bias+relu+max_pool k2s2"}),
        (WholeMomentum, "batchnorm_act", {"bn+relu"}),
    ],
)
def test_what_is_a_pattern_after_all_is_found(net: type[nn.Module], family: str, found: set[str]) -> None:
    torch.manual_seed(0)
    assert set(alike(net().train())[family].matched.values()) == found
