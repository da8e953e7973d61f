"""CycleGAN: two generators with InstanceNorm and reflection padding, two PatchGANs, two Adams, pools of old images.

Full size on a GPU:  python cyclegan.py
Quick on a CPU:      python cyclegan.py --steps 40 --image-size 32 --width 4 --blocks 1
"""

import argparse
import itertools
import random

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20000)
parser.add_argument("--batch-size", type=int, default=1)
parser.add_argument("--image-size", type=int, default=256)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--blocks", type=int, default=9)


class Residual(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.body = nn.Sequential(
            nn.ReflectionPad2d(1), nn.Conv2d(c, c, 3), nn.InstanceNorm2d(c), nn.ReLU(True),
            nn.ReflectionPad2d(1), nn.Conv2d(c, c, 3), nn.InstanceNorm2d(c),
        )  # fmt: skip

    def forward(self, x):
        return x + self.body(x)


def generator(c, blocks):
    return nn.Sequential(
        nn.ReflectionPad2d(3), nn.Conv2d(3, c, 7), nn.InstanceNorm2d(c), nn.ReLU(True),
        nn.Conv2d(c, 2 * c, 3, 2, 1), nn.InstanceNorm2d(2 * c), nn.ReLU(True),
        nn.Conv2d(2 * c, 4 * c, 3, 2, 1), nn.InstanceNorm2d(4 * c), nn.ReLU(True),
        *(Residual(4 * c) for _ in range(blocks)),
        nn.ConvTranspose2d(4 * c, 2 * c, 3, 2, 1, 1), nn.InstanceNorm2d(2 * c), nn.ReLU(True),
        nn.ConvTranspose2d(2 * c, c, 3, 2, 1, 1), nn.InstanceNorm2d(c), nn.ReLU(True),
        nn.ReflectionPad2d(3), nn.Conv2d(c, 3, 7), nn.Tanh(),
    )  # fmt: skip


def discriminator(c):
    return nn.Sequential(
        nn.Conv2d(3, c, 4, 2, 1), nn.LeakyReLU(0.2, True),
        nn.Conv2d(c, 2 * c, 4, 2, 1), nn.InstanceNorm2d(2 * c), nn.LeakyReLU(0.2, True),
        nn.Conv2d(2 * c, 4 * c, 4, 1, 1), nn.InstanceNorm2d(4 * c), nn.LeakyReLU(0.2, True),
        nn.Conv2d(4 * c, 1, 4, 1, 1),
    )  # fmt: skip


class Pool:
    """Of the latest images, sometimes an older one is shown again."""

    def __init__(self):
        self.images = []

    def __call__(self, image):
        self.images = [*self.images[-49:], image.detach()]
        return random.choice(self.images) if random.random() > 0.5 else self.images[-1]


def squares(logits, real):
    return F.mse_loss(logits, torch.full_like(logits, float(real)))


def main():
    args = parser.parse_args()
    torch.manual_seed(0)
    random.seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = (args.image_size, args.image_size)
    side_a = F.interpolate(torch.rand(32, 3, 8, 8) * 2 - 1, size=size, mode="nearest")
    side_b = F.interpolate(torch.rand(32, 3, 8, 8) * 2 - 1, size=size, mode="bilinear")
    to_b, to_a = (generator(args.width, args.blocks).to(device) for _ in range(2))
    is_a, is_b = (discriminator(args.width).to(device) for _ in range(2))
    both = itertools.chain(to_b.parameters(), to_a.parameters())
    optimizer_g = torch.optim.Adam(both, lr=2e-4, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(itertools.chain(is_a.parameters(), is_b.parameters()), lr=2e-4, betas=(0.5, 0.999))
    pool_a, pool_b = Pool(), Pool()
    for step in range(args.steps):
        a = side_a[torch.randint(0, 32, (args.batch_size,))].to(device)
        b = side_b[torch.randint(0, 32, (args.batch_size,))].to(device)
        for net in (is_a, is_b):
            net.requires_grad_(False)
        optimizer_g.zero_grad()
        fake_b, fake_a = to_b(a), to_a(b)
        cycle = F.l1_loss(to_a(fake_b), a) + F.l1_loss(to_b(fake_a), b)
        same = F.l1_loss(to_b(b), b) + F.l1_loss(to_a(a), a)
        loss_g = squares(is_b(fake_b), 1) + squares(is_a(fake_a), 1) + 10 * cycle + 5 * same
        loss_g.backward()
        optimizer_g.step()
        for net in (is_a, is_b):
            net.requires_grad_(True)
        optimizer_d.zero_grad()
        for net, real, fake in ((is_a, a, pool_a(fake_a)), (is_b, b, pool_b(fake_b))):
            loss_d = 0.5 * (squares(net(real), 1) + squares(net(fake), 0))
            loss_d.backward()
        optimizer_d.step()
        if step % 20 == 0:
            print(f"step {step}: loss {loss_g.item():.3f}, of the last discriminator {loss_d.item():.3f}")


if __name__ == "__main__":
    main()
