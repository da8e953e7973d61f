"""Digits; the optimizer is handed a closure that computes the loss, as a framework's loop does it."""

import sys
import time

import torch
from torch import nn

cuda = torch.cuda.is_available()
dev = torch.device("cuda" if cuda else "cpu")
width, batch = (64, 1024) if cuda else (16, 32)


class Digits(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classify = nn.Linear(2 * width * 49, 10)

    def forward(self, x):
        return self.classify(self.features(x).flatten(1))


class Module:
    """What to do with a batch, apart from how often."""

    def __init__(self):
        self.model = Digits().to(dev)
        if cuda:
            self.model.to(memory_format=torch.channels_last)

    def configure(self):
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)

    def loss(self, batch):
        x, y = batch
        with torch.autocast(dev.type, torch.bfloat16, enabled=cuda):
            out = self.model(x)
        return nn.functional.cross_entropy(out.float(), y, label_smoothing=0.1)


def fit(module, batches, most, seconds=240.0):
    optimizer, begun, n = module.configure(), time.monotonic(), 0
    while time.monotonic() - begun < seconds:
        for one in batches:

            def closure(one=one):
                optimizer.zero_grad()
                loss = module.loss(one)
                loss.backward()
                return loss

            loss = optimizer.step(closure)
            n += 1
            if n % 200 == 0:
                print(n, f"{loss.item():.3f}", flush=True)
            if n >= most:
                return


torch.manual_seed(0)
torch.backends.cudnn.benchmark = True
images, labels = torch.randn(8 * batch, 1, 28, 28, device=dev), torch.randint(0, 10, (8 * batch,), device=dev)
fit(
    Module(),
    list(zip(images.split(batch), labels.split(batch), strict=True)),
    int(sys.argv[1]) if len(sys.argv) > 1 else 10**9,
)
