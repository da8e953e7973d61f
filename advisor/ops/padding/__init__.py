"""Padding with an image's own values (reflect, replicate, circular), NHWC: `api` is the only public module."""
