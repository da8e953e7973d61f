"""BatchNorm(+add)+activation, NHWC, training: `api` is the only public module."""
