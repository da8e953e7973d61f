"""A CNN whose convolutions are RawKernels of its own, with the image's tile in shared memory; gradients by im2col, plain SGD."""

import argparse

import cupy as cp
import numpy as np

SOURCE = r"""
extern "C" __global__ void conv(const float* x, const float* w, float* y, int c_in, int c_out, int h, int width) {
    __shared__ float tile[18][18];
    int o = blockIdx.z % c_out, n = blockIdx.z / c_out;
    int row = blockIdx.y * 16 + threadIdx.y, column = blockIdx.x * 16 + threadIdx.x;
    float sum = 0.0f;
    for (int c = 0; c < c_in; ++c) {
        const float* image = x + (n * c_in + c) * h * width;
        for (int i = threadIdx.y; i < 18; i += 16)
            for (int j = threadIdx.x; j < 18; j += 16) {
                int a = blockIdx.y * 16 + i - 1, b = blockIdx.x * 16 + j - 1;
                tile[i][j] = (a >= 0 && a < h && b >= 0 && b < width) ? image[a * width + b] : 0.0f;
            }
        __syncthreads();
        for (int i = 0; i < 3; ++i)
            for (int j = 0; j < 3; ++j)
                sum += tile[threadIdx.y + i][threadIdx.x + j] * w[((o * c_in + c) * 3 + i) * 3 + j];
        __syncthreads();
    }
    if (row < h && column < width) y[((n * c_out + o) * h + row) * width + column] = sum;
}
"""
kernel = cp.RawKernel(SOURCE, "conv")


def conv(x, w):
    n, c_in, h, width = x.shape
    y = cp.empty((n, w.shape[0], h, width), dtype=cp.float32)
    blocks = ((width + 15) // 16, (h + 15) // 16, n * w.shape[0])
    kernel(blocks, (16, 16), (x, w, y, np.int32(c_in), np.int32(w.shape[0]), np.int32(h), np.int32(width)))
    return y


def columns(x):
    _n, _c, h, w = x.shape
    x = cp.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    return cp.stack([x[:, :, i : i + h, j : j + w] for i in range(3) for j in range(3)], axis=2)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=64)
    args = parser.parse_args()
    np.random.seed(0)
    shapes = [(32, 1, 3, 3), (64, 32, 3, 3)]
    weights = [cp.asarray((np.random.randn(*s) * np.sqrt(2.0 / (9 * s[1]))).astype(np.float32)) for s in shapes]
    last = cp.asarray((np.random.randn(64, 10) * 0.1).astype(np.float32))
    labels = np.random.randint(0, 10, 4096)
    images = np.random.rand(len(labels), 1, 32, 32).astype(np.float32)
    images[np.arange(len(labels)), 0, 3 * labels, :] += 1.0  # something to learn
    wanted = np.eye(10, dtype=np.float32)[labels]
    for step in range(args.steps):
        batch = np.random.randint(0, len(labels), args.batch_size)
        x, t = cp.asarray(images[batch]), cp.asarray(wanted[batch])
        inputs, outputs = [], []
        for w in weights:
            inputs.append(x)
            outputs.append(conv(x, w))
            x = cp.maximum(outputs[-1], 0)
        pooled = x.mean(axis=(2, 3))
        logits = pooled.dot(last)
        p = cp.exp(logits - logits.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        loss = -(t * cp.log(p + 1e-9)).sum() / len(t)
        g = (p - t) / len(t)
        g_last = pooled.T.dot(g)
        g = cp.broadcast_to(g.dot(last.T)[:, :, None, None] / (32 * 32), x.shape)
        gradients = []
        for k in (1, 0):
            g = g * (outputs[k] > 0)
            gradients.append(cp.tensordot(g, columns(inputs[k]), ((0, 2, 3), (0, 3, 4))).reshape(shapes[k]))
            flipped = cp.ascontiguousarray(weights[k].transpose(1, 0, 2, 3)[:, :, ::-1, ::-1])
            if k:
                g = conv(cp.ascontiguousarray(g), flipped)
        last -= 0.5 * g_last
        for w, gw in zip(weights, reversed(gradients), strict=False):
            w -= 0.5 * gw
        if step % 100 == 99:
            print(f"step {step}: loss {float(loss):.4f}")


if __name__ == "__main__":
    main()
