"""Grouped 3 x 3 convolution, NHWC, on tensor cores: forward, data gradient, weight gradient. `api` is the only public module."""
