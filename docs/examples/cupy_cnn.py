"""A small CNN in CuPy alone: convolution by im2col and tensordot, gradients by hand, SGD with momentum."""

import argparse

import cupy as cp
import numpy as np


def im2col(x, k, pad):
    x = cp.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    n, c, h, w = x.shape
    s = x.strides
    shape = (n, c, k, k, h - k + 1, w - k + 1)
    return cp.lib.stride_tricks.as_strided(x, shape, (s[0], s[1], s[2], s[3], s[2], s[3]))


def col2im(col, shape, pad):
    n, c, k, _, oh, ow = col.shape
    x = cp.zeros((n, c, shape[2] + 2 * pad, shape[3] + 2 * pad), dtype=col.dtype)
    for i in range(k):
        for j in range(k):
            x[:, :, i : i + oh, j : j + ow] += col[:, :, i, j]
    return x[:, :, pad : pad + shape[2], pad : pad + shape[3]]


class Conv:
    def __init__(self, c_in, c_out, k=3):
        self.w = cp.asarray(np.random.randn(c_out, c_in, k, k) * np.sqrt(2.0 / (c_in * k * k)))
        self.b = cp.zeros(c_out)
        self.k, self.pad = k, k // 2

    def forward(self, x):
        self.shape, self.col = x.shape, im2col(x, self.k, self.pad)
        y = cp.tensordot(self.col, self.w, ((1, 2, 3), (1, 2, 3))) + self.b
        self.y = y.transpose(0, 3, 1, 2)
        return cp.maximum(self.y, 0)

    def backward(self, gy):
        gy = gy * (self.y > 0)
        self.gw = cp.tensordot(gy, self.col, ((0, 2, 3), (0, 4, 5)))
        self.gb = gy.sum(axis=(0, 2, 3))
        col = cp.tensordot(self.w, gy, (0, 1))  # c k k n oh ow
        return col2im(col.transpose(3, 0, 1, 2, 4, 5), self.shape, self.pad)


class Pool:
    def forward(self, x):
        n, c, h, w = x.shape
        self.x = x.reshape(n, c, h // 2, 2, w // 2, 2)
        self.y = self.x.max(axis=(3, 5), keepdims=True)
        return self.y.reshape(n, c, h // 2, w // 2)

    def backward(self, gy):
        n, c, h, w = gy.shape
        return ((self.x == self.y) * gy.reshape(n, c, h, 1, w, 1)).reshape(n, c, 2 * h, 2 * w)


class Linear:
    def __init__(self, n_in, n_out):
        self.w, self.b = cp.asarray(np.random.randn(n_in, n_out) * np.sqrt(1.0 / n_in)), cp.zeros(n_out)

    def forward(self, x):
        self.shape, self.x = x.shape, x.reshape(len(x), -1)
        return self.x.dot(self.w) + self.b

    def backward(self, gy):
        self.gw, self.gb = self.x.T.dot(gy), gy.sum(axis=0)
        return gy.dot(self.w.T).reshape(self.shape)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--train-size", type=int, default=12800)
    args = parser.parse_args()
    np.random.seed(0)
    images = np.random.rand(args.train_size, 3, 32, 32).astype(np.float32)
    labels = np.random.randint(0, 10, args.train_size)
    images[np.arange(args.train_size), labels % 3, labels, labels] += 3.0  # something to learn
    layers = [Conv(3, 32), Pool(), Conv(32, 64), Pool(), Linear(64 * 8 * 8, 10)]
    params = [layer for layer in layers if hasattr(layer, "w")]
    velocity = [(cp.zeros_like(p.w), cp.zeros_like(p.b)) for p in params]
    for epoch in range(args.epochs):
        order = np.random.permutation(args.train_size)
        total = 0.0
        for i in range(0, args.train_size, args.batch_size):
            batch = order[i : i + args.batch_size]
            x, t = cp.asarray(images[batch]), cp.asarray(labels[batch])
            for layer in layers:
                x = layer.forward(x)
            p = cp.exp(x - x.max(axis=1, keepdims=True))
            p /= p.sum(axis=1, keepdims=True)
            rows = cp.arange(len(t))
            loss = -cp.log(p[rows, t] + 1e-12).mean()
            g = p.copy()
            g[rows, t] -= 1
            g /= len(t)
            for layer in reversed(layers):
                g = layer.backward(g)
            for layer, (vw, vb) in zip(params, velocity, strict=False):
                vw *= 0.9
                vw -= 0.01 * layer.gw
                layer.w += vw
                vb *= 0.9
                vb -= 0.01 * layer.gb
                layer.b += vb
            if i // args.batch_size % 50 == 49:
                total = float(loss)
        print(f"epoch {epoch}: loss {float(loss):.4f}", total)


if __name__ == "__main__":
    main()
