"""Denoising diffusion: a U-Net with GroupNorm, SiLU, time embedding and attention, AdamW, an EMA of the weights, gradient norms read each step.

Full size on a GPU:  python diffusion.py
Quick on a CPU:      python diffusion.py --steps 40 --batch-size 4 --image-size 16 --width 32
"""

import argparse
import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20000)
parser.add_argument("--batch-size", type=int, default=128)
parser.add_argument("--image-size", type=int, default=64)
parser.add_argument("--width", type=int, default=128)


class Residual(nn.Module):
    def __init__(self, c_in, c_out, embedding):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(32, c_in), nn.Conv2d(c_in, c_out, 3, padding=1)
        self.embed = nn.Linear(embedding, 2 * c_out)
        self.norm2, self.conv2 = nn.GroupNorm(32, c_out), nn.Conv2d(c_out, c_out, 3, padding=1)
        self.skip = nn.Conv2d(c_in, c_out, 1) if c_in != c_out else nn.Identity()

    def forward(self, x, emb):
        h = self.conv1(F.silu(self.norm1(x)))
        scale, shift = self.embed(F.silu(emb))[:, :, None, None].chunk(2, 1)
        h = self.conv2(F.silu(self.norm2(h) * (1 + scale) + shift))
        return self.skip(x) + h


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm, self.qkv, self.out = nn.GroupNorm(32, c), nn.Conv2d(c, 3 * c, 1), nn.Conv2d(c, c, 1)

    def forward(self, x):
        b, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(b, 3, 4, c // 4, h * w).transpose(3, 4).unbind(1)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(2, 3).reshape(b, c, h, w)
        return x + self.out(mixed)


class UNet(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c, e = c, 4 * c
        self.time = nn.Sequential(nn.Linear(c, e), nn.SiLU(), nn.Linear(e, e))
        self.first = nn.Conv2d(3, c, 3, padding=1)
        self.down1, self.shrink1 = Residual(c, c, e), nn.Conv2d(c, c, 3, 2, 1)
        self.down2, self.shrink2 = Residual(c, 2 * c, e), nn.Conv2d(2 * c, 2 * c, 3, 2, 1)
        self.middle1, self.attend, self.middle2 = Residual(2 * c, 2 * c, e), Attention(2 * c), Residual(2 * c, 2 * c, e)
        self.up2, self.up1 = Residual(4 * c, c, e), Residual(2 * c, c, e)
        self.last = nn.Sequential(nn.GroupNorm(32, c), nn.SiLU(), nn.Conv2d(c, 3, 3, padding=1))

    def forward(self, x, t):
        rates = torch.exp(-math.log(10000) * torch.arange(self.c // 2, device=x.device) / (self.c // 2))
        angles = t[:, None].float() * rates
        emb = self.time(torch.cat((angles.cos(), angles.sin()), 1))
        a = self.down1(self.first(x), emb)
        b = self.down2(self.shrink1(a), emb)
        h = self.middle2(self.attend(self.middle1(self.shrink2(b), emb)), emb)
        h = self.up2(torch.cat((F.interpolate(h, scale_factor=2.0), b), 1), emb)
        h = self.up1(torch.cat((F.interpolate(h, scale_factor=2.0), a), 1), emb)
        return self.last(h)


def main():
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = UNet(args.width).to(device)
    ema = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    kept = torch.cos(torch.linspace(0, math.pi / 2, 1001))[:1000] ** 2
    images = F.interpolate(torch.rand(256, 3, 4, 4) * 2 - 1, size=(args.image_size,) * 2, mode="bilinear")
    for step in range(args.steps):
        x = images[torch.randint(0, 256, (args.batch_size,))].to(device)
        t = torch.randint(0, 1000, (args.batch_size,))
        noise = torch.randn_like(x)
        share = kept[t].to(device).view(-1, 1, 1, 1)
        optimizer.zero_grad()
        loss = F.mse_loss(model(share.sqrt() * x + (1 - share).sqrt() * noise, t.to(device)), noise)
        loss.backward()
        norm = math.sqrt(sum((p.grad**2).sum().item() for p in model.parameters()))
        optimizer.step()
        for old, new in zip(ema.parameters(), model.parameters(), strict=False):
            old.detach().mul_(0.9999).add_(new.detach(), alpha=1 - 0.9999)
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.4f}, gradient {norm:.3f}")


if __name__ == "__main__":
    main()
