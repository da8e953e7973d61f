"""A CNN of PyTorch's whose images are made by CuPy in each step: noise and blur on the GPU, and back and forth by way of the host."""

import argparse

import cupy as cp
import numpy as np
import torch
from torch import nn


def degrade(images, noise):
    """Blur and noise, by CuPy: (N, 1, H, W) fp32 on the device."""
    blurred = images.copy()
    for axis in (2, 3):
        blurred = (cp.roll(blurred, 1, axis) + 2 * blurred + cp.roll(blurred, -1, axis)) / 4
    return blurred + noise * cp.random.randn(*images.shape).astype(cp.float32)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=64)
    args = parser.parse_args()
    device = torch.device("cuda")
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 1, 3, padding=1),
    ).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    rng = np.random.default_rng(0)
    clean = cp.asarray(rng.random((1024, 1, 64, 64), dtype=np.float32))
    for step in range(args.steps):
        batch = clean[cp.asarray(rng.integers(0, len(clean), args.batch_size))]
        x = torch.from_numpy(cp.asnumpy(degrade(batch, 0.1))).to(device)  # through the host
        t = torch.from_dlpack(batch)
        loss = ((model(x) - t) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 99:
            print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
