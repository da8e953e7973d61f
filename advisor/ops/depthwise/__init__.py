"""Depthwise 2-D convolution, NHWC: forward, data gradient, weight gradient. `api` is the only public module."""
