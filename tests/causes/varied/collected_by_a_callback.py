# EXPECT: garbage-collected-in-loop|cache-emptied-in-loop
"""Callbacks around each batch; one of them frees memory."""

import gc
import sys

import torch
from torch import nn

cuda = torch.cuda.is_available()
device = torch.device("cuda:0" if cuda else "cpu")


class Callback:
    def before(self, loop): ...
    def after(self, loop): ...


class Tidy(Callback):
    def after(self, loop):
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()


class Say(Callback):
    def after(self, loop):
        if loop.count % 100 == 0:
            print(loop.count, loop.loss.item(), flush=True)


class Loop:
    def __init__(self, net, opt, callbacks):
        self.net, self.opt, self.callbacks, self.count, self.loss = net, opt, callbacks, 0, None

    def tell(self, when):
        for callback in self.callbacks:
            getattr(callback, when)(self)

    def run(self, batches):
        for x, y in batches:
            self.tell("before")
            self.opt.zero_grad()
            self.loss = nn.functional.mse_loss(self.net(x), y)
            self.loss.backward()
            self.opt.step()
            self.count += 1
            self.tell("after")


def batches(limit):
    n = 64 if cuda else 8
    for _ in range(limit):
        x = torch.randn(n, 1, 32, 32, device=device)
        yield x, x.roll(1, 2)


c = 32 if cuda else 8
net = nn.Sequential(
    nn.Conv2d(1, c, 3, padding=1), nn.Tanh(), nn.Conv2d(c, c, 3, padding=1), nn.Tanh(), nn.Conv2d(c, 1, 1)
).to(device)
Loop(net, torch.optim.Adam(net.parameters()), [Tidy(), Say()]).run(
    batches(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000)
)
