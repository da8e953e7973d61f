"""First convolution (3 input channels) on the tensor cores, NHWC: forward, weight gradient. `api` is the only public module."""
