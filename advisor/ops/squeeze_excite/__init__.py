"""Squeeze-and-excite: global pool, two small products, gate, scale; NHWC."""
