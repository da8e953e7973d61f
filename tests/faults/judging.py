"""The numeric gate's word on a change of a small training step, on any device."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from wrong_kernels import MARGIN, AffineReLU, Compile, Kernels

from advisor.core.findings import Semantics
from advisor.core.verdict import Check
from advisor.loop.training import RootModule, Training
from advisor.trials.numerics.gate import Gate

CHANNELS, SIZE, CLASSES = 16, 8, 10


class Net(nn.Module):
    """A convolution, what `wrong_kernels` computes, and a classifier; `neighbour` lies behind room for one result."""

    def __init__(self, batch: int, device: str) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, CHANNELS, 3, padding=1)
        self.scale, self.shift = nn.Parameter(torch.rand(CHANNELS) + 0.5), nn.Parameter(torch.randn(CHANNELS))
        self.fc = nn.Linear(CHANNELS * SIZE * SIZE, CLASSES)
        self.to(device)
        room = torch.zeros(batch * CHANNELS * SIZE * SIZE + MARGIN, device=device)
        self.register_buffer("neighbour", room[-MARGIN:])
        self.kernels: Kernels | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        if self.kernels is None:
            x = F.relu(x * self.scale[:, None, None] + self.shift[:, None, None])
        else:
            x = AffineReLU.apply(x, self.scale, self.shift, self.kernels)
        return self.fc(x.flatten(1))


class Judged:
    """A step of the net with everything that the gate wants of it."""

    def __init__(self, device: str, batch: int = 16) -> None:
        torch.manual_seed(0)
        self.net = Net(batch, device)
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05)
        self.root = RootModule(module=self.net, name="Net")
        training = Training(device=torch.device(device), optimizers=[optimizer], roots=[self.root])
        self.gate = Gate(training)
        self.gate.arm()
        x, y = torch.randn(batch, 3, SIZE, SIZE, device=device), torch.randint(CLASSES, (batch,), device=device)
        out = self.net(x)
        out.retain_grad()
        F.cross_entropy(out, y).backward()
        optimizer.step()
        self.root.args, self.root.output, self.root.output_grads = (x,), out, (out.grad.clone(),)
        assert self.gate.captured()

    def with_kernels(self, compile_: Compile, stream: Callable[[], object], fault: str) -> Check:
        """The check of `wrong_kernels` with this fault in them."""
        kernels = Kernels(compile_, stream, fault, self.net.neighbour)

        def switch(to: Kernels | None) -> Callable[[], None]:
            return lambda: setattr(self.net, "kernels", to)

        return self.gate.judge(switch(kernels), switch(None), Semantics.REASSOCIATED).check

    def with_forward(self, change: Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]]) -> Check:
        """The check of a change around the whole forward."""
        changed = change(type(self.net).forward.__get__(self.net))

        def on() -> None:
            self.net.__dict__["forward"] = changed

        return self.gate.judge(on, lambda: self.net.__dict__.pop("forward", None), Semantics.REASSOCIATED).check
