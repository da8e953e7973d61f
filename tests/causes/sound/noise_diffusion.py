"""A denoiser with group norms and SiLU, conditioned on time; gradients are clipped; a learning-rate schedule."""

import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

on_gpu = torch.cuda.is_available()
dev = torch.device("cuda" if on_gpu else "cpu")
ch, batch, side = (128, 64, 32) if on_gpu else (16, 4, 16)


class Res(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.n1, self.c1 = nn.GroupNorm(8, c), nn.Conv2d(c, c, 3, padding=1)
        self.n2, self.c2 = nn.GroupNorm(8, c), nn.Conv2d(c, c, 3, padding=1)
        self.emb = nn.Linear(64, c)

    def forward(self, x, t):
        h = self.c1(F.silu(self.n1(x))) + self.emb(t)[:, :, None, None]
        return x + self.c2(F.silu(self.n2(h)))


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, 64), nn.SiLU(), nn.Linear(64, 64))
        self.inp, self.out = nn.Conv2d(3, ch, 3, padding=1), nn.Conv2d(ch, 3, 3, padding=1)
        self.blocks = nn.ModuleList([Res(ch) for _ in range(4)])

    def forward(self, x, t):
        t = self.time(t[:, None])
        x = self.inp(x)
        for block in self.blocks:
            x = block(x, t)
        return self.out(x)


class Run:
    def __init__(self):
        torch.manual_seed(0)
        torch.backends.cudnn.benchmark = True
        self.model = Denoiser().to(dev)
        self.images = torch.randn(8, batch, 3, side, side, device=dev)
        if on_gpu:
            self.model = self.model.to(memory_format=torch.channels_last)
        self.opt = torch.optim.AdamW(self.model.parameters(), 2e-4, fused=True)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, 100_000)

    def steps(self):
        n = 0
        while True:
            clean = self.images[n % 8]
            if on_gpu:
                clean = clean.contiguous(memory_format=torch.channels_last)
            t = torch.rand(batch, device=dev)
            noise = torch.randn_like(clean)
            mixed = torch.lerp(clean, noise, t[:, None, None, None])
            with torch.autocast(dev.type, torch.bfloat16, enabled=on_gpu):
                guess = self.model(mixed, t)
            loss = F.mse_loss(guess.float(), noise)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.opt.step()
            self.opt.zero_grad(set_to_none=True)
            self.schedule.step()
            n += 1
            yield n, loss.detach()


limit, until = int(sys.argv[1]) if len(sys.argv) > 1 else 10**9, time.time() + 240
for n, loss in Run().steps():
    if n % 100 == 0:
        print(n, f"{loss.item():.3f}", flush=True)
    if n >= limit or time.time() > until:
        break
