"""A CNN on an autograd of its own: values that remember how they were made, closures for gradients, Adam over a dictionary of parameters."""

import argparse
import itertools

import cupy as cp
import numpy as np


class Value:
    def __init__(self, data, parents=(), backward=None):
        self.data, self.parents, self.backward_of, self.grad = data, parents, backward, None

    def add(self, gradient):
        self.grad = gradient if self.grad is None else self.grad + gradient

    def backward(self):
        order, seen = [], set()

        def visit(value):
            if id(value) not in seen:
                seen.add(id(value))
                for parent in value.parents:
                    visit(parent)
                order.append(value)

        visit(self)
        self.grad = cp.ones_like(self.data)
        for value in reversed(order):
            if value.backward_of is not None:
                value.backward_of(value.grad)
                value.backward_of, value.parents = None, ()


def windows(x, k, stride):
    s = x.strides
    h, w = (x.shape[2] - k) // stride + 1, (x.shape[3] - k) // stride + 1
    shape = (x.shape[0], x.shape[1], k, k, h, w)
    return cp.lib.stride_tricks.as_strided(x, shape, (s[0], s[1], s[2], s[3], s[2] * stride, s[3] * stride))


def conv(x, w, stride):
    k = w.data.shape[2]
    padded = cp.pad(x.data, ((0, 0), (0, 0), (1, 1), (1, 1)))
    col = windows(padded, k, stride)
    y = cp.tensordot(col, w.data, ((1, 2, 3), (1, 2, 3))).transpose(0, 3, 1, 2)

    def backward(g):
        w.add(cp.tensordot(g, col, ((0, 2, 3), (0, 4, 5))))
        if x.parents:
            gcol = cp.tensordot(w.data, g, (0, 1)).transpose(3, 0, 1, 2, 4, 5)
            gx = cp.zeros_like(padded)
            for i in range(k):
                for j in range(k):
                    gx[:, :, i : i + stride * g.shape[2] : stride, j : j + stride * g.shape[3] : stride] += gcol[
                        :, :, i, j
                    ]
            x.add(gx[:, :, 1:-1, 1:-1])

    return Value(y, (x, w), backward)


def norm(x, gamma, beta):
    mean, var = x.data.mean(axis=(0, 2, 3), keepdims=True), x.data.var(axis=(0, 2, 3), keepdims=True)
    scale = 1.0 / cp.sqrt(var + 1e-5)
    xhat = (x.data - mean) * scale
    n = x.data.size // x.data.shape[1]

    def backward(g):
        gg, gb = (g * xhat).sum(axis=(0, 2, 3), keepdims=True), g.sum(axis=(0, 2, 3), keepdims=True)
        gamma.add(gg)
        beta.add(gb)
        x.add(gamma.data * scale * (g - gb / n - xhat * gg / n))

    return Value(xhat * gamma.data + beta.data, (x, gamma, beta), backward)


def leaky(x):
    y = x.data.copy()
    y[x.data <= 0] *= 0.1

    def backward(g):
        x.add(cp.where(x.data > 0, g, 0.1 * g))

    return Value(y, (x,), backward)


def head(x, w):
    pooled = x.data.mean(axis=(2, 3))

    def backward(g):
        w.add(pooled.T.dot(g))
        x.add(cp.broadcast_to(g.dot(w.data.T)[:, :, None, None] / (x.data.shape[2] * x.data.shape[3]), x.data.shape))

    return Value(pooled.dot(w.data), (x, w), backward)


def cross_entropy(x, t):
    z = x.data - x.data.max(axis=1, keepdims=True)
    log_p = z - cp.log(cp.exp(z).sum(axis=1, keepdims=True))

    def backward(g):
        x.add(g * (cp.exp(log_p) - t) / len(t))

    return Value(-(t * log_p).sum() / len(t), (x,), backward)


class Adam:
    def __init__(self, parameters, lr):
        self.parameters, self.lr, self.t = parameters, lr, 0
        self.m = {name: cp.zeros_like(p.data) for name, p in parameters.items()}
        self.v = {name: cp.zeros_like(p.data) for name, p in parameters.items()}

    def step(self):
        self.t += 1
        rate = self.lr * (1 - 0.999**self.t) ** 0.5 / (1 - 0.9**self.t)
        for name, p in self.parameters.items():
            m, v = self.m[name], self.v[name]
            m += 0.1 * (p.grad - m)
            v += 0.001 * (p.grad * p.grad - v)
            p.data -= rate * m / (cp.sqrt(v) + 1e-8)
            p.grad = None


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=128)
    args = parser.parse_args()
    np.random.seed(0)
    widths = [3, 32, 64, 128]
    parameters = {"head": Value(cp.asarray(0.05 * np.random.randn(128, 10)))}
    for i, (a, b) in enumerate(itertools.pairwise(widths)):
        parameters[f"w{i}"] = Value(cp.asarray(np.random.randn(b, a, 3, 3) * np.sqrt(2.0 / (9 * a))))
        parameters[f"gamma{i}"], parameters[f"beta{i}"] = Value(cp.ones((1, b, 1, 1))), Value(cp.zeros((1, b, 1, 1)))
    optimizer = Adam(parameters, 1e-3)
    labels = np.random.randint(0, 10, 4096)
    images = np.random.rand(len(labels), 3, 32, 32).astype(np.float32)
    images[np.arange(len(labels)), 0, 3 * labels, :] += 1.0  # something to learn
    wanted = np.eye(10, dtype=np.float32)[labels]
    for step in range(args.steps):
        batch = np.random.randint(0, len(labels), args.batch_size)
        x, t = Value(cp.asarray(images[batch])), cp.asarray(wanted[batch])
        for i in range(3):
            x = leaky(norm(conv(x, parameters[f"w{i}"], 2), parameters[f"gamma{i}"], parameters[f"beta{i}"]))
        loss = cross_entropy(head(x, parameters["head"]), t)
        loss.backward()
        optimizer.step()
        if step % 100 == 99:
            print(f"step {step}: loss {float(loss.data):.4f}")


if __name__ == "__main__":
    main()
