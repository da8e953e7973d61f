"""Bias + activation after a convolution, and layer scale + drop path + residual add, NHWC: `api` is the only public module."""
