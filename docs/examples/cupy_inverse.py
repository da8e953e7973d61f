"""An inverse problem: undersampled MRI of several coils, reconstructed by gradient steps with a smoothing convolution between them."""

import argparse

import cupy as cp
import numpy as np


def phantom(size, batch):
    y, x = np.mgrid[-1 : 1 : size * 1j, -1 : 1 : size * 1j]
    rng = np.random.default_rng(0)
    image = np.zeros((batch, size, size))
    for k in range(batch):
        for _ in range(8):
            a, b, r = rng.uniform(-0.6, 0.6), rng.uniform(-0.6, 0.6), rng.uniform(0.05, 0.3)
            image[k] += rng.uniform(0.2, 1.0) * ((x - a) ** 2 + (y - b) ** 2 < r * r)
    return image


def laplace(x, stencil):
    padded = cp.pad(x, ((0, 0), (1, 1), (1, 1)), mode="edge")
    total = cp.zeros_like(x)
    for i in range(3):
        for j in range(3):
            total += stencil[i][j] * padded[:, i : i + x.shape[1], j : j + x.shape[2]]
    return total


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--coils", type=int, default=8)
    parser.add_argument("--batch", type=int, default=2)
    args = parser.parse_args()
    size, coils = args.size, args.coils
    truth = cp.asarray(phantom(size, args.batch))
    y, x = np.mgrid[-1 : 1 : size * 1j, -1 : 1 : size * 1j]
    angles = 2 * np.pi * np.arange(coils) / coils
    maps = cp.asarray(np.stack([np.exp(-((x - np.cos(a)) ** 2 + (y - np.sin(a)) ** 2)) for a in angles]))
    mask = cp.asarray(np.random.default_rng(1).random((size, size)) < 0.3)
    data = cp.fft.fft2(truth[:, None] * maps, norm="ortho") * mask
    image = cp.zeros_like(truth)
    momentum = cp.zeros_like(truth)
    stencil = [[0.05, 0.2, 0.05], [0.2, -1.0, 0.2], [0.05, 0.2, 0.05]]
    for step in range(args.steps):
        error = (cp.fft.fft2(image[:, None] * maps, norm="ortho") - data) * mask
        gradient = (cp.fft.ifft2(error, norm="ortho").real * maps).sum(axis=1)
        loss = (cp.abs(error) ** 2).sum()
        momentum = 0.8 * momentum - 0.3 * (gradient - 0.01 * laplace(image, stencil))
        image = cp.maximum(image + momentum, 0.0)
        if step % 100 == 99:
            print(f"step {step}: residual {float(loss):.4f}, off by {float(cp.abs(image - truth).mean()):.5f}")


if __name__ == "__main__":
    main()
