"""A convolutional VAE; a function makes the step, a loop calls it."""

import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

has_gpu = torch.cuda.is_available()
device = torch.device("cuda" if has_gpu else "cpu")
c, n_batch, side = (64, 256, 64) if has_gpu else (8, 16, 32)


class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(
            nn.Conv2d(3, c, 4, 2, 1), nn.SiLU(), nn.Conv2d(c, 2 * c, 4, 2, 1), nn.SiLU(), nn.Conv2d(2 * c, 16, 3, 1, 1)
        )
        self.decode = nn.Sequential(
            nn.Conv2d(8, 2 * c, 3, 1, 1),
            nn.SiLU(),
            nn.ConvTranspose2d(2 * c, c, 4, 2, 1),
            nn.SiLU(),
            nn.ConvTranspose2d(c, 3, 4, 2, 1),
        )

    def forward(self, x):
        mean, spread = self.encode(x).chunk(2, 1)
        code = mean + torch.randn_like(mean) * (0.5 * spread).exp()
        return self.decode(code), mean, spread


def make_step(model, optimizer):
    def step(x):
        with torch.autocast("cuda", torch.bfloat16, enabled=has_gpu):
            again, mean, spread = model(x)
        mean, spread = mean.float(), spread.float()
        divergence = -0.5 * (1 + spread - mean.square() - spread.exp()).mean()
        loss = F.mse_loss(again.float(), x) + 1e-3 * divergence
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def main(limit):
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    model = Vae().to(device)
    data = [torch.rand(n_batch, 3, side, side, device=device) for _ in range(8)]
    if has_gpu:
        model = model.to(memory_format=torch.channels_last)
        data = [x.contiguous(memory_format=torch.channels_last) for x in data]
    step = make_step(model, torch.optim.Adam(model.parameters(), 1e-3, fused=True))
    until = time.time() + 240
    for i in range(limit):
        loss = step(data[i % 8])
        if i % 100 == 99:
            print(i + 1, f"{loss.item():.4f}", flush=True)
        if time.time() > until:
            break


main(int(sys.argv[1]) if len(sys.argv) > 1 else 10**9)
