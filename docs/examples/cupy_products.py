"""Eigenvectors of a large symmetric matrix by subspace iteration: a step is two large products, and there is nothing to gain but precision."""

import argparse

import cupy as cp
import numpy as np


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--size", type=int, default=6144)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    a = cp.asarray(rng.standard_normal((args.size, args.size), dtype=np.float32))
    a += a.T.copy()
    for step in range(args.steps):
        start = cp.asarray(rng.standard_normal((args.size, 64), dtype=np.float32))
        squared = a.dot(a)
        v = squared.dot(start)
        size = (v * v).sum()
        if step % 100 == 99:
            print(f"step {step}: {float(size) ** 0.5:.4g}")


if __name__ == "__main__":
    main()
