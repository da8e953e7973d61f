"""Depthwise convolution with taps of 11 to 63, on tensor cores. `api` is the only public module."""
