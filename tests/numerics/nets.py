"""Small trainings of many kinds, a few milliseconds a step on a CPU: what the numeric gate is measured on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Step = Callable[[], None]


@dataclass
class Training:
    """The models of a script, its optimizers, and what it does in a step."""

    models: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]
    step: Step


@dataclass(frozen=True)
class Kind:
    """A training by name; `autocast`: the script computes in bf16 itself."""

    name: str
    make: Callable[[], Training]
    autocast: bool = False
    traits: frozenset[str] = field(default_factory=frozenset)


def supervised(
    model: nn.Module,
    batch: Callable[[], tuple[Any, ...]],
    loss: Callable[..., Tensor],
    *,
    autocast: bool = False,
    optimizer: str = "sgd",
    lr: float = 0.02,
) -> Training:
    """One model, one optimizer. `batch` gives the model's inputs and, last, the target."""
    chosen: torch.optim.Optimizer
    trained = [p for p in model.parameters() if p.requires_grad]
    if optimizer == "sgd":
        chosen = torch.optim.SGD(trained, lr=lr, momentum=0.9, weight_decay=1e-4)
    elif optimizer == "adam":
        chosen = torch.optim.Adam(trained, lr=1e-3)
    else:
        chosen = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.05)

    def step() -> None:
        *inputs, target = batch()
        with torch.autocast(target.device.type, dtype=torch.bfloat16, enabled=autocast):
            output = model(*inputs)
        value = loss(output, target)
        chosen.zero_grad()
        value.backward()
        chosen.step()

    return Training([model], [chosen], step)


def images(channels: int = 3, size: int = 16, rows: int = 8, dims: int = 2) -> Tensor:
    """A batch with something to learn in it: smooth fields and noise."""
    coarse = torch.randn(rows, channels, *[max(2, size // 4)] * dims)
    mode = {1: "linear", 2: "bilinear", 3: "trilinear"}[dims]
    return F.interpolate(coarse, size=[size] * dims, mode=mode) + 0.3 * torch.randn(rows, channels, *[size] * dims)


def labelled(classes: int = 5, **options: Any) -> Callable[[], tuple[Tensor, Tensor]]:
    def batch() -> tuple[Tensor, Tensor]:
        x = images(**options)
        means = x.flatten(2).mean(2)
        return x, (means[:, 0] * 3 + 2.5 * (means[:, -1] > 0)).long().clamp(0, classes - 1)

    return batch


def mapped(**options: Any) -> Callable[[], tuple[Tensor, Tensor]]:
    """Images and a class for each pixel."""

    def batch() -> tuple[Tensor, Tensor]:
        x = images(**options)
        return x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()

    return batch


def conv(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, dilation: int = 1, **options: Any) -> nn.Conv2d:
    padding = dilation * (kernel // 2)
    return nn.Conv2d(inputs, outputs, kernel, stride, padding, dilation, **options)


def conv_norm(inputs: int, outputs: int, *args: Any, bias: bool = False, **options: Any) -> nn.Sequential:
    return nn.Sequential(conv(inputs, outputs, *args, bias=bias, **options), nn.BatchNorm2d(outputs), nn.ReLU())


class Basic(nn.Module):
    """A residual block."""

    def __init__(
        self, inputs: int, outputs: int, stride: int = 1, dilation: int = 1, norm: Any = nn.BatchNorm2d
    ) -> None:
        super().__init__()
        self.conv1, self.norm1 = conv(inputs, outputs, 3, stride, dilation, bias=False), norm(outputs)
        self.conv2, self.norm2 = conv(outputs, outputs, 3, 1, dilation, bias=False), norm(outputs)
        self.relu = nn.ReLU()
        self.down = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.down = nn.Sequential(conv(inputs, outputs, 1, stride, bias=False), norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        return self.relu(self.norm2(self.conv2(y)) + self.down(x))


class Scales(nn.Module):
    """Res2Net's block: groups of channels, each convolution fed with the one before."""

    def __init__(self, width: int, groups: int = 4) -> None:
        super().__init__()
        self.groups, part = groups, width // groups
        self.first, self.last = (
            conv_norm(width, width, 1),
            nn.Sequential(conv(width, width, 1, bias=False), nn.BatchNorm2d(width)),
        )
        self.parts = nn.ModuleList(conv_norm(part, part) for _ in range(groups - 1))
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        pieces = self.first(x).chunk(self.groups, 1)
        done, before = [pieces[0]], torch.zeros_like(pieces[0])
        for piece, part in zip(pieces[1:], self.parts, strict=True):
            before = part(piece + before)
            done.append(before)
        return self.relu(x + self.last(torch.cat(done, 1)))


def resnet(width: int, depth: int, norm: Any = nn.BatchNorm2d, dilated: bool = False) -> nn.Sequential:
    layers: list[nn.Module] = [conv(3, width, bias=False), norm(width), nn.ReLU()]
    for stage in range(3):
        for block in range(depth):
            inputs = width * (1 if stage == 0 else 2 ** (stage - 1) if block == 0 else 2**stage)
            stride = 2 if stage and not block and not (dilated and stage == 2) else 1
            layers.append(Basic(inputs, width * 2**stage, stride, 2 if dilated and stage == 2 else 1, norm))
    return nn.Sequential(*layers)


class Classifier(nn.Module):
    """Features, a mean over pixels, and a linear layer."""

    def __init__(self, features: nn.Module, width: int, classes: int = 5, dropout: float = 0.0) -> None:
        super().__init__()
        self.features, self.dropout, self.head = features, nn.Dropout(dropout), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(self.features(x).flatten(2).mean(2)))


class Atrous(nn.Module):
    """DeepLab's head: dilated branches side by side, a pooled one, dropout; the upsampled map."""

    def __init__(self, features: nn.Module, width: int, skip: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.features, inner = features, 16
        self.branches = nn.ModuleList(
            [conv_norm(width, inner, 1), *(conv_norm(width, inner, 3, 1, d) for d in (2, 4, 6))]
        )
        self.pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), conv_norm(width, inner, 1))
        self.project = nn.Sequential(conv_norm(5 * inner, inner, 1), nn.Dropout(dropout))
        self.low = conv_norm(3, 8) if skip else None
        self.last = nn.Sequential(conv_norm(inner + 8 * skip, inner), conv(inner, 3, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.features(x)
        pooled = F.interpolate(self.pooled(y), size=y.shape[2:], mode="bilinear", align_corners=False)
        y = self.project(torch.cat([*(branch(y) for branch in self.branches), pooled], 1))
        y = F.interpolate(y, size=x.shape[2:], mode="bilinear", align_corners=False)
        return self.last(y if self.low is None else torch.cat([y, self.low(x)], 1))


class UNet(nn.Module):
    """Two halvings and back, with skips; `dims` 2 or 3. With `time`, a step number goes into every level (diffusion)."""

    def __init__(
        self, norm: str = "batch", dims: int = 2, width: int = 8, time: bool = False, outputs: int = 3, inputs: int = 3
    ) -> None:
        super().__init__()
        make = {2: nn.Conv2d, 3: nn.Conv3d}[dims]
        kinds = {"batch": (nn.BatchNorm2d, nn.BatchNorm3d), "instance": (nn.InstanceNorm2d, nn.InstanceNorm3d)}

        def norm_of(channels: int) -> nn.Module:
            if norm == "group":
                return nn.GroupNorm(4, channels)
            return kinds[norm][dims - 2](channels, affine=True)

        def block(a: int, b: int) -> nn.Sequential:
            return nn.Sequential(
                make(a, b, 3, padding=1), norm_of(b), nn.LeakyReLU(0.01),
                make(b, b, 3, padding=1), norm_of(b), nn.SiLU() if time else nn.LeakyReLU(0.01),
            )  # fmt: skip

        self.one, self.two, self.three = block(inputs, width), block(width, 2 * width), block(2 * width, 4 * width)
        self.up2, self.up1 = block(6 * width, 2 * width), block(3 * width, width)
        self.last = make(width, outputs, 1)
        self.pool = nn.MaxPool2d(2) if dims == 2 else nn.MaxPool3d(2)
        self.time = nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 4 * width)) if time else None

    def forward(self, x: Tensor, t: Tensor | None = None) -> Tensor:
        a = self.one(x)
        b = self.two(self.pool(a))
        c = self.three(self.pool(b))
        if self.time is not None and t is not None:
            waves = t[:, None].float() * torch.tensor([0.1, 0.3, 1.0, 3.0], device=t.device)
            c = c + self.time(torch.cat([waves.sin(), waves.cos()], 1))[(..., *[None] * (x.dim() - 2))]
        b = self.up2(torch.cat([F.interpolate(c, scale_factor=2.0), b], 1))
        return self.last(self.up1(torch.cat([F.interpolate(b, scale_factor=2.0), a], 1)))


class FrozenNorm(nn.BatchNorm2d):
    """A batch norm of a pretrained net: its statistics and weights stay."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.running_var.uniform_(0.2, 0.6)
        for p in self.parameters():
            p.requires_grad_(False)

    def train(self, mode: bool = True) -> FrozenNorm:
        super().train(False)
        return self


class Pyramid(nn.Module):
    """A detector: frozen norms, a feature pyramid, class and box heads; or, with `losses`, the loss computed inside."""

    def __init__(self, norm: Any = FrozenNorm, losses: bool = False) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv(3, 8, bias=False), norm(8), nn.ReLU())
        self.c3, self.c4, self.c5 = Basic(8, 16, 2, norm=norm), Basic(16, 24, 2, norm=norm), Basic(24, 32, 2, norm=norm)
        self.lateral = nn.ModuleList(conv(c, 16, 1) for c in (16, 24, 32))
        self.smooth = nn.ModuleList(conv(16, 16) for _ in range(3))
        self.classes = nn.Sequential(conv(16, 16), nn.GroupNorm(4, 16), nn.ReLU(), conv(16, 4))
        self.boxes = nn.Sequential(conv(16, 16), nn.ReLU(), conv(16, 4))
        self.losses = losses

    def forward(self, x: Tensor, wanted: Tensor | None = None) -> Any:
        c3 = self.c3(self.stem(x))
        c4 = self.c4(c3)
        p = [side(c) for side, c in zip(self.lateral, (c3, c4, self.c5(c4)), strict=True)]
        p[1] = p[1] + F.interpolate(p[2], size=p[1].shape[2:])
        p[0] = p[0] + F.interpolate(p[1], size=p[0].shape[2:])
        p = [smooth(level) for smooth, level in zip(self.smooth, p, strict=True)]
        classes, boxes = ([head(level).flatten(2) for level in p] for head in (self.classes, self.boxes))
        found = torch.cat(classes, 2), torch.cat(boxes, 2)
        return detection_loss(found, wanted) if self.losses and wanted is not None else found


def detection_loss(found: tuple[Tensor, Tensor], wanted: Tensor) -> Tensor:
    classes, boxes = (t.float() for t in found)
    target = (wanted[:, None, None] > 0).float().expand_as(classes)
    return F.binary_cross_entropy_with_logits(classes, target) + F.smooth_l1_loss(
        boxes, wanted[:, None, None].expand_as(boxes)
    )


class Pose(nn.Module):
    """Two resolutions that exchange features (HRNet), heat maps at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_norm(3, 16)
        self.high, self.low = (
            nn.Sequential(Basic(16, 16), Basic(16, 16)),
            nn.Sequential(Basic(16, 32, 2), Basic(32, 32)),
        )
        self.down, self.up = (
            nn.Sequential(conv(16, 32, 3, 2, bias=False), nn.BatchNorm2d(32)),
            nn.Sequential(conv(32, 16, 1, bias=False), nn.BatchNorm2d(16)),
        )
        self.high2, self.low2 = Basic(16, 16), Basic(32, 32)
        self.last = conv(48, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        high, low = self.high(x), self.low(x)
        both = F.relu(high + F.interpolate(self.up(low), scale_factor=2.0)), F.relu(low + self.down(high))
        high, low = self.high2(both[0]), self.low2(both[1])
        return self.last(torch.cat([high, F.interpolate(low, scale_factor=2.0, mode="bilinear")], 1))


class Residual1d(nn.Module):
    def __init__(self, inputs: int, outputs: int, dropout: float) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv1d(inputs, outputs, 7, padding=3, bias=False), nn.BatchNorm1d(outputs)
        self.conv2, self.bn2 = nn.Conv1d(outputs, outputs, 7, 2, padding=3, bias=False), nn.BatchNorm1d(outputs)
        self.drop1, self.drop2, self.relu = nn.Dropout(dropout), nn.Dropout(dropout), nn.ReLU()
        self.skip = nn.Sequential(nn.MaxPool1d(2), nn.Conv1d(inputs, outputs, 1, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop1(self.relu(self.bn1(self.conv1(x))))
        return self.drop2(self.relu(self.bn2(self.conv2(y) + self.skip(x))))


class Waves(nn.Module):
    """A residual net over signals (ECG), with dropout behind every norm."""

    def __init__(self, dropout: float = 0.8, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu = (
            nn.Conv1d(4, width, 7, padding=3, bias=False),
            nn.BatchNorm1d(width),
            nn.ReLU(),
        )
        self.blocks = nn.Sequential(*(Residual1d(width, width, dropout) for _ in range(depth)))
        self.head = nn.Linear(width * (64 >> depth), 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.relu(self.bn1(self.conv1(x)))).flatten(1))


class Causal(nn.Module):
    """Dilated causal convolutions over a signal with weight norm (TCN)."""

    def __init__(self) -> None:
        super().__init__()
        normed = torch.nn.utils.parametrizations.weight_norm
        self.convs = nn.ModuleList(normed(nn.Conv1d(4 if i == 0 else 16, 16, 3, dilation=2**i)) for i in range(4))
        self.dropout, self.head = nn.Dropout(0.1), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.convs):
            y = self.dropout(F.relu(layer(F.pad(x, (2 * 2**i, 0)))))
            x = y if i == 0 else x + y
        return self.head(x[:, :, -1])


class Basic3d(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv3d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm3d(outputs)
        self.conv2, self.norm2 = nn.Conv3d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm3d(outputs)
        self.down = nn.Sequential(nn.Conv3d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm3d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.down(x))


class Refinement(nn.Module):
    """RAFT in small: features of two images, their correlation, and a recurrent unit that refines a flow several times."""

    def __init__(self, turns: int = 4) -> None:
        super().__init__()
        self.turns = turns
        self.encoder = nn.Sequential(
            conv(3, 16, 3, 2), nn.InstanceNorm2d(16), nn.ReLU(), Basic(16, 16, norm=nn.InstanceNorm2d)
        )
        self.context = nn.Sequential(conv(3, 16, 3, 2), nn.BatchNorm2d(16), nn.ReLU(), Basic(16, 32))
        self.motion = nn.Sequential(conv(11, 16), nn.ReLU())
        self.gate, self.new = conv(48, 32), conv(48, 16)
        self.flow = nn.Sequential(conv(16, 16), nn.ReLU(), conv(16, 2))

    def forward(self, one: Tensor, two: Tensor) -> list[Tensor]:
        a, b = self.encoder(torch.cat([one, two])).chunk(2)
        shifts = [torch.roll(b, (i, j), (2, 3)) for i in (-1, 0, 1) for j in (-1, 0, 1)]
        correlation = torch.stack([(a * s).mean(1) for s in shifts], 1)
        state, fixed = self.context(one).chunk(2, 1)
        state, fixed = torch.tanh(state), torch.relu(fixed)
        flow, flows = torch.zeros_like(one[:, :2, ::2, ::2]), []
        for _ in range(self.turns):
            flow = flow.detach()
            seen = torch.cat([fixed, self.motion(torch.cat([correlation, flow], 1))], 1)
            z, r = torch.sigmoid(self.gate(torch.cat([state, seen], 1))).chunk(2, 1)
            state = (1 - z) * state + z * torch.tanh(self.new(torch.cat([r * state, seen], 1)))
            flow = flow + self.flow(state)
            flows.append(F.interpolate(flow, scale_factor=2.0, mode="bilinear"))
        return flows


class Separable(nn.Module):
    """MobileNet's block with squeeze and excite."""

    def __init__(self, width: int, stride: int = 1) -> None:
        super().__init__()
        wide = 4 * width
        self.expand = nn.Sequential(conv(width, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.SiLU())
        self.depthwise = nn.Sequential(
            conv(wide, wide, 3, stride, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.SiLU()
        )
        self.squeeze = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), conv(wide, 8, 1), nn.SiLU(), conv(8, wide, 1), nn.Sigmoid()
        )
        self.project = nn.Sequential(conv(wide, width, 1, bias=False), nn.BatchNorm2d(width))
        self.residual = stride == 1

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(self.expand(x))
        y = self.project(y * self.squeeze(y))
        return x + y if self.residual else y


class Dense(nn.Module):
    """DenseNet's layers: each sees all before it."""

    def __init__(self, width: int = 8, layers: int = 8) -> None:
        super().__init__()
        self.first = conv(3, width, bias=False)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(width * (i + 1)), nn.ReLU(), conv(width * (i + 1), width, bias=False))
            for i in range(layers)
        )
        self.pool = nn.AvgPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.first(x))
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return x


class Mixer(nn.Module):
    """ConvNeXt's block: depthwise 7x7, layer norm over channels, two linear layers, a layer scale, stochastic depth."""

    def __init__(self, width: int, drop: float = 0.0) -> None:
        super().__init__()
        self.depthwise, self.norm = conv(width, width, 7, groups=width), nn.LayerNorm(width)
        self.up, self.act, self.down = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        self.scale, self.drop = nn.Parameter(0.1 * torch.ones(width)), drop

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(x).permute(0, 2, 3, 1)
        y = (self.scale * self.down(self.act(self.up(self.norm(y))))).permute(0, 3, 1, 2)
        if self.drop and self.training:
            y = y * (torch.rand(len(x), 1, 1, 1, device=x.device) >= self.drop) / (1 - self.drop)
        return x + y


class Upscaler(nn.Module):
    """Super-resolution: residual blocks without norms, pixel shuffle."""

    def __init__(self) -> None:
        super().__init__()
        self.first = conv(3, 16)
        self.body = nn.ModuleList(nn.Sequential(conv(16, 16), nn.ReLU(), conv(16, 16)) for _ in range(4))
        self.last = nn.Sequential(conv(16, 64), nn.PixelShuffle(2), conv(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        y = first = self.first(x)
        for block in self.body:
            y = y + 0.5 * block(y)
        return self.last(y + first)


class Attention(nn.Module):
    """A small vision transformer over patches."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.place = nn.Parameter(0.02 * torch.randn(1, 16, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2) + self.place
        return self.head(self.layers(x).mean(1))


def adversarial(norm: Any, instance: bool = False) -> Training:
    """A generator and a discriminator with an optimizer each."""
    generator = nn.Sequential(
        nn.ConvTranspose2d(16, 32, 4, 1, 0, bias=False), norm(32), nn.ReLU(),
        nn.ConvTranspose2d(32, 16, 4, 2, 1, bias=False), norm(16), nn.ReLU(),
        nn.ConvTranspose2d(16, 3, 4, 2, 1), nn.Tanh(),
    )  # fmt: skip
    discriminator = nn.Sequential(
        conv(3, 16, 3, 2), nn.LeakyReLU(0.2), conv(16, 32, 3, 2, bias=False),
        nn.InstanceNorm2d(32) if instance else nn.BatchNorm2d(32), nn.LeakyReLU(0.2), conv(32, 1, 3, 2),
    )  # fmt: skip
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Adam(m.parameters(), lr=1e-3, betas=(0.5, 0.99)) for m in (generator, discriminator)
    ]

    def step() -> None:
        real = torch.tanh(images())
        fake = generator(torch.randn(8, 16, 1, 1))
        optimizers[1].zero_grad()
        of_real, of_fake = discriminator(real), discriminator(fake.detach())
        (F.softplus(-of_real).mean() + F.softplus(of_fake).mean()).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        F.softplus(-discriminator(fake)).mean().backward()
        optimizers[0].step()

    return Training([generator, discriminator], optimizers, step)


def flows() -> tuple[Tensor, Tensor, Tensor]:
    one = images(size=16, rows=4)
    move = torch.randint(-1, 2, (2,)).tolist()
    two = torch.roll(one, move, (2, 3))
    return one, two, torch.tensor(move, dtype=torch.float32).view(1, 2, 1, 1).expand(4, 2, 16, 16)


def flow_loss(found: list[Tensor], wanted: Tensor) -> Tensor:
    return torch.stack([0.8 ** (len(found) - i) * (f - wanted).abs().mean() for i, f in enumerate(found)]).sum()


def noised() -> tuple[Tensor, Tensor, Tensor]:
    x, t, noise = images(), torch.randint(1, 100, (8,)), torch.randn(8, 3, 16, 16)
    share = (t / 100).view(-1, 1, 1, 1)
    return (1 - share).sqrt() * x + share.sqrt() * noise, t, noise


def boxes() -> tuple[Tensor, Tensor]:
    x = images()
    return x, x.flatten(1).mean(1) * 3


def heat() -> tuple[Tensor, Tensor]:
    x = images()
    return x, torch.sigmoid(torch.cat([x, -x], 1))


def volumes(classes: int = 0) -> Callable[[], tuple[Tensor, Tensor]]:
    def batch() -> tuple[Tensor, Tensor]:
        x = images(2, 12, 2, dims=3)
        return x, (x.flatten(1).mean(1) > 0).long() if classes else (x[:, 0] > 0).long()

    return batch


def halves() -> tuple[Tensor, Tensor]:
    x = images()
    return F.avg_pool2d(x, 2), x


CE, MSE = F.cross_entropy, F.mse_loss


def _kinds() -> list[Kind]:
    def of(name: str, make: Callable[[], nn.Module], batch: Any, loss: Any, *traits: str, **options: Any) -> Kind:
        autocast = bool(options.get("autocast"))
        return Kind(name, lambda: supervised(make(), batch, loss, **options), autocast, frozenset(traits))

    signals = labelled(channels=4, size=64, rows=16, dims=1)
    classes = labelled()
    dense = Classifier
    return [
        of("segmentation, atrous", lambda: Atrous(resnet(8, 1, dilated=True), 32, skip=True), mapped(), CE),
        of("segmentation, atrous, deep", lambda: Atrous(resnet(8, 10, dilated=True), 32), mapped(rows=2, size=8), CE),
        of("segmentation, Res2Net", lambda: Atrous(nn.Sequential(conv_norm(3, 32), *(Scales(32) for _ in range(2))), 32), mapped(), CE),
        of("segmentation, Res2Net, deep", lambda: Atrous(nn.Sequential(conv_norm(3, 16, 3, 2), *(Scales(16) for _ in range(20))), 16), mapped(rows=2, size=8), CE),
        of("segmentation, UNet", lambda: UNet(), mapped(), CE, optimizer="adam"),
        of("segmentation, dropout", lambda: Atrous(resnet(8, 1), 32, dropout=0.5), mapped(), CE, "dropout"),
        of("detection, frozen norms", lambda: Pyramid(), boxes, detection_loss),
        of("detection, loss inside", _detector_with_loss, boxes_twice, _itself, "loss inside"),
        of("pose", lambda: Pose(), heat, MSE, optimizer="adam"),
        of("1-D, dropout 0.8", lambda: Waves(0.8), signals, CE, "dropout", optimizer="adam"),
        of("1-D, dropout 0.2", lambda: Waves(0.2, depth=3), signals, CE, "dropout"),
        of("1-D, causal", lambda: Causal(), signals, CE, "dropout", optimizer="adam"),
        of("3-D, ResNet", lambda: _volume_classifier(), volumes(2), CE),
        of("3-D, UNet", lambda: UNet("instance", 3, 8, outputs=2, inputs=2), volumes(), CE),
        Kind("GAN, batch norm", lambda: adversarial(nn.BatchNorm2d), traits=frozenset({"several models"})),
        Kind("GAN, instance norm", lambda: adversarial(nn.InstanceNorm2d, True), traits=frozenset({"several models"})),
        of("diffusion, group norm", lambda: UNet("group", time=True), noised, MSE, optimizer="adamw"),
        of("diffusion, wide", lambda: UNet("group", time=True, width=12), noised, MSE, optimizer="adam"),
        of("refinement", lambda: Refinement(), flows, flow_loss, optimizer="adamw"),
        of("refinement, long", lambda: Refinement(8), flows, flow_loss, optimizer="adamw"),
        of("classifier, ResNet", lambda: dense(resnet(8, 2), 32), classes, CE),
        of("classifier, ResNet, deep", lambda: dense(resnet(8, 8), 32), labelled(rows=4, size=8), CE),
        of("segmentation, atrous, deeper", lambda: Atrous(resnet(8, 12, dilated=True), 32, skip=True), mapped(rows=3, size=8), CE),
        of("classifier, plain", lambda: dense(nn.Sequential(conv_norm(3, 16, bias=True), conv_norm(16, 32, 3, 2, bias=True), conv_norm(32, 32, bias=True)), 32), classes, CE),
        of("classifier, dropout", lambda: dense(nn.Sequential(conv(3, 16, 3, 2), nn.ReLU(), conv(16, 64, 3, 2), nn.ReLU()), 64, dropout=0.5), classes, CE, "dropout"),
        of("classifier, MobileNet", lambda: dense(nn.Sequential(conv_norm(3, 16, 3, 2), Separable(16), Separable(16, 2), Separable(16)), 16), classes, CE),
        of("classifier, DenseNet", lambda: dense(Dense(), 72), classes, CE),
        of("classifier, ConvNeXt", lambda: dense(nn.Sequential(nn.Conv2d(3, 24, 2, 2), *(Mixer(24) for _ in range(3))), 24), classes, CE, optimizer="adamw"),
        of("classifier, stochastic depth", lambda: dense(nn.Sequential(nn.Conv2d(3, 24, 2, 2), *(Mixer(24, 0.2) for _ in range(3))), 24), classes, CE, "dropout", optimizer="adamw"),
        of("classifier, transformer", lambda: Attention(), classes, CE, "dropout", optimizer="adamw"),
        of("super-resolution", lambda: Upscaler(), halves, MSE, optimizer="adam"),
        of("classifier in bf16", lambda: dense(resnet(8, 2), 32), classes, CE, autocast=True),
        of("segmentation in bf16", lambda: Atrous(resnet(8, 1), 32), mapped(), CE, autocast=True),
    ]  # fmt: skip


def _itself(output: Tensor, _: Tensor) -> Tensor:
    return output


def _detector_with_loss() -> nn.Module:
    return Pyramid(nn.BatchNorm2d, losses=True)


def boxes_twice() -> tuple[Tensor, Tensor, Tensor]:
    x, wanted = boxes()
    return x, wanted, wanted


def _volume_classifier() -> nn.Module:
    return Classifier(
        nn.Sequential(
            nn.Conv3d(2, 8, 3, padding=1, bias=False),
            nn.BatchNorm3d(8),
            nn.ReLU(),
            Basic3d(8, 16, 1),
            Basic3d(16, 32, 2),
        ),
        32,
        2,
    )


KINDS = _kinds()
