"""Small trainings with the loops that published ones have: what each does beside a forward, a loss and a backward."""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from advisor.loop.training import RootModule, Training


@dataclass
class Published:
    """A training: `step()` is one of its loop's and gives its loss."""

    device: torch.device
    nets: dict[str, nn.Module]
    step: Callable[[], torch.Tensor]
    optimizers: list[torch.optim.Optimizer]
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def training(self) -> Training:
        roots = [RootModule(module=net, name=name) for name, net in self.nets.items()]
        return Training(device=self.device, roots=roots, optimizers=self.optimizers)


# Here, where pytest does not rewrite assertions: meters are told by their source.
class SmoothedValue:
    """As torchvision's references have it."""

    def __init__(self, window_size: int = 4) -> None:
        self.deque = deque(maxlen=window_size)
        self.total = 0.0
        self.count = 0

    def update(self, value, n=1):
        self.deque.append(value)
        self.count += n
        self.total += value * n

    @property
    def median(self):
        return torch.tensor(list(self.deque)).median().item()

    @property
    def global_avg(self):
        return self.total / self.count

    @property
    def value(self):
        return self.deque[-1]


class MetricLogger:
    def __init__(self) -> None:
        self.meters = defaultdict(SmoothedValue)

    def update(self, **kwargs):
        for k, v in kwargs.items():
            if isinstance(v, torch.Tensor):
                v = v.item()
            assert isinstance(v, (float, int))
            self.meters[k].update(v)

    def __str__(self) -> str:
        return " ".join(f"{k} {m.median:.4f} {m.global_avg:.4f} {m.value:.4f}" for k, m in self.meters.items())


def _block(inside: int, outside: int, norm: type[nn.Module] = nn.BatchNorm2d, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inside, outside, 3, stride, 1), norm(outside), nn.ReLU(inplace=True))


# ── dilated convolutions with weight_norm's hooks; the sum of losses keeps its graphs ────────────────


class Chomp(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :, : -self.size].contiguous()


class Temporal(nn.Module):
    def __init__(self, width: int = 25, levels: int = 8) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # weight_norm's hooks are on their way out, and in every published training
            for i in range(levels):
                conv = nn.Conv1d(width if i else 1, width, 7, padding=6 * 2**i, dilation=2**i)
                layers += [nn.utils.weight_norm(conv), Chomp(6 * 2**i), nn.ReLU(), nn.Dropout(0.05)]
        self.net, self.fc = nn.Sequential(*layers), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.log_softmax(self.fc(self.net(x)[:, :, -1]), 1)


def temporal(device: torch.device) -> Published:
    net = Temporal().to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    state: dict[str, Any] = {"sum": 0, "n": 0}

    def step() -> torch.Tensor:
        x, y = torch.randn(64, 1, 784, device=device), torch.randint(10, (64,), device=device)
        optimizer.zero_grad()
        loss = F.nll_loss(net(x), y)
        loss.backward()
        optimizer.step()
        state["sum"] += loss
        state["n"] += 1
        if state["n"] % 20 == 0:
            state["mean"] = state["sum"].item() / 20
            state["sum"] = 0
        return loss.detach()

    return Published(device, {"Temporal": net}, step, [optimizer], state)


# ── optical flow: a recurrence with an option, frozen norms, partial half precision, masks in the loss ─


class Flow(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            _block(3, width, nn.InstanceNorm2d, 2),
            _block(width, width, nn.InstanceNorm2d, 2),
            nn.Conv2d(width, width, 3, 2, 1),
        )
        self.context = nn.Sequential(_block(3, width, nn.BatchNorm2d, 4), nn.Conv2d(width, width, 3, 2, 1))
        self.update = nn.Sequential(
            nn.Conv2d(3 * width + 2, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, 2, 3, padding=1)
        )

    def forward(self, one: torch.Tensor, other: torch.Tensor, iters: int = 12) -> list[torch.Tensor]:
        with torch.autocast(one.device.type, dtype=torch.bfloat16):
            first, second = self.encoder(torch.cat([one, other])).float().chunk(2)
            context = torch.tanh(self.context(one)).float()
        grid = torch.stack(
            torch.meshgrid(*(torch.arange(n, device=one.device) for n in first.shape[-2:]), indexing="ij")
        )
        flow, found = torch.zeros_like(first[:, :2]) + 0 * grid.float(), []
        for _ in range(iters):
            flow = flow.detach()
            with torch.autocast(one.device.type, dtype=torch.bfloat16):
                delta = self.update(torch.cat([first, second, context, flow], 1))
            flow = flow + delta.float()
            found.append(8 * F.interpolate(flow, scale_factor=8, mode="bilinear", align_corners=True))
        return found


def flow(device: torch.device) -> Published:
    net = Flow().to(device).train()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler(device.type)
    state: dict[str, Any] = {"running": {}}

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        one, other = (torch.rand(4, 3, 96, 128, device=device) for _ in range(2))
        truth, valid = torch.randn(4, 2, 96, 128, device=device), torch.rand(4, 96, 128, device=device)
        found = net(one, other, iters=8)
        known = (valid >= 0.5) & (truth.square().sum(1).sqrt() < 400)
        loss = sum(0.8 ** (7 - i) * (known[:, None] * (y - truth).abs()).mean() for i, y in enumerate(found))
        error = (found[-1] - truth).square().sum(1).sqrt().view(-1)[known.view(-1)]
        for name, value in {"epe": error.mean().item(), "1px": (error < 1).float().mean().item()}.items():
            state["running"][name] = state["running"].get(name, 0.0) + value
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return Published(device, {"Flow": net}, step, [optimizer], state)


# ── two views through one encoder ────────────────────────────────────────────────────────────────────


def two_views(device: torch.device) -> Published:
    encoder = nn.Sequential(
        _block(3, 32),
        _block(32, 64, stride=2),
        _block(64, 128, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, 64),
    ).to(device)
    predictor = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64)).to(device)
    optimizer = torch.optim.SGD([*encoder.parameters(), *predictor.parameters()], lr=0.05, momentum=0.9)

    def step() -> torch.Tensor:
        views = [torch.randn(64, 3, 32, 32, device=device) for _ in range(2)]
        z1, z2 = encoder(views[0]), encoder(views[1])
        p1, p2 = predictor(z1), predictor(z2)
        loss = -(F.cosine_similarity(p1, z2.detach()).mean() + F.cosine_similarity(p2, z1.detach()).mean()) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Published(device, {"Encoder": encoder, "Predictor": predictor}, step, [optimizer])


# ── image translation: a generator that also gives its features, a critic that learns and then only judges ─


class Generator(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.ReflectionPad2d(3), nn.Conv2d(3, width, 7), nn.InstanceNorm2d(width), nn.ReLU(True),
            _block(width, 2 * width, nn.InstanceNorm2d, 2), *(_block(2 * width, 2 * width, nn.InstanceNorm2d) for _ in range(4)),
            nn.Upsample(scale_factor=2), nn.Conv2d(2 * width, 3, 3, padding=1), nn.Tanh(),
        )  # fmt: skip

    def forward(self, x: torch.Tensor, layers: list[int] | None = None, encode_only: bool = False) -> Any:
        found = []
        for i, layer in enumerate(self.model):
            x = layer(x)
            if i in (layers or ()):
                found.append(x)
                if encode_only and i == (layers or [0])[-1]:
                    return found
        return x


def translation(device: torch.device) -> Published:
    generator, critic = Generator().to(device), nn.Sequential(
        nn.Conv2d(3, 32, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(32, 64, 4, 2, 1), nn.InstanceNorm2d(64), nn.LeakyReLU(0.2),
        nn.Conv2d(64, 1, 4, 1, 1),
    ).to(device)  # fmt: skip
    optimizers = [torch.optim.Adam(net.parameters(), lr=2e-4, betas=(0.5, 0.999)) for net in (generator, critic)]
    layers = [0, 4, 6]

    def features(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        queries, keys = generator(target, layers, encode_only=True), generator(source, layers, encode_only=True)
        return sum(
            (F.normalize(q, dim=1) * F.normalize(k.detach(), dim=1)).sum(1).mean()
            for q, k in zip(queries, keys, strict=True)
        )

    def step() -> torch.Tensor:
        real_a, real_b = (torch.rand(2, 3, 64, 64, device=device) * 2 - 1 for _ in range(2))
        fake = generator(torch.cat([real_a, real_b]))
        critic.requires_grad_(True)
        optimizers[1].zero_grad()
        loss_d = (critic(fake[:2].detach()).square().mean() + (critic(real_b) - 1).square().mean()) / 2
        loss_d.backward()
        optimizers[1].step()
        critic.requires_grad_(False)
        optimizers[0].zero_grad()
        loss_g = (critic(fake[:2]) - 1).square().mean() - features(real_a, fake[:2]) - features(real_b, fake[2:])
        loss_g.backward()
        optimizers[0].step()
        return loss_g.detach() + loss_d.detach()

    return Published(device, {"Generator": generator, "Critic": critic}, step, optimizers)


# ── diffusion: a table made on the host in each forward, a wrapper of one process, an average of weights ─


@contextmanager
def alone() -> Iterator[None]:
    """A process group of one."""
    if dist.is_initialized():
        yield
        return
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    store = dist.HashStore()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Denoiser(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.width, self.time = width, nn.Linear(width, width)
        self.head, self.tail = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.body = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(16, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1)) for _ in range(8)
        )

    def forward(self, x: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        half = self.width // 2
        rates = torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float32) / half).to(device=steps.device)
        angles = steps[:, None].float() * rates[None]
        time = self.time(torch.cat([angles.cos(), angles.sin()], 1))[:, :, None, None]
        x = self.head(x)
        for block in self.body:
            x = x + block(x + time)
        return self.tail(x)


def diffusion(device: torch.device) -> Published:
    """Inside `alone()`."""
    net = Denoiser().to(device)
    wrapped = DistributedDataParallel(
        net, device_ids=[device] if device.type == "cuda" else None, broadcast_buffers=False, bucket_cap_mb=128
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, weight_decay=0.0)
    average = [p.detach().clone() for p in net.parameters()]
    noise_levels = torch.linspace(0.99, 0.01, 1000, device=device)
    state: dict[str, Any] = {"average": average}

    def zero_grad() -> None:
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter.grad.detach_()
                parameter.grad.zero_()

    def log_grad_norm() -> None:
        squares = 0.0
        for parameter in net.parameters():
            squares += (parameter.grad**2).sum().item()
        state["grad_norm"] = math.sqrt(squares)

    def step() -> torch.Tensor:
        zero_grad()
        x, noise = torch.randn(16, 3, 32, 32, device=device), torch.randn(16, 3, 32, 32, device=device)
        steps = torch.randint(1000, (16,), device=device)
        level = noise_levels[steps][:, None, None, None]
        loss = (wrapped(level.sqrt() * x + (1 - level).sqrt() * noise, steps) - noise).square().mean()
        loss.backward()
        log_grad_norm()
        optimizer.step()
        with torch.no_grad():
            for target, source in zip(average, net.parameters(), strict=True):
                target.mul_(0.999).add_(source, alpha=0.001)
        return loss.detach()

    return Published(device, {"DistributedDataParallel": wrapped}, step, [optimizer], state)


# ── metric learning: fp16 inside the forward, a head that brings zeros from the host, scaled gradients ─


class Backbone(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.PReLU(width), _block(width, 2 * width, stride=2),
            *(_block(2 * width, 2 * width) for _ in range(4)),
        )  # fmt: skip
        self.fc = nn.Linear(2 * width, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, dtype=torch.float16 if x.is_cuda else torch.bfloat16):
            x = self.features(x).mean((2, 3))
        return self.fc(x.float())


class Head(nn.Module):
    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(classes, 64) * 0.01)

    def forward(self, embeddings: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        gathered = torch.zeros(labels.shape).long().to(labels.device)
        gathered.copy_(labels)
        gathered = gathered.view(-1, 1)
        positive = (gathered >= 0) & (gathered < len(self.weight))
        gathered[~positive] = -1
        logits = F.linear(F.normalize(embeddings), F.normalize(self.weight)).clamp(-1, 1)
        index = torch.where(gathered != -1)[0]
        margin = torch.zeros_like(logits)
        margin[index, gathered[index].view(-1)] = 0.3
        return F.cross_entropy(64 * (logits - margin), labels)


def metric_learning(device: torch.device) -> Published:
    """Inside `alone()`."""
    backbone = DistributedDataParallel(
        Backbone().to(device), device_ids=[device] if device.type == "cuda" else None, find_unused_parameters=True
    )
    head = Head().to(device)
    optimizer = torch.optim.SGD(
        [{"params": backbone.parameters()}, {"params": head.parameters()}], lr=0.02, momentum=0.9
    )
    scaler = torch.amp.GradScaler(device.type, growth_interval=100)
    state: dict[str, Any] = {"sum": 0.0}

    def step() -> torch.Tensor:
        x, y = torch.randn(64, 3, 56, 56, device=device), torch.randint(1000, (64,), device=device)
        loss = head(backbone(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(backbone.parameters(), 5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        state["sum"] += loss.item()
        return loss.detach()

    return Published(device, {"Backbone": backbone, "Head": head}, step, [optimizer], state)


# ── a speedrun: everything in half precision, momentum, the summed loss read once in a while ──────────


def speedrun(device: torch.device) -> Published:
    net = nn.Sequential(
        nn.Conv2d(3, 24, 2), nn.GELU(), *(layer for i in range(3) for layer in (
            nn.Conv2d(24 * 2**i, 48 * 2**i, 3, padding=1, bias=False), nn.MaxPool2d(2), nn.BatchNorm2d(48 * 2**i), nn.GELU(),
            nn.Conv2d(48 * 2**i, 48 * 2**i, 3, padding=1, bias=False), nn.BatchNorm2d(48 * 2**i), nn.GELU(),
        )), nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(192, 10, bias=False),
    )  # fmt: skip
    net = net.to(device).half().to(memory_format=torch.channels_last) if device.type == "cuda" else net
    biases = [p for p in net.parameters() if p.dim() == 1]
    weights = [p for p in net.parameters() if p.dim() > 1]
    settings: dict[str, Any] = {"lr": 0.01, "momentum": 0.85, "nesterov": True}
    optimizer = torch.optim.SGD(
        [{"params": biases, "weight_decay": 0.0}, {"params": weights, "weight_decay": 1e-3}], **settings
    )
    meter = SmoothedValue()
    state: dict[str, Any] = {"meter": meter}

    def step() -> torch.Tensor:
        x, y = torch.randn(128, 3, 32, 32, device=device), torch.randint(10, (128,), device=device)
        x = x.to(next(net.parameters()).dtype).contiguous(memory_format=torch.channels_last)
        loss = F.cross_entropy(net(x).float() / 9, y, label_smoothing=0.2)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        value = loss.item()
        if not math.isfinite(value):
            print(f"Loss is {value}, stopping training")
            sys.exit(1)
        meter.update(value)
        return loss.detach()

    return Published(device, {"Speedrun": net}, step, [optimizer], state)


TRAININGS = (temporal, flow, two_views, translation, diffusion, metric_learning, speedrun)
