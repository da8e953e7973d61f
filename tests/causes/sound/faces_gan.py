"""A GAN: two networks and two optimizers, whose steps take turns in one function."""

import itertools
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

on_gpu = torch.cuda.is_available()
device = "cuda" if on_gpu else "cpu"
base, batch = (64, 256) if on_gpu else (8, 8)


def upwards(i, o):
    return [nn.ConvTranspose2d(i, o, 4, 2, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU(True)]


def downwards(i, o):
    return [nn.Conv2d(i, o, 4, 2, 1, bias=False), nn.BatchNorm2d(o), nn.LeakyReLU(0.2, True)]


def networks():
    painter = nn.Sequential(
        nn.ConvTranspose2d(64, 4 * base, 4, bias=False),
        nn.BatchNorm2d(4 * base),
        nn.ReLU(True),
        *upwards(4 * base, 2 * base),
        *upwards(2 * base, base),
        nn.ConvTranspose2d(base, 3, 4, 2, 1),
        nn.Tanh(),
    )
    critic = nn.Sequential(
        nn.Conv2d(3, base, 4, 2, 1),
        nn.LeakyReLU(0.2, True),
        *downwards(base, 2 * base),
        *downwards(2 * base, 4 * base),
        nn.Conv2d(4 * base, 1, 4),
        nn.Flatten(0),
    )
    return painter.to(device), critic.to(device)


def play(painter, critic, opt_p, opt_c, real):
    with torch.autocast("cuda", torch.bfloat16, enabled=on_gpu):
        fake = painter(torch.randn(len(real), 64, 1, 1, device=device))
        on_real, on_fake = critic(real), critic(fake.detach())
    loss_c = F.softplus(-on_real.float()).mean() + F.softplus(on_fake.float()).mean()
    opt_c.zero_grad()
    loss_c.backward()
    opt_c.step()
    with torch.autocast("cuda", torch.bfloat16, enabled=on_gpu):
        verdict = critic(fake)
    loss_p = F.softplus(-verdict.float()).mean()
    opt_p.zero_grad()
    loss_p.backward(inputs=list(painter.parameters()))
    opt_p.step()
    return loss_c.detach(), loss_p.detach()


def main(most):
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    painter, critic = networks()
    if on_gpu:
        painter, critic = (net.to(memory_format=torch.channels_last) for net in (painter, critic))
    opt_p, opt_c = (torch.optim.Adam(net.parameters(), 2e-4, (0.5, 0.999), fused=True) for net in (painter, critic))
    faces = [torch.randn(batch, 3, 32, 32, device=device) for _ in range(8)]
    if on_gpu:
        faces = [face.contiguous(memory_format=torch.channels_last) for face in faces]
    until = time.time() + 240
    for n in itertools.count(1):
        losses = play(painter, critic, opt_p, opt_c, faces[n % 8])
        if n % 100 == 0:
            print(n, *(round(float(loss), 3) for loss in losses), flush=True)
        if n >= most or time.time() > until:
            break


main(int(sys.argv[1]) if len(sys.argv) > 1 else 10**9)
