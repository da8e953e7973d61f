# EXPECT: moving-average-each-step
"""A GAN whose generator is averaged into a dict of tensors, name by name."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

on_gpu = torch.cuda.is_available()
device = torch.device("cuda" if on_gpu else "cpu")
c, size = (32, 64) if on_gpu else (8, 8)


class Painter(nn.Module):
    def __init__(self):
        super().__init__()
        self.grow = nn.ModuleList([nn.Conv2d(c, c, 3, padding=1, bias=False) for _ in range(10)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(c) for _ in range(10)])
        self.rgb = nn.Conv2d(c, 3, 1)

    def forward(self, z):
        for conv, norm in zip(self.grow, self.norms, strict=True):
            z = z + F.relu(norm(conv(z)))
        return torch.tanh(self.rgb(z))


class Shadow:
    def __init__(self, network, decay):
        self.decay = decay
        self.values = {name: value.clone() for name, value in network.state_dict().items()}

    @torch.no_grad()
    def follow(self, network):
        for name, value in network.named_parameters():
            self.values[name] = self.decay * self.values[name] + (1.0 - self.decay) * value


def adversary():
    return nn.Sequential(
        nn.Conv2d(3, c, 3, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(c, c, 3, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.LazyLinear(1),
    )


painter, critic = Painter().to(device), adversary().to(device)
critic(torch.zeros(1, 3, 16, 16, device=device))
shadow = Shadow(painter, 0.995)
optimizers = [torch.optim.Adam(net.parameters(), 2e-4) for net in (painter, critic)]
n = 0
limit = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
while n < limit:
    real = torch.randn(size, 3, 16, 16, device=device)
    fake = painter(torch.randn(size, c, 16, 16, device=device))
    for turn, optimizer in enumerate(optimizers):
        score = critic(fake if turn == 0 else fake.detach())
        loss = F.softplus(-score).mean() if turn == 0 else F.softplus(score).mean() + F.softplus(-critic(real)).mean()
        optimizer.zero_grad()
        loss.backward(inputs=[p for group in optimizer.param_groups for p in group["params"]])
        optimizer.step()
    shadow.follow(painter)
    n += 1
    if n % 100 == 0:
        print(n, loss.item(), flush=True)
