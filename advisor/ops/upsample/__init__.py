"""Bilinear and nearest upsampling, NHWC, written into the concatenation that follows: `api` is the only public module."""
