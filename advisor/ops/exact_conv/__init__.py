"""Convolution in strict fp32 on tensor cores, operands in two fp16 parts. `api` is the only public module."""
